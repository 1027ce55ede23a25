package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/sockets"
)

// A Server carries connections to automatic VIPs. Make one with [New] and start it with
// [Server.Run]. Its other methods are safe for concurrent use.
type Server struct {
	config    Config
	log       *slog.Logger
	forbidden []addressRange
	max       int64 // connections at a time
	reserve   *sockets.Reserve
	attempts  *semaphore.Weighted // to connect, beside the first one of a connection
	pipes     *semaphore.Weighted // of busy directions
	buffers   sync.Pool
	look      look
	began     time.Time
	nat64     nat64
	hosts     hostCounts
	metrics   *metrics
	refusals  refusals

	open       atomic.Int64
	beginnings atomic.Int64   // bytes: see maxBeginnings
	running    sync.WaitGroup // of goroutines for connections

	end      func()        // closes ended; may be called any number of times
	ended    chan struct{} // closed when Run has to end
	hasten   func()        // closes hastened; may be called any number of times
	hastened chan struct{} // closed when connections have to end

	mu       sync.Mutex
	conns    map[*net.TCPConn]*pair // of clients, nil until it is joined; the map is nil once the end resets all
	longIdle []idlePair             // in the last sweep, the one that is idle longest last

	listenersMu sync.Mutex
	listeners   []*net.TCPListener
	missing     map[netip.AddrPort]error // listeners that could not be opened, and why
	closed      bool                     // the listeners, at the end
}

// descriptorsPerConn are those of a connection that is joined: the client's and the host's. While it is dialled,
// the host's is that of one attempt.
const descriptorsPerConn = 2

// waitTime is how long the server waits for a client at a time while there are no descriptors.
const waitTime = 100 * time.Millisecond

// bytesPerConn is the memory of a connection that has sent little, in bytes: in the kernel, two sockets, and in the
// process, two goroutines and what they use. Half of the memory is for connections.
const bytesPerConn = 24 << 10

// attemptShare is the share of the descriptors for connections, one part in that many, which is for attempts to
// connect beside the first one.
const attemptShare = 8

// New checks cfg, opens the listeners and tests the mark. An error names the setting. Listeners whose
// port another program has are opened by Run.
func New(ctx context.Context, cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Server{config: cfg, log: cfg.Logger, forbidden: forbidden(), conns: map[*net.TCPConn]*pair{}, pipes: semaphore.NewWeighted(maxPipes)}
	s.began = time.Now()
	if err := s.look.open(); err != nil {
		return nil, fmt.Errorf("opening a pipe: %w", err)
	}
	s.ended, s.hastened = make(chan struct{}), make(chan struct{})
	s.end, s.hasten = sync.OnceFunc(func() { close(s.ended) }), sync.OnceFunc(func() { close(s.hastened) })
	s.buffers.New = func() any { return new([bufferSize]byte) }
	s.metrics = newMetrics(s)
	if err := s.testMark(ctx); err != nil {
		return nil, err
	}
	if err := s.listen(ctx); err != nil {
		return nil, err
	}
	if cfg.Registerer != nil {
		if err := cfg.Registerer.Register(s.metrics); err != nil {
			s.closeListeners()
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	var attempts int64
	s.max, attempts = descriptorLimits()
	s.attempts = semaphore.NewWeighted(attempts)
	if cfg.Memory > 0 {
		s.max = min(s.max, max(cfg.Memory/2/bytesPerConn, 1))
	}
	s.reserve = sockets.NewReserve(len(s.listeners) + len(s.missing))
	return s, nil
}

// descriptorLimits returns how many connections the limit of descriptors allows, and how many attempts to connect
// beside the first one of each: at most half of all descriptors are for them, so that DNS does not run out of
// them.
func descriptorLimits() (conns, attempts int64) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur > 1<<30 {
		limit.Cur = 1 << 30
	}
	const pipeEnds = 2
	all := max(int64(limit.Cur)/2-pipeEnds*maxPipes, 1) //nolint:gosec // at most 2^30
	attempts = max(all/attemptShare, 1)
	return max((all-attempts)/descriptorsPerConn, 1), attempts
}

// testMark returns an error if packets cannot get the mark.
func (s *Server) testMark(ctx context.Context) error {
	if s.config.Mark == 0 {
		return nil
	}
	var probe net.ListenConfig
	socket, err := probe.ListenPacket(ctx, "udp4", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("opening a socket to test --egress-mark: %w", err)
	}
	defer func() { _ = socket.Close() }()
	raw, err := socket.(*net.UDPConn).SyscallConn()
	if err != nil {
		return err
	}
	return setMark(raw, s.config.Mark)
}

// Run carries connections until ctx ends or [Server.End] is called. Then it accepts no more, and waits
// for those that are open for up to [Config.Drain] before it resets them. It returns after all its
// goroutines: nil at the end, an error if a listener failed.
func (s *Server) Run(ctx context.Context) error {
	defer s.reserve.Close()
	defer s.look.close()
	// Connections outlive ctx by the drain.
	serving, abort := context.WithCancel(context.WithoutCancel(ctx))
	defer abort()
	group, ctx := errgroup.WithContext(ctx)
	for _, l := range s.opened() {
		group.Go(func() error { return s.accept(serving, l) })
	}
	swept := make(chan struct{})
	go func() {
		defer close(swept)
		s.sweep(serving)
	}()
	opening, stop := context.WithCancel(ctx)
	group.Go(func() error {
		s.openMissing(opening, func(l *net.TCPListener) {
			group.Go(func() error { return s.accept(serving, l) })
		})
		return nil
	})
	group.Go(func() error {
		select {
		case <-ctx.Done():
		case <-s.ended:
		}
		stop()
		s.end() // so that accept knows why its listener is closed
		s.closeListeners()
		return nil
	})
	err := group.Wait()
	s.drain(abort)
	abort()
	<-swept
	return err
}

// drain waits for the open connections, and resets those that are left.
func (s *Server) drain(abort func()) {
	ended := make(chan struct{})
	go func() {
		s.running.Wait()
		close(ended)
	}()
	timer := time.NewTimer(s.config.Drain)
	defer timer.Stop()
	select {
	case <-ended:
		return
	case <-timer.C:
	case <-s.hastened:
	}
	abort()
	s.resetAll()
	<-ended
}

// End makes Run end. Without drain it resets the open connections at once. It may be called any number
// of times.
func (s *Server) End(drain bool) {
	if !drain {
		s.hasten()
	}
	s.end()
}

// Open reports whether connections are open.
func (s *Server) Open() bool { return s.open.Load() > 0 }

// resetAll resets the connections of all clients, and of those that are still to come.
func (s *Server) resetAll() {
	s.mu.Lock()
	all := s.conns
	s.conns = nil
	s.mu.Unlock()
	for conn, p := range all {
		if p == nil {
			reset(conn)
			continue
		}
		p.abort()
	}
}

// add records the connection of a client. It reports false if the server resets all.
func (s *Server) add(conn *net.TCPConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		return false
	}
	s.conns[conn] = nil
	return true
}

// joined records the pair of a client's connection. It reports false if the server resets all.
func (s *Server) joined(conn *net.TCPConn, p *pair) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		return false
	}
	s.conns[conn] = p
	return true
}

// pairs returns the joined connections.
func (s *Server) pairs() (all []*pair) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.conns {
		if p != nil {
			all = append(all, p)
		}
	}
	return all
}

// remove ends what add began.
func (s *Server) remove(conn *net.TCPConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, conn)
}

// isClosed reports whether a channel is closed on which nothing is sent.
func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// accept accepts the connections of one listener until the end.
func (s *Server) accept(serving context.Context, l *net.TCPListener) error {
	defer s.answerQUIC(serving, l.Addr().(*net.TCPAddr).AddrPort())()
	pacer := &sockets.Pacer{Log: s.log, Listener: "egress " + l.Addr().String()}
	for {
		conn, err := l.AcceptTCP()
		switch {
		case err == nil:
			s.accepted(serving, conn)
		case isClosed(s.ended):
			return nil
		case sockets.Dead(err):
			return fmt.Errorf("the listener for connections to VIPs on %s failed: %w", l.Addr(), err)
		case sockets.OutOfDescriptors(err) && !sockets.Waiting(l, 0):
			// accept(2) needs a descriptor before it looks for a client. When one comes, there may be descriptors again.
			sockets.Waiting(l, waitTime)
		case sockets.OutOfDescriptors(err) && s.reserve.Spend():
			// The client is told at once instead of waiting in the queue of the listener.
			if conn, err := l.AcceptTCP(); err == nil {
				s.refused(conn, refuse(ReasonDescriptor, "accepting a connection: no descriptors are left"))
			}
			s.reserve.Refill()
		default:
			pacer.Wait(err, s.ended)
		}
	}
}

// accepted starts a goroutine for a connection, unless there are too many.
func (s *Server) accepted(ctx context.Context, conn *net.TCPConn) {
	if s.open.Add(1) > s.max && !s.makeRoom() {
		s.open.Add(-1)
		s.refused(conn, refuse(ReasonLimit, "%d connections are open, as many as memory and descriptors allow, and none is idle", s.max))
		return
	}
	if !s.add(conn) {
		s.open.Add(-1)
		s.refused(conn, refuse(ReasonEnd, "the agent ends"))
		return
	}
	s.running.Go(func() { s.carry(ctx, conn) })
}

// carry connects a client to its host.
func (s *Server) carry(ctx context.Context, client *net.TCPConn) {
	r, err := s.route(ctx, client)
	var t target
	if err == nil {
		t, err = s.target(ctx, client, &r)
	}
	if err != nil {
		s.remove(client)
		s.open.Add(-1)
		s.refused(client, err)
		return
	}
	c := s.hosts.of(t, r.vip)
	s.metrics.connections.Inc()
	s.join(client, t, c, func() {
		c.open.Add(-1)
		s.remove(client)
		s.open.Add(-1)
	})
}

// A target is where a connection leads.
type target struct {
	host  wire.Name // in the table
	name  wire.Name // of the host; another one below a wildcard
	first []byte    // that was read from the client
	conn  *net.TCPConn

	portsKnown bool // the table has the ports of the host
}

// target finds the name of a connection and connects to it, or returns a refusal.
func (s *Server) target(ctx context.Context, client *net.TCPConn, r *route) (t target, err error) {
	name, exact := r.exact()
	if !exact {
		b := &beginning{Conn: client, all: &s.beginnings}
		defer b.release()
		if name, err = s.readName(client, b, r); err != nil {
			return t, err
		}
		t.first = b.read
	}
	h := r.hostOf(name)
	if h.refused != nil {
		return t, h.refused
	}
	t.name, t.host, t.portsKnown = name, h.name, h.to.known
	t.conn, err = s.connect(ctx, name, h.to)
	return t, err
}

// refused resets the connection of a client, and counts and logs why.
func (s *Server) refused(conn *net.TCPConn, err error) {
	reason := ReasonConnect
	if r, ok := errors.AsType[*refusal](err); ok {
		reason = r.reason
	}
	s.refusals.add(s.log, reason, err)
	reset(conn) // last, so that a client that sees it finds the reason in the status
}
