package discovery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/intake"
)

// An endpoint is an address on which ADS is served.
type endpoint struct {
	flag     string // that sets the address
	addr     string // as configured; empty for no endpoint
	listener net.Listener
	clients  *auth.Clients // the clients that may connect; nil lets everyone, without TLS
	server   *grpc.Server
}

// listen opens the listeners of the configured addresses.
func (s *Server) listen(ctx context.Context) ([]*endpoint, error) {
	var open []*endpoint
	for _, e := range []*endpoint{
		{flag: "--grpc-addr", addr: s.cfg.GRPCAddr},
		{flag: "--tls-addr", addr: s.cfg.TLSAddr, clients: s.identities},
	} {
		if e.addr == "" {
			continue
		}
		var lc net.ListenConfig
		ln, err := lc.Listen(ctx, "tcp", e.addr)
		if err != nil {
			closeAll(open)
			return nil, fmt.Errorf("serving ADS on %s (%s): %w", e.addr, e.flag, err)
		}
		e.listener = &boundedListener{
			Listener: ln, max: int64(s.cfg.MaxClients + spareConns), over: s.push.TooMany,
			addresses: intake.NewGroup[netip.Addr](s.cfg.MaxClientsPerAddress),
			full:      func() bool { return s.memory.check(connShare) != nil },
		}
		open = append(open, e)
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
func (s *Server) newGRPCServer(e *endpoint) *grpc.Server {
	of := insecure.NewCredentials()
	if e.clients != nil {
		of = credentials.NewTLS(s.tls.Config())
	}
	srv := grpc.NewServer(append(s.serverOptions(), grpc.StreamInterceptor(s.admit(e.clients)), grpc.Creds(s.unread.Credentials(of)))...)
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(srv, s.push)
	return srv
}

// serveADS serves on all endpoints until ctx ends, and returns when their streams have ended.
func (s *Server) serveADS(ctx context.Context, endpoints []*endpoint) error {
	failures := make(chan error, len(endpoints))
	for _, e := range endpoints {
		e.server = s.newGRPCServer(e)
		go func() {
			err := e.server.Serve(e.listener)
			if errors.Is(err, grpc.ErrServerStopped) {
				err = nil
			}
			if err != nil {
				err = fmt.Errorf("serving ADS on %s (%s): %w", e.addr, e.flag, err)
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
	s.push.Stop()
	var stopping sync.WaitGroup
	for _, e := range endpoints {
		stopping.Go(func() { stop(e.server) })
	}
	stopping.Wait()
	s.push.Wait()
	for ; ended < len(endpoints); ended++ {
		err = errors.Join(err, <-failures)
	}
	return err
}

// stop waits until the connections have ended, and closes them after stopGrace.
func stop(srv *grpc.Server) {
	timer := time.AfterFunc(stopGrace, srv.Stop)
	defer timer.Stop()
	srv.GracefulStop()
}

// newIdentities returns the clients that may connect over TLS; nil without TLS.
func newIdentities(cfg Config) (*auth.Clients, error) {
	if cfg.TLSAddr == "" {
		return nil, nil //nolint:nilnil // documented
	}
	clients := &auth.Clients{TrustDomain: cfg.TrustDomain, Cluster: cfg.ClusterID}
	access := cfg.Kubernetes
	if access == nil && cfg.TLSSecret != nil {
		access = cfg.TLSSecret.Access
	}
	if access != nil {
		review, err := access.Reviewer(cfg.TokenAudience)
		if err != nil {
			return nil, err
		}
		clients.Tokens = auth.NewTokens(review)
	}
	return clients, nil
}
