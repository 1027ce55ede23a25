package fakexds

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
)

// anyPort is the address of the first start if Options has none.
const anyPort = "127.0.0.1:0"

// Options says how a server differs from istiod's plaintext port. The zero value means
// that it does not differ.
type Options struct {
	// Addr is the host and port to listen on. Empty means a free port of 127.0.0.1.
	Addr string
	// InMemory makes the server listen in memory, under the address Addr, which may be any text. Clients connect with
	// Dial. So a test can run in a bubble of testing/synctest.
	InMemory bool
	// NoDelta makes the incremental RPC answer Unimplemented.
	NoDelta bool
	// EndAfterAnswer makes the server end each stream after the first ACK or NACK.
	EndAfterAnswer bool
	// Authority, if not nil, makes the port speak TLS with a certificate of the authority,
	// accept its client certificates in place of the token, and sign certificates of
	// workloads.
	Authority *Authority
	// RefuseCertificates makes the streams of clients that have a certificate end with
	// PermissionDenied.
	RefuseCertificates bool
	// Age limits the ages of connections.
	Age keepalive.ServerParameters
	// NoSigning leaves out the service that signs certificates.
	NoSigning bool
	// Token, if not empty, is the bearer token that a stream must have. A stream without
	// the token ends with Unauthenticated. SetToken changes the token.
	Token string
}

// Server is a fake control plane. Its methods are safe for concurrent use.
type Server struct {
	discoveryv3.UnimplementedAggregatedDiscoveryServiceServer

	opts Options
	addr string

	mu sync.Mutex
	// grpc is nil while the server is stopped.
	grpc   *grpc.Server
	memory *bufconn.Listener // nil unless the server listens in memory
	served chan struct{}
	token  string

	state *response // the response to the first request of a stream
	// Counters over the server's life; they survive Stop and Restart.
	version, nonce, streamCount int

	streams map[*stream]struct{}

	// The record of requests. Whenever it grows, changed is closed and replaced.
	requests []Request
	versions map[string]string
	changed  chan struct{}
}

// Start starts a server and stops it when the test ends.
func Start(tb testing.TB, opts Options) *Server {
	tb.Helper()
	s, err := New(opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.Stop)
	return s
}

// New starts a server. The caller must stop it.
func New(opts Options) (*Server, error) {
	s := &Server{
		opts:     opts,
		addr:     cmp.Or(opts.Addr, anyPort),
		token:    opts.Token,
		streams:  map[*stream]struct{}{},
		versions: map[string]string{},
		changed:  make(chan struct{}),
	}
	if err := s.Restart(); err != nil {
		return nil, err
	}
	return s, nil
}

// Addr returns the host and port that clients connect to; it does not change.
func (s *Server) Addr() string { return s.addr }

// SetToken sets the bearer token that new streams must have.
func (s *Server) SetToken(token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.token = token
}

// Stop closes the port and all connections, and returns when the handlers of all streams
// have returned. It does nothing if the server is stopped.
func (s *Server) Stop() {
	s.mu.Lock()
	server, served := s.grpc, s.served
	s.grpc, s.memory = nil, nil
	s.mu.Unlock()
	if server == nil {
		return
	}
	server.Stop()
	<-served
}

// Restart starts a stopped server on the same port. State and record are kept.
func (s *Server) Restart() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.grpc != nil {
		return errors.New("fakexds: restart of a running server")
	}
	lis, err := s.listenLocked()
	if err != nil {
		return err
	}
	if s.addr == anyPort {
		s.addr = lis.Addr().String()
	}
	server := grpc.NewServer(s.serverOptions()...)
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(server, s)
	if s.opts.Authority != nil && !s.opts.NoSigning {
		s.opts.Authority.register(server, s)
	}
	served := make(chan struct{})
	s.grpc, s.served = server, served
	go func() {
		defer close(served)
		// Serve returns an error only after Stop, where it is expected.
		_ = server.Serve(lis)
	}()
	return nil
}

// Dial connects to a server that listens in memory. While the server is stopped, it refuses connections.
func (s *Server) Dial(ctx context.Context, _ string) (net.Conn, error) {
	s.mu.Lock()
	lis := s.memory
	s.mu.Unlock()
	if lis == nil {
		return nil, &net.OpError{Op: "dial", Net: "memory", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	}
	return lis.DialContext(ctx)
}

// listenLocked opens the port. After Stop the kernel may not free it at once, so
// listenLocked tries for 5 s.
func (s *Server) listenLocked() (net.Listener, error) {
	if s.opts.InMemory {
		s.memory = bufconn.Listen(64 << 10)
		return s.memory, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var lc net.ListenConfig
	for {
		lis, err := lc.Listen(ctx, "tcp", s.addr)
		if err == nil {
			return lis, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("fakexds: listening on %q: %w", s.addr, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// serverOptions returns the options of istiod that a client can notice: pings more often
// than every 15 s are answered with GOAWAY.
func (s *Server) serverOptions() []grpc.ServerOption {
	opts := []grpc.ServerOption{
		grpc.WaitForHandlers(true),
		grpc.KeepaliveParams(s.opts.Age),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 15 * time.Second}),
	}
	if s.opts.Authority != nil {
		opts = append(opts, grpc.Creds(credentials.NewTLS(s.opts.Authority.server)))
	}
	return opts
}

// CutStreams ends every open stream with err. nil means the error of istiod when a
// connection has reached its maximum age. The server accepts new streams.
func (s *Server) CutStreams(err error) {
	if err == nil {
		err = status.Error(codes.Unavailable, "closing transport due to: max_age")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for st := range s.streams {
		st.end(err)
	}
}
