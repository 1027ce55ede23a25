package discovery

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/discovery/auth"
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
	// readBuffer and writeBuffer are those of a connection, in bytes. Requests and most responses are short.
	// gRPC takes twice writeBuffer while it writes, for all connections at a time if a host has changed.
	readBuffer, writeBuffer = 1 << 10, 2 << 10
	// window is how many bytes a client may send before the server has read them. It is fixed, because gRPC
	// would otherwise measure the bandwidth with a PING after each request.
	window = 1 << 16
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
		grpc.ReadBufferSize(readBuffer),
		grpc.StaticStreamWindowSize(window),
		grpc.StaticConnWindowSize(window),
		grpc.WriteBufferSize(writeBuffer),
	}
}

// authenticate is what happens before a stream of an endpoint is served: a client that may not connect is
// refused, and the context gets the identity of any other one. The context, and with it the stream, ends when the
// client's proof of its identity does, so that the client connects again with the next token or certificate.
func (s *Server) authenticate(clients *auth.Clients) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		who, err := clients.Client(stream.Context())
		if err != nil {
			s.refused(stream.Context(), err)
			return err
		}
		ctx := context.WithValue(stream.Context(), identityKey{}, who)
		if !who.Ends.IsZero() {
			var cancel context.CancelFunc
			ctx, cancel = context.WithDeadlineCause(ctx, who.Ends, status.Errorf(codes.Unavailable,
				"the token or certificate of %s ended at %s: connect again with the next one", who.Identity, who.Ends.UTC().Format(time.RFC3339)))
			defer cancel()
		}
		return handler(srv, identified{stream, ctx})
	}
}

// identified is a stream whose context has the identity of its client.
type identified struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // as in the stream
}

type identityKey struct{}

// Context returns the context with the identity.
func (i identified) Context() context.Context { return i.ctx }

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

// refused counts and logs a client that may not connect. The client logs it, too, but its owner may
// be somebody else. Lines beyond maxRefusals are one a second: everyone can cause them.
func (s *Server) refused(ctx context.Context, err error) {
	s.push.Refused()
	from := "unknown"
	if p, ok := peer.FromContext(ctx); ok {
		from = p.Addr.String()
	}
	s.refusals.Do(func() {
		s.cfg.Logger.Warn("a client is refused", "client", from, "error", status.Convert(err).Message())
	})
}

// spareConns is how many connections more than MaxClients there may be: those that have
// no stream yet, or no longer.
const spareConns = 1000

// boundedListener closes connections beyond a bound, and without memory, as soon as they are accepted.
type boundedListener struct {
	net.Listener
	max  int64
	open atomic.Int64
	over func()      // called for each connection that is closed
	full func() bool // whether there is no memory for another one
}

// Accept returns the next connection that is within the bounds.
func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		switch {
		case l.open.Add(1) > l.max:
			l.over()
		case l.full():
		default:
			return &boundedConn{Conn: conn, listener: l}, nil
		}
		l.open.Add(-1)
		_ = conn.Close() // the client notices
	}
}

// boundedConn is a connection that the listener counts until it is closed.
type boundedConn struct {
	net.Conn
	listener *boundedListener
	once     sync.Once
}

// Close closes the connection.
func (c *boundedConn) Close() error {
	c.once.Do(func() { c.listener.open.Add(-1) })
	return c.Conn.Close()
}
