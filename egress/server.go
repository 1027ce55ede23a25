package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"sort"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/sockets"
)

// A Server carries connections to automatic VIPs. Make one with [New] and start it with
// [Server.Run]. Its other methods are safe for concurrent use.
type Server struct {
	config    Config
	log       *slog.Logger
	listeners *listeners
	metrics   *metrics

	end      func()        // closes ended; may be called any number of times
	ended    chan struct{} // closed when Run has to end
	hasten   func()        // closes hastened; may be called any number of times
	hastened chan struct{} // closed when connections have to end

	// Only the loop's goroutine uses the fields below.
	loop       *loop
	copier     *copier
	dialer     *dialer
	reserve    *sockets.Reserve
	accepting  map[*socket]bool // the listeners that accept
	failed     error            // the error of a listener
	pairs      map[*pair]bool   // the open connections, each with its connection to the host
	longIdle   []idlePair       // the pairs that were idle in the last sweep; the last element was idle longest
	beginnings int64            // bytes that are reserved: see maxBeginnings
}

// An idlePair is a pair that was idle in the last sweep. idleSince is when the pair last carried data.
type idlePair struct {
	*pair

	idleSince time.Time
}

const (
	// descriptorsPerConn is how many descriptors a connection has: one for the client, and one for the host or, while
	// the host is dialled, for the first attempt.
	descriptorsPerConn = 2
	// bytesPerConn is the memory in bytes of a connection that has carried little data. Most of it is in the
	// kernel, for two sockets. Half of Config.Memory is for connections.
	bytesPerConn = 24 << 10
	// Of all descriptors for connections, one in attemptShare is kept for extra attempts to connect. An extra attempt
	// starts while an earlier attempt of the same connection still runs (see attemptDelay).
	attemptShare = 8
	// sweepInterval is the longest time between two sweeps over all connections.
	sweepInterval = 5 * time.Second
	// acceptsAtOnce is how many clients a listener accepts at most before other connections have their turn.
	acceptsAtOnce = 64
	// The idle timeout divided by halfClosedShare is the idle timeout of a connection that has ended in one
	// direction. A connection that is idle for the idle timeout divided by newShare may be closed to let another one
	// in. If the idle timeout is one hour, these are five minutes and one minute.
	halfClosedShare = 12
	newShare        = 60
)

// New checks cfg, opens the listeners, and tests whether packets can get the mark of Config.Mark. An error names
// the setting. If another program has the port of a listener, Run opens the listener later.
func New(ctx context.Context, cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := testMark(cfg.Mark); err != nil {
		return nil, err
	}
	s := &Server{config: cfg, log: cfg.Logger, accepting: map[*socket]bool{}, pairs: map[*pair]bool{}, metrics: newMetrics()}
	s.ended, s.hastened = make(chan struct{}), make(chan struct{})
	s.end, s.hasten = sync.OnceFunc(func() { close(s.ended) }), sync.OnceFunc(func() { close(s.hastened) })
	loop, err := newLoop()
	if err != nil {
		return nil, fmt.Errorf("opening epoll for connections to VIPs: %w", err)
	}
	s.listeners = &listeners{config: &s.config}
	if err := s.listeners.open(ctx); err != nil {
		loop.end()
		return nil, err
	}
	if cfg.Registerer != nil {
		if err := cfg.Registerer.Register(s.metrics); err != nil {
			s.listeners.close()
			loop.end()
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	var attempts int64
	s.metrics.max, attempts = descriptorLimits()
	if cfg.Memory > 0 {
		s.metrics.max = min(s.metrics.max, max(cfg.Memory/2/bytesPerConn, 1))
	}
	s.loop, s.copier, s.dialer = loop, &copier{loop: loop}, &dialer{&s.config, newGuard(&s.config), attempts}
	s.reserve = sockets.NewReserve(1)
	return s, nil
}

// descriptorLimits returns how many connections the limit of descriptors allows, and how many extra attempts to
// connect (see attemptShare). Both together take at most half of all descriptors, which leaves enough for DNS.
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
func testMark(mark uint32) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening a socket to test --egress-mark: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	return setMark(fd, mark)
}

// Addrs returns the addresses that the server listens on.
func (s *Server) Addrs() []netip.AddrPort { return s.listeners.addrs() }

// Unserved returns, for each listener that could not be opened but may be opened later, a text with the reason.
func (s *Server) Unserved() []string { return s.listeners.texts() }

// Open reports whether connections are open.
func (s *Server) Open() bool { return s.metrics.open.Load() > 0 }

// Status returns the state of the server.
func (s *Server) Status() Status {
	return Status{
		Listeners: s.Addrs(), Open: s.metrics.open.Load(), Max: s.metrics.max,
		Hosts: s.metrics.hosts.status(), Refused: s.metrics.refusals.status(),
	}
}

// End makes Run end. If drain is false, Run resets the open connections at once. End may be called any number of
// times.
func (s *Server) End(drain bool) {
	if !drain {
		s.hasten()
	}
	s.end()
}

// Run carries connections until ctx ends or [Server.End] is called. Then it accepts no more connections, waits up to
// [Config.Drain] for the open connections, and resets the rest. When it returns, its goroutines have ended. The error
// is nil unless a listener or epoll(7) failed. Run makes the runtime use at least two processors.
func (s *Server) Run(ctx context.Context) error {
	defer s.reserve.Close()
	defer s.copier.closePipes()
	// While it copies, the loop keeps one of the runtime's processors, so DNS queries need another one. LockOSThread
	// gives the loop a thread of its own. So another thread always waits for the network, and finds DNS queries at once.
	if runtime.GOMAXPROCS(0) == 1 {
		runtime.GOMAXPROCS(2)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	acceptCtx, stop := context.WithCancel(ctx)
	defer stop()
	for _, l := range s.listeners.opened {
		s.serve(acceptCtx, l)
	}
	s.loop.running.Go(func() {
		s.listeners.openMissing(acceptCtx, func(l listener) { s.loop.post(func() { s.serve(acceptCtx, l) }) })
	})
	s.loop.running.Go(func() {
		select {
		case <-s.config.Synced:
			s.loop.post(s.loop.wakeAll) // tasks wait for the first table
		case <-s.loop.ctx.Done(): // not acceptCtx, which ends before the drain: tasks wait for the table even then
		}
	})
	drained := make(chan struct{})
	s.loop.running.Go(func() {
		select {
		case <-ctx.Done():
		case <-s.ended:
		}
		stop()
		s.end()
		s.loop.post(s.close)
		s.drain(drained)
	})
	s.loop.start(s.sweep)
	err := s.loop.run(func() bool { return chans.Closed(s.ended) && len(s.accepting) == 0 && !s.Open() })
	s.end()
	s.close()
	close(drained)
	s.loop.end()
	return errors.Join(s.failed, err)
}

// drain waits until the open connections have ended, at most for Config.Drain, and resets the rest.
func (s *Server) drain(drained <-chan struct{}) {
	timer := time.NewTimer(s.config.Drain)
	defer timer.Stop()
	select {
	case <-drained:
	case <-timer.C:
	case <-s.hastened:
	}
	s.loop.post(func() {
		s.loop.abort()
		for p := range s.pairs {
			p.abort()
		}
	})
}

// close closes the listeners.
func (s *Server) close() {
	for l := range s.accepting {
		s.loop.unwatch(l)
	}
	clear(s.accepting)
	s.listeners.close()
}

// serve makes the loop accept connections of a listener until the end, and answers QUIC clients on its port until
// ctx ends.
func (s *Server) serve(ctx context.Context, l listener) {
	if chans.Closed(s.ended) {
		return
	}
	pacer := &sockets.Pacer{Log: s.log, Listener: "egress " + l.addr.String()}
	var watched *socket
	watched, err := s.loop.watch(l.fd, unix.EPOLLIN, func() { s.accept(watched, pacer) })
	if err != nil {
		s.failed = fmt.Errorf("watching the listener for connections to VIPs on %s: %w", l.addr, err)
		s.end()
		return
	}
	s.accepting[watched] = true
	s.loop.running.Go(func() { answerQUIC(ctx, l.addr, s.log) })
}

// accept accepts the connections that wait, up to acceptsAtOnce of them.
func (s *Server) accept(l *socket, pacer *sockets.Pacer) {
	var err error
	for n := 0; n < acceptsAtOnce && err == nil; n++ {
		var fd int
		if fd, err = acceptFrom(l); err == nil {
			s.admit(fd)
		}
	}
	switch {
	case err == nil, errors.Is(err, unix.EAGAIN): // EAGAIN: all clients are accepted, or have gone
		s.reserve.Refill() // the reserve is empty if another part of the process took the descriptor that was freed last
	case sockets.Dead(err):
		s.failed = fmt.Errorf("the listener for connections to VIPs %s failed: %w", pacer.Listener, err)
		s.end()
	case sockets.OutOfDescriptors(err) && s.reserve.Spend():
		// The client gets a reset at once instead of waiting in the queue of the listener.
		if fd, err := acceptFrom(l); err == nil {
			s.reject(fd, refuse(ReasonDescriptor, "accepting a connection: no descriptors are left"))
		}
		s.reserve.Refill()
	default:
		s.loop.change(l, 0)
		s.loop.start(func(t *task) {
			if t.wait(t.now.Add(pacer.Note(err))) == nil && s.accepting[l] {
				t.change(l, unix.EPOLLIN)
			}
		})
	}
}

// acceptFrom accepts a connection of a listener.
func acceptFrom(l *socket) (int, error) {
	return retry(func() (int, error) {
		fd, _, err := syscall.Accept4(l.fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC) // unix.Accept4 takes one more system call
		return fd, err
	})
}

// admit starts a task that connects a client to its host. If too many connections are open, it refuses the client.
func (s *Server) admit(fd int) {
	if s.metrics.open.Add(1) > s.metrics.max && !s.makeRoom() {
		s.metrics.open.Add(-1)
		s.reject(fd, refuse(ReasonLimit, "%d connections are open, as many as memory and descriptors allow, and none is idle", s.metrics.max))
		return
	}
	s.loop.start(func(t *task) {
		var err error
		if t.client, err = t.watch(fd, eventsOfConn, t.wakeUp); err == nil {
			err = s.carry(t, t.client)
		}
		if err == nil {
			return
		}
		s.metrics.open.Add(-1)
		if t.client != nil {
			t.unwatch(t.client)
		}
		s.reject(fd, err)
	})
}

// carry joins a client's connection with a connection to its host, or returns a refusal.
func (s *Server) carry(t *task, client *socket) error {
	r, err := s.route(t, client)
	if err != nil {
		return err
	}
	var first []byte
	name, exact := r.exact()
	if !exact {
		b := &beginning{from: &taskStream{t, client, t.now.Add(helloTimeout)}, total: &s.beginnings}
		defer b.release()
		if name, err = b.readName(&r); err != nil {
			return err
		}
		first = b.read
	}
	h := r.hostOf(name)
	if h.refused != nil {
		return h.refused
	}
	targets, err := h.to.targets(hostText(name))
	if err != nil {
		return err
	}
	host, addr, err := s.dialer.connect(t, targets)
	if err != nil {
		return err
	}
	c := s.metrics.hosts.countOpen(name, h, r.vip, addr)
	s.metrics.connections.Inc()
	p := s.copier.newPair(client, host, c)
	p.toHost.rest, p.done = first, func() {
		c.open.Add(-1)
		delete(s.pairs, p)
		s.metrics.open.Add(-1)
	}
	s.pairs[p] = true
	p.move()
	return nil
}

// route returns the route of a client's connection, or a refusal. It waits for the first table.
func (s *Server) route(t *task, client *socket) (route, error) {
	vip, redirected, err := conntrack.OriginalOf(client.fd, localAddr(client.fd))
	if err != nil {
		return route{}, refuse(ReasonDirect, "%w", err)
	}
	if !redirected {
		return route{}, refuse(ReasonDirect, "the client did not connect to a VIP but to this port itself")
	}
	for limit := t.now.Add(connectTimeout); !chans.Closed(s.config.Synced); {
		if !t.now.Before(limit) {
			return route{}, refuse(ReasonNoHost, "no table has been received yet, so the host of %s is not known", vip.Addr())
		}
		if err := t.wait(limit); err != nil {
			return route{}, err
		}
	}
	return routeTo(vip, &s.config)
}

// reject resets the connection of a client, and counts and logs why.
func (s *Server) reject(fd int, err error) {
	reason := ReasonConnect
	if r, ok := errors.AsType[*refusal](err); ok {
		reason = r.reason
	}
	s.metrics.refusals.add(s.log, reason, err)
	resetOnClose(fd)
	_ = unix.Close(fd) // last: a client that sees the reset finds the reason in the status
}

// sweep looks at all connections again and again, until the task has to end. It closes those that are idle, and
// records those that may be closed to make room.
func (s *Server) sweep(t *task) {
	timeout := s.config.IdleTimeout
	for t.wait(t.now.Add(min(sweepInterval, max(timeout/newShare, time.Millisecond)))) == nil {
		s.longIdle = nil
		for p := range s.pairs {
			switch idle := t.now.Sub(p.last); {
			case idle >= timeout, (p.toHost.atEOF || p.toClient.atEOF) && idle >= timeout/halfClosedShare:
				s.metrics.idle.Inc()
				p.abort()
				continue
			case idle >= timeout/newShare:
				s.longIdle = append(s.longIdle, idlePair{p, p.last})
			}
			p.probe()
		}
		sort.Slice(s.longIdle, func(i, j int) bool { return s.longIdle[i].idleSince.After(s.longIdle[j].idleSince) })
	}
}

// makeRoom closes the connection that is idle longest. It returns false if none is idle.
func (s *Server) makeRoom() bool {
	for len(s.longIdle) > 0 {
		last := len(s.longIdle) - 1
		p := s.longIdle[last]
		s.longIdle = s.longIdle[:last]
		if s.pairs[p.pair] && p.last.Equal(p.idleSince) { // the pair has carried nothing since the sweep
			s.metrics.idle.Inc()
			p.abort()
			return true
		}
	}
	return false
}
