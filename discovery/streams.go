package discovery

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

const (
	// connectTimeout is how long a client may take to say that it speaks HTTP/2.
	connectTimeout = 10 * time.Second
	// maxStreamsPerConn bounds the streams of one connection; an agent has one.
	maxStreamsPerConn = 16
	// idleConn is how long a connection without a stream stays.
	idleConn = time.Minute
	// ageGrace is how long streams of an old connection may go on once it was
	// told to end. A client reconnects at once, and keeps its table meanwhile.
	ageGrace = 10 * time.Second
)

// serverOptions bound what clients can hold, and make connections end now and
// then, so that clients spread over replicas.
func (s *Server) serverOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		// Clients look for a dead peer every 30 s or faster; gRPC's own limit
		// of one ping in 5 minutes would have them thrown out.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: 30 * time.Second, Timeout: 10 * time.Second,
			// gRPC adds up to a tenth more or less, so that clients that came
			// together do not come back together.
			MaxConnectionAge: s.cfg.MaxConnectionAge, MaxConnectionAgeGrace: ageGrace,
			MaxConnectionIdle: idleConn,
		}),
		grpc.ConnectionTimeout(connectTimeout),
		grpc.ForceServerCodecV2(newCodec()),
		grpc.MaxConcurrentStreams(maxStreamsPerConn),
		grpc.StreamInterceptor(s.boundStream),
	}
}

// boundStream refuses a stream beyond MaxClients, and ends one whose client
// does not acknowledge a push: what it has not read stays in memory.
func (s *Server) boundStream(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if !s.enter() {
		s.metrics.ended.WithLabelValues(endedTooMany).Inc()
		return status.Errorf(codes.ResourceExhausted, "this control plane already serves %d clients (--max-clients): try another, or later",
			s.cfg.MaxClients)
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	b := &boundedStream{ServerStream: stream, ctx: ctx, timeout: s.cfg.AckTimeout}
	b.timer = time.AfterFunc(time.Hour, func() {
		cancel(status.Errorf(codes.DeadlineExceeded, "the last push was not acknowledged within %v", s.cfg.AckTimeout))
	})
	b.timer.Stop()
	done := make(chan error, 1)
	s.streams.Go(func() {
		defer s.leave()
		defer cancel(nil)
		defer b.timer.Stop()
		done <- handler(srv, b)
	})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	// The end of the stream, which the return from here is, ends a send that
	// waits for the client, and so the handler.
	if err := context.Cause(ctx); status.Code(err) == codes.DeadlineExceeded && stream.Context().Err() == nil {
		s.metrics.ended.WithLabelValues(endedSlow).Inc()
		return err
	}
	return <-done
}

// enter counts a client, unless there are too many.
func (s *Server) enter() bool {
	if s.clients.Add(1) > int64(s.cfg.MaxClients) {
		s.leave()
		return false
	}
	return true
}

func (s *Server) leave() { s.clients.Add(-1) }

// boundedStream is a stream whose client has to answer each push in time.
type boundedStream struct {
	grpc.ServerStream
	ctx     context.Context
	timeout time.Duration

	mu    sync.Mutex
	timer *time.Timer
}

// Context ends early if the client is too slow.
func (b *boundedStream) Context() context.Context { return b.ctx }

// SendMsg sends a push and starts the time for its acknowledgement.
func (b *boundedStream) SendMsg(m any) error {
	b.mu.Lock()
	b.timer.Reset(b.timeout)
	b.mu.Unlock()
	return b.ServerStream.SendMsg(m)
}

// RecvMsg receives what the client says; it has read the push before.
func (b *boundedStream) RecvMsg(m any) error {
	err := b.ServerStream.RecvMsg(m)
	b.mu.Lock()
	b.timer.Stop()
	b.mu.Unlock()
	return err
}

// spareConns is how many connections there may be beside those of MaxClients:
// ones that have no stream yet, or no longer.
const spareConns = 1000

// boundedListener closes connections beyond a bound at once.
type boundedListener struct {
	net.Listener
	max  int64
	open atomic.Int64
	over func() // is called for each that was closed
}

// Accept returns the next connection within the bound.
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
		_ = conn.Close() // its client sees that
	}
}

// boundedConn gives its place back when it is closed.
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
