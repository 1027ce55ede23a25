package discovery

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/nametap/nametap/discovery/auth"
)

// An endpoint is an address on which ADS is served.
type endpoint struct {
	flag     string // that names the address
	listener net.Listener
	clients  *auth.Clients // who may connect; nil lets everyone, without TLS
	server   *grpc.Server
}

// listen opens the listeners. Close them after an error of another part.
func (s *Server) listen(ctx context.Context) ([]*endpoint, error) {
	all := []*endpoint{
		{flag: "--grpc-addr", clients: nil},
		{flag: "--tls-addr", clients: s.identities},
	}
	var open []*endpoint
	for i, addr := range []string{s.cfg.GRPCAddr, s.cfg.TLSAddr} {
		if addr == "" {
			continue
		}
		var lc net.ListenConfig
		ln, err := lc.Listen(ctx, "tcp", addr)
		if err != nil {
			closeAll(open)
			return nil, fmt.Errorf("serving ADS on %s (%s): %w", addr, all[i].flag, err)
		}
		all[i].listener = &boundedListener{
			Listener: ln, max: int64(s.cfg.MaxClients + spareConns), over: s.metrics.ended.WithLabelValues(endedTooMany).Inc,
		}
		open = append(open, all[i])
	}
	if len(open) == 0 {
		return nil, errors.New("no address to serve on: set --tls-addr or --grpc-addr")
	}
	return open, nil
}

func closeAll(endpoints []*endpoint) {
	for _, e := range endpoints {
		_ = e.listener.Close()
	}
}

// newGRPCServer makes the server of an endpoint.
func (s *Server) newGRPCServer(ctx context.Context, e *endpoint) *grpc.Server {
	options := append(s.serverOptions(), grpc.StreamInterceptor(s.interceptor(e.clients)))
	if e.clients != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(s.tls)))
	}
	srv := grpc.NewServer(options...)
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(srv, serverv3.NewServer(ctx, s.cache, s.callbacks()))
	return srv
}

// serveADS serves on all endpoints until ctx ends, and returns when their streams have ended.
func (s *Server) serveADS(ctx context.Context, endpoints []*endpoint) error {
	failures := make(chan error, len(endpoints))
	for _, e := range endpoints {
		e.server = s.newGRPCServer(ctx, e)
		go func() {
			err := e.server.Serve(e.listener)
			if errors.Is(err, grpc.ErrServerStopped) {
				err = nil
			}
			if err != nil {
				err = fmt.Errorf("serving ADS on %s (%s): %w", e.listener.Addr(), e.flag, err)
			}
			failures <- err
		}()
	}
	var err error
	ended := 0
	select {
	case <-ctx.Done():
	case err = <-failures:
		ended++
	}
	var stopping sync.WaitGroup
	for _, e := range endpoints {
		stopping.Go(func() { stop(e.server) })
	}
	stopping.Wait()
	s.streams.Wait()
	for ; ended < len(endpoints); ended++ {
		err = errors.Join(err, <-failures)
	}
	return err
}

// stop waits until the streams have ended, which they do when the context of Run ends, and
// closes them after stopGrace.
func stop(srv *grpc.Server) {
	timer := time.AfterFunc(stopGrace, srv.Stop)
	defer timer.Stop()
	srv.GracefulStop()
}

// newIdentities returns who may connect over TLS, and the configuration of TLS.
func newIdentities(cfg Config) (*auth.Clients, *tls.Config, error) {
	if cfg.TLSAddr == "" {
		return nil, nil, nil
	}
	config, err := auth.ServerConfig(cfg.TLS, cfg.Logger)
	if err != nil {
		return nil, nil, err
	}
	clients := &auth.Clients{TrustDomain: cfg.TrustDomain, Cluster: cfg.ClusterID}
	if cfg.Kubernetes != nil {
		review, err := cfg.Kubernetes.Reviewer(cfg.TokenAudience)
		if err != nil {
			return nil, nil, err
		}
		clients.Tokens = auth.NewTokens(review)
	}
	return clients, config, nil
}
