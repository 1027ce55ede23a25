package discovery

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/intake"
	"github.com/nametap/nametap/discovery/push"
)

const (
	// connectTimeout bounds the HTTP/2 handshake of a new connection.
	connectTimeout = 10 * time.Second
	// maxStreamsPerConn bounds the streams of one connection; an agent opens one.
	maxStreamsPerConn = 16
	// idleConn is when a connection without a stream is closed.
	idleConn = time.Minute
	// ageGrace is how long the streams of an old connection may continue after its client
	// was asked to connect again. The client keeps its table meanwhile.
	ageGrace = 10 * time.Second
	// readBuffer and writeBuffer are the sizes of a connection's buffers, in bytes. Requests and most
	// responses are short. gRPC takes twice writeBuffer while it writes, for all connections at a time
	// if a host has changed.
	readBuffer, writeBuffer = 1 << 10, 2 << 10
	// socketBuffer bounds what the kernel keeps for a connection in each direction, in bytes, of which it takes twice as
	// many. Otherwise it keeps 4 MiB for a client that does not read: 160 of them took 256 MiB of the memory limit.
	socketBuffer = 64 << 10
	// window is how many bytes a client may send before the server has read them. It is fixed, because gRPC
	// would otherwise measure the bandwidth with a PING after each request.
	window = 1 << 16
	// maxHeaders bounds the headers of a stream, in bytes. The longest one is the token, of about 1 KiB.
	maxHeaders = 8 << 10
	// maxUnread bounds what requests need that have arrived and were not read, in bytes. If 9,000 agents connect at
	// once, as many requests are within it.
	maxUnread = 32 << 20
	// maxRefusals is the number of refused clients that are logged at once.
	maxRefusals = 100
)

// serverOptions returns options that bound what clients can occupy, and that end
// connections from time to time, so that clients spread over replicas.
func (s *Server) serverOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		// Clients ping every 30 s or more often. With gRPC's default limit, one ping in 5
		// minutes, the server would close their connections.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: 30 * time.Second, Timeout: 10 * time.Second,
			// gRPC varies this by a tenth, so that clients that connected together do not
			// reconnect together.
			MaxConnectionAge: s.cfg.MaxConnectionAge, MaxConnectionAgeGrace: ageGrace,
			MaxConnectionIdle: idleConn,
		}),
		grpc.ChainStreamInterceptor(s.memory.stream),
		grpc.ConnectionTimeout(connectTimeout),
		grpc.ForceServerCodecV2(push.Codec()),
		grpc.MaxConcurrentStreams(maxStreamsPerConn),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.MaxRecvMsgSize(push.MaxMessage),
		grpc.ReadBufferSize(readBuffer),
		grpc.StaticStreamWindowSize(window),
		grpc.StaticConnWindowSize(window),
		grpc.WriteBufferSize(writeBuffer),
	}
}

// admit is what happens before a stream of an endpoint is served: a client for which there is no place, or that may
// not connect, is refused. The context gets the identity of a client that has proven one. The context, and with it the
// stream, ends when that proof does, so that the client connects again with the next token or certificate.
func (s *Server) admit(clients *auth.Clients) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx := stream.Context()
		admitted := &admitted{ServerStream: stream, ctx: ctx, connection: intake.ConnectionOf(ctx)}
		place, err := s.places.Enter(admitted.connection.Address())
		if err != nil {
			return s.noPlace(ctx, err)
		}
		defer place.Leave()
		if clients == nil {
			err = place.Unproven(s.identities != nil)
		} else {
			who, refusal := clients.Client(ctx)
			if refusal != nil {
				s.refused(ctx, refusal)
				return refusal
			}
			admitted.ctx = context.WithValue(ctx, identityKey{}, who)
			if !who.Ends.IsZero() {
				var cancel context.CancelFunc
				admitted.ctx, cancel = context.WithDeadlineCause(admitted.ctx, who.Ends, status.Errorf(codes.Unavailable,
					"the token or certificate of %s ended at %s: connect again with the next one", who.Identity, who.Ends.UTC().Format(time.RFC3339)))
				defer cancel()
			}
			err = place.Prove(who.Namespace)
		}
		if err != nil {
			return s.noPlace(ctx, err)
		}
		return handler(srv, admitted)
	}
}

// admitted is a stream that has a place.
type admitted struct {
	grpc.ServerStream
	ctx        context.Context //nolint:containedctx // as in the stream
	connection intake.Connection
}

type identityKey struct{}

// Context returns the context with the identity.
func (a *admitted) Context() context.Context { return a.ctx }

// RecvMsg receives a request, which its connection does not hold any more.
func (a *admitted) RecvMsg(m any) error {
	err := a.ServerStream.RecvMsg(m)
	if r, ok := m.(*push.Request); ok {
		a.connection.Read(r.Bytes())
	}
	return err
}

// checkNode returns an error if a node is not of the identity in a context. Without an identity, it may
// be any.
func (s *Server) checkNode(ctx context.Context, node *corev3.Node, namespace string) error {
	who, ok := ctx.Value(identityKey{}).(auth.Client)
	if !ok {
		return nil
	}
	err := who.Check(node, namespace)
	if err != nil {
		s.refused(ctx, err)
	}
	return err
}

// refused counts and logs a client that may not connect. The client logs it, too, but its owner may be somebody else.
// Lines beyond maxRefusals are one a second: everyone can cause them.
func (s *Server) refused(ctx context.Context, err error) {
	s.push.Refused()
	s.logRefusal(ctx, err)
}

// noPlace counts and logs a client for which there is no place, and returns the error.
func (s *Server) noPlace(ctx context.Context, err error) error {
	s.push.TooMany()
	s.logRefusal(ctx, err)
	return err
}

func (s *Server) logRefusal(ctx context.Context, err error) {
	from := "unknown"
	if p, ok := peer.FromContext(ctx); ok {
		from = p.Addr.String()
	}
	s.refusals.Do(func() {
		s.cfg.Logger.Warn("a client is refused", "client", from, "error", status.Convert(err).Message())
	})
}

// closedForUnread counts and logs a connection that was closed because of the requests that it holds.
func (s *Server) closedForUnread(client net.Addr) {
	s.push.Unread()
	s.refusals.Do(func() {
		s.cfg.Logger.Warn("a client's connection is closed: of all addresses, its own holds most of the requests that have arrived in part, and together they are too many",
			"client", client.String(), "bytes", maxUnread)
	})
}

// newUnreadMetric returns the metric of requests that have arrived in part.
func newUnreadMetric(b *intake.Budget) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Namespace: "nametap", Subsystem: "discovery", Name: "unread_bytes",
		Help: "What requests need that have arrived, most of them in part, and that were not read yet.",
	}, func() float64 { return float64(b.Held()) })
}

// spareConns is how many connections more than MaxClients there may be, for connections
// that have no stream yet, or no longer.
const spareConns = 1000

// boundedListener closes connections beyond bounds, and without memory, as soon as they are accepted.
type boundedListener struct {
	net.Listener
	max       int64 // of all
	open      atomic.Int64
	addresses *intake.Group[netip.Addr]
	over      func()      // called for each connection that is closed
	full      func() bool // whether there is no memory for another one
}

// Accept returns the next connection that is within the bounds.
func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		address := intake.AddressOf(conn.RemoteAddr())
		switch {
		case !l.addresses.Take(address):
			l.over()
			_ = conn.Close() // the client notices
			continue
		case l.open.Add(1) > l.max:
			l.over()
		case l.full():
		default:
			boundBuffers(conn)
			return &boundedConn{Conn: conn, listener: l, address: address}, nil
		}
		l.open.Add(-1)
		l.addresses.Give(address)
		_ = conn.Close() // the client notices
	}
}

// boundBuffers bounds what the kernel keeps for a connection.
func boundBuffers(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetReadBuffer(socketBuffer) // they fail only if the connection has ended
		_ = tcp.SetWriteBuffer(socketBuffer)
	}
}

// boundedConn is a connection that the listener counts until it is closed.
type boundedConn struct {
	net.Conn
	listener *boundedListener
	address  netip.Addr
	once     sync.Once
}

// Close closes the connection.
func (c *boundedConn) Close() error {
	c.once.Do(func() {
		c.listener.open.Add(-1)
		c.listener.addresses.Give(c.address)
	})
	return c.Conn.Close()
}
