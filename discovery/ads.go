package discovery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/intake"
	"github.com/nametap/nametap/discovery/push"
	"github.com/nametap/nametap/internal/connlimit"
)

const (
	// stopGrace bounds how long streams take to end when the server stops.
	stopGrace = time.Second
	// patience bounds the HTTP/2 handshake of a new connection, and the answer to a ping.
	patience = 10 * time.Second
	// maxStreamsPerConn bounds the streams of one connection; an agent opens one at a time.
	maxStreamsPerConn = 1
	// idleConn is the time after which a connection without a stream is closed.
	idleConn = time.Minute
	// ageGrace is how long the streams of an old connection may continue after its client was asked to connect again.
	ageGrace = 10 * time.Second
	// readBuffer and writeBuffer are the sizes of a connection's buffers, in bytes. gRPC has twice writeBuffer for each
	// connection while it writes to it; connections share these buffers.
	readBuffer, writeBuffer = 1 << 10, 16 << 10
	// window is how many bytes a client may send on a stream, and on a connection, before the server has read them. The
	// size is fixed: otherwise gRPC would measure the bandwidth with a PING after each request.
	window = 1 << 16
	// maxHeaders bounds the headers of a stream, in bytes. The longest header is the token, of about 1 KiB.
	maxHeaders = 8 << 10
	// maxUnread bounds the bytes of memory for requests that have arrived, at least in part, and were not read yet. The
	// requests of 9,000 agents that connect at once need less.
	maxUnread = 32 << 20
	// maxRefusals is the number of refused clients that are logged without a pause.
	maxRefusals = 100
)

// An adsServer serves ADS to the clients that may connect, within bounds.
type adsServer struct {
	cfg        Config
	push       *push.Service
	identities *auth.Clients  // nil without TLS
	tls        *auth.Server   // nil without TLS
	refusals   rate.Sometimes // limits the log lines about clients that are refused

	conns     *connlimit.Limit // bounds the connections, and the requests that were not read
	addresses perAddress       // bounds the connections of each address, and the streams beyond the first of each connection
	memory    *memoryLimit
	patience  time.Duration // the constant of this name, longer in tests
}

// newADSServer returns a server whose certificate is in tls. The caller must set the fields push and memory before it
// calls listen.
func newADSServer(cfg Config, tls *auth.Server) *adsServer {
	s := &adsServer{
		cfg: cfg, tls: tls, refusals: rate.Sometimes{First: maxRefusals, Interval: time.Second},
		addresses: perAddress{most: cfg.MaxClientsPerAddress, taken: map[netip.Addr]int{}},
		conns:     connlimit.New("discovery", cfg.MaxClients, maxUnread), patience: patience,
	}
	if cfg.TLSAddr != "" {
		s.identities = &auth.Clients{TrustDomain: cfg.TrustDomain, Cluster: cfg.ClusterID}
		if cfg.Kubernetes != nil {
			s.identities.Tokens = auth.NewTokens(cfg.Kubernetes.Reviewer(cfg.TokenAudience))
		}
	}
	return s
}

// An adsPort is an address on which ADS is served.
type adsPort struct {
	flag     string // the flag that sets the address
	addr     string // as configured; empty if ADS is not served here
	listener net.Listener
	clients  *auth.Clients // the clients that may connect over TLS; nil for plaintext, which admits everyone
}

// listen opens the listeners of the configured addresses.
func (s *adsServer) listen(ctx context.Context) ([]*adsPort, error) {
	var open []*adsPort
	for _, p := range []*adsPort{
		{flag: "--grpc-addr", addr: s.cfg.GRPCAddr},
		{flag: "--tls-addr", addr: s.cfg.TLSAddr, clients: s.identities},
	} {
		if p.addr == "" {
			continue
		}
		var lc net.ListenConfig
		ln, err := lc.Listen(ctx, "tcp", p.addr)
		if err != nil {
			for _, other := range open {
				_ = other.listener.Close()
			}
			return nil, p.failed(err)
		}
		p.listener = &boundedListener{
			Listener: ln, limit: s.conns, addresses: &s.addresses, tooMany: s.push.TooMany,
			full: func(place *connlimit.Place) bool { return s.memory.check(connShare, place) != nil },
		}
		open = append(open, p)
	}
	if len(open) == 0 {
		return nil, errors.New("no address to serve on: set --tls-addr or --grpc-addr")
	}
	return open, nil
}

func (p *adsPort) failed(err error) error {
	return fmt.Errorf("serving ADS on %s (%s): %w", p.addr, p.flag, err)
}

// serve serves ADS on all ports until ctx ends or a port fails. It returns when all streams have ended.
func (s *adsServer) serve(ctx context.Context, ports []*adsPort) error {
	defer s.conns.Close()
	group, ctx := errgroup.WithContext(ctx)
	for _, p := range ports {
		server := s.newServer(p)
		group.Go(func() error {
			if err := server.Serve(p.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				return p.failed(err)
			}
			return nil
		})
		group.Go(func() error {
			<-ctx.Done()
			s.push.Stop()
			timer := time.AfterFunc(stopGrace, server.Stop)
			defer timer.Stop()
			server.GracefulStop()
			return nil
		})
	}
	err := group.Wait()
	s.push.Wait()
	return err
}

// newServer makes the server of a port. Its options bound the resources that clients can occupy. They also end connections
// from time to time, which spreads clients over replicas.
func (s *adsServer) newServer(p *adsPort) *grpc.Server {
	proof := insecure.NewCredentials()
	if p.clients != nil {
		proof = credentials.NewTLS(s.tls.Config())
	}
	server := grpc.NewServer(
		// Clients ping every 30 s or more often. With gRPC's default limit, one ping in 5
		// minutes, the server would close their connections.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: 30 * time.Second, Timeout: s.patience,
			// gRPC varies this by a tenth, so clients that connected together do not reconnect together.
			MaxConnectionAge: s.cfg.MaxConnectionAge, MaxConnectionAgeGrace: ageGrace,
			MaxConnectionIdle: idleConn,
		}),
		grpc.ConnectionTimeout(s.patience),
		grpc.ForceServerCodecV2(push.Codec()),
		grpc.MaxConcurrentStreams(maxStreamsPerConn),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.MaxRecvMsgSize(push.MaxMessage),
		grpc.ReadBufferSize(readBuffer),
		grpc.StaticStreamWindowSize(window),
		grpc.StaticConnWindowSize(window),
		grpc.WriteBufferSize(writeBuffer),
		grpc.StreamInterceptor(s.admit(p.clients)),
		grpc.Creds(intake.Credentials(proof, func(c net.Conn) *connlimit.Place { return c.(*boundedConn).place })),
	)
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(server, s.push)
	return server
}

// admit returns an interceptor that refuses a client if its address has too many streams, if it is not one of the given
// clients, or if there is no memory for it. If the parameter clients is nil, everyone is admitted. The context of the stream gets the identity that the
// client has proven. When the token or certificate that proves the identity ends, the stream ends, and the client
// connects again with the next token or certificate.
func (s *adsServer) admit(clients *auth.Clients) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx := stream.Context()
		admitted := &admitted{ServerStream: stream, ctx: ctx, connection: intake.ConnectionOf(ctx)}
		first := admitted.connection.Begin()
		defer admitted.connection.End()
		if !first {
			address := intake.AddressOf(admitted.connection.Conn.RemoteAddr())
			give, ok := s.addresses.take(address)
			if !ok {
				s.push.TooMany()
				err := status.Errorf(codes.ResourceExhausted, "%d clients at %s are connected, or were within a minute (--max-clients-per-address): "+
					"connect later", s.addresses.most, address)
				s.logRefusal(ctx, err)
				return err
			}
			defer give()
		}
		if clients != nil {
			who, err := clients.Client(ctx)
			if err != nil {
				s.push.Refused()
				s.logRefusal(ctx, err)
				return err
			}
			admitted.ctx = context.WithValue(ctx, identityKey{}, who)
			if !who.Ends.IsZero() {
				var cancel context.CancelFunc
				admitted.ctx, cancel = context.WithDeadlineCause(admitted.ctx, who.Ends, status.Errorf(codes.Unavailable,
					"the token or certificate of %s ended at %s: connect again with the next one", who.Identity, who.Ends.UTC().Format(time.RFC3339)))
				defer cancel()
			}
		}
		if err := s.memory.check(streamShare, admitted.connection.Place()); err != nil {
			return err
		}
		return handler(srv, admitted)
	}
}

// admitted is a stream that has a place.
type admitted struct {
	grpc.ServerStream
	ctx        context.Context //nolint:containedctx // as in the stream
	connection *intake.Connection
}

type identityKey struct{}

// Context returns the context with the identity.
func (a *admitted) Context() context.Context { return a.ctx }

// RecvMsg receives a request.
func (a *admitted) RecvMsg(m any) error {
	return a.connection.Receive(a.ServerStream.RecvMsg, m)
}

// checkNode returns an error if a node does not belong to the identity in ctx. Without an identity in ctx, every node is
// accepted.
func (s *adsServer) checkNode(ctx context.Context, node *corev3.Node, namespace string) error {
	who, ok := ctx.Value(identityKey{}).(auth.Client)
	if !ok {
		return nil
	}
	err := who.Check(node, namespace)
	if err != nil {
		s.push.Refused()
		s.logRefusal(ctx, err)
	}
	return err
}

// logRefusal logs a client that may not connect. After maxRefusals lines, at most one line a second is logged, because
// every client can cause such lines.
func (s *adsServer) logRefusal(ctx context.Context, err error) {
	client, _ := peer.FromContext(ctx) // each stream has one
	s.refusals.Do(func() {
		s.cfg.Logger.Warn("a client is refused", "client", client.Addr.String(), "error", status.Convert(err).Message())
	})
}
