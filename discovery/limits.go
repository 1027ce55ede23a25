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
	// maxRefusals is the number of refused clients that are logged at once.
	maxRefusals = 100
	// firstReadWait is how long a stream waits for the first reading of all sources. An agent
	// that was refused meanwhile would back off, after an outage for up to 30 s.
	firstReadWait = 10 * time.Second
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
		grpc.ConnectionTimeout(connectTimeout),
		grpc.ForceServerCodecV2(newCodec()),
		grpc.MaxConcurrentStreams(maxStreamsPerConn),
	}
}

// interceptor returns what happens around the streams of an endpoint: clients that may not connect
// are refused, and what the others occupy is bounded.
func (s *Server) interceptor(clients *auth.Clients) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		var identity *auth.Client
		if clients != nil {
			who, err := clients.Client(stream.Context())
			if err != nil {
				s.refused(stream.Context(), err)
				return err
			}
			identity = &who
		}
		return s.boundStream(srv, stream, identity, handler)
	}
}

// refused counts and logs a client that may not connect. The client logs it, too, but its owner may
// be somebody else. Lines beyond maxRefusals are one a second: everyone can cause them.
func (s *Server) refused(ctx context.Context, err error) {
	s.metrics.ended.WithLabelValues(endedRefused).Inc()
	from := "unknown"
	if p, ok := peer.FromContext(ctx); ok {
		from = p.Addr.String()
	}
	s.refusals.Do(func() {
		s.cfg.Logger.Warn("a client is refused", "client", from, "error", status.Convert(err).Message())
	})
}

// boundStream refuses streams beyond MaxClients, and ends a stream whose client does not send its first
// request or does not acknowledge a push in time, because it occupies a place, and an unread push stays in
// memory. identity is nil if the client
// has not proved one.
func (s *Server) boundStream(srv any, stream grpc.ServerStream, identity *auth.Client, handler grpc.StreamHandler) error {
	if !s.enter() {
		s.metrics.ended.WithLabelValues(endedTooMany).Inc()
		return status.Errorf(codes.ResourceExhausted, "this control plane serves %d clients already (--max-clients): try another one, or later",
			s.cfg.MaxClients)
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	b := &boundedStream{ServerStream: stream, ctx: ctx, timeout: s.cfg.AckTimeout, identity: identity, refuse: func(err error) { s.refused(ctx, err); cancel(err) }}
	b.timer = time.AfterFunc(firstReadWait+s.cfg.AckTimeout, func() { // until the first request
		cancel(status.Errorf(codes.DeadlineExceeded, "no request, or no acknowledgement of the last push, within %v", s.cfg.AckTimeout))
	})
	done := make(chan error, 1)
	s.streams.Go(func() {
		defer s.leave()
		defer cancel(nil)
		defer b.timer.Stop()
		s.awaitFirstRead(ctx)
		done <- handler(srv, b)
	})
	var err error
	ended := false
	select {
	case err = <-done:
		ended = true
	case <-ctx.Done():
	}
	// Returning from here ends the stream. That ends a send that waits for the client, and
	// with it the handler.
	cause := context.Cause(ctx)
	switch code := status.Code(cause); {
	case code == codes.DeadlineExceeded && stream.Context().Err() == nil:
		s.metrics.ended.WithLabelValues(endedSlow).Inc()
		return cause
	case code == codes.PermissionDenied || code == codes.InvalidArgument:
		return cause // of check; the handler has returned no error
	case !ended:
		return <-done
	}
	return err
}

// awaitFirstRead waits until all sources were read for the first time, at most for firstReadWait
// or until ctx ends.
func (s *Server) awaitFirstRead(ctx context.Context) {
	timer := time.NewTimer(firstReadWait)
	defer timer.Stop()
	select {
	case <-s.firstRead:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// enter counts a client. It reports false if there are too many.
func (s *Server) enter() bool {
	if s.clients.Add(1) > int64(s.cfg.MaxClients) {
		s.leave()
		return false
	}
	return true
}

func (s *Server) leave() { s.clients.Add(-1) }

// boundedStream is a stream whose client must answer each push in time.
type boundedStream struct {
	grpc.ServerStream
	ctx      context.Context
	timeout  time.Duration
	identity *auth.Client // that nodes must be of; nil lets them be of any
	refuse   func(error)  // ends the stream with an error

	mu    sync.Mutex
	timer *time.Timer
	nonce string // of the last push; every push replaces it
}

// Context returns a context that also ends if the client is too slow.
func (b *boundedStream) Context() context.Context { return b.ctx }

// SendMsg sends a push and starts the timer for its acknowledgement.
func (b *boundedStream) SendMsg(m any) error {
	b.mu.Lock()
	b.timer.Reset(b.timeout)
	if push, ok := m.(interface{ GetNonce() string }); ok {
		b.nonce = push.GetNonce()
	}
	b.mu.Unlock()
	return b.ServerStream.SendMsg(m)
}

// RecvMsg receives a request. If it is the ACK or NACK of the last push, RecvMsg stops the
// timer. Other requests do not show that the client has read the push.
func (b *boundedStream) RecvMsg(m any) error {
	err := b.ServerStream.RecvMsg(m)
	if err == nil {
		if err = b.check(m); err != nil {
			b.refuse(err)
		}
	}
	request, ok := m.(interface{ GetResponseNonce() string })
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil || ok && request.GetResponseNonce() == b.nonce {
		b.timer.Stop()
	}
	return err
}

// check returns an error if the node of a request is not of the client's identity.
func (b *boundedStream) check(m any) error {
	request, ok := m.(interface{ GetNode() *corev3.Node })
	if b.identity == nil || !ok || request.GetNode() == nil {
		return nil
	}
	client, err := parseNode(request.GetNode())
	if err != nil {
		return err
	}
	return b.identity.Check(request.GetNode(), client.view.Namespace)
}

// spareConns is how many connections more than MaxClients there may be: those that have
// no stream yet, or no longer.
const spareConns = 1000

// boundedListener closes connections beyond a bound as soon as they are accepted.
type boundedListener struct {
	net.Listener
	max  int64
	open atomic.Int64
	over func() // called for each connection that is closed
}

// Accept returns the next connection that is within the bound.
func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.open.Add(1) <= l.max {
			return &boundedConn{Conn: conn, listener: l}, nil
		}
		l.open.Add(-1)
		l.over()
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
