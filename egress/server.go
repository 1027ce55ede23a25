package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/listen"
)

// A Server carries connections to automatic VIPs. Make one with [New] and start it with
// [Server.Run]. Its other methods are safe for concurrent use.
type Server struct {
	config    Config
	log       *slog.Logger
	listeners *listen.Set
	metrics   *metrics
	dialer    *dialer
	buffers   sync.Pool // of *[bufferSize]byte
	limit     *connlimit.Limit
	parsing   sync.Mutex     // see beginning
	running   sync.WaitGroup // goroutines of connections
	conns     sync.Map       // the open connections: *conn

	ending, dying context.Context // end when Run has to end, and when connections have to end
	end           func()
	die           context.CancelCauseFunc
}

const (
	// descriptorsPerConn is how many descriptors a connection has: one for the client and, while the host is dialled, one
	// for each attempt.
	descriptorsPerConn = 1 + maxAttempts
	// bytesPerConn is the memory in bytes of a connection that has carried little data: in the process, two goroutines,
	// and in the kernel, two sockets. Half of Config.Memory is for connections.
	bytesPerConn = 24 << 10
	// sweepInterval is the longest time between two sweeps over all connections.
	sweepInterval = time.Second
	// The idle timeout divided by halfClosedShare is the idle timeout of a connection that has ended in one direction:
	// five minutes of an hour.
	halfClosedShare = 12
)

// Refusals of connections that end before they are joined.
var (
	errEnded       = refuse(ReasonEnd, "the agent ends")
	errGone        = refuse(ReasonClosed, "the client has reset the connection before its host was connected")
	errDescriptors = refuse(ReasonDescriptor, "accepting a connection: no descriptors are left")
	errRoom        = refuse(ReasonLimit, "the connection gave way to another one: memory and descriptors allow no more")
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
	s := &Server{config: cfg, log: cfg.Logger, buffers: sync.Pool{New: newBuffer}}
	s.ending, s.end = context.WithCancel(context.WithoutCancel(ctx))
	s.dying, s.die = context.WithCancelCause(context.WithoutCancel(ctx))
	var err error
	s.listeners, err = listen.New(listen.Spec{
		Name: "connections to VIPs", Setting: addrSetting, Addr: cfg.Addr, Networks: []string{"tcp"},
		FreeBind: true, Keep: true, Opened: cfg.Opened, Log: cfg.Logger,
	}, cfg.Inherited)
	if err != nil {
		return nil, err
	}
	if err := s.listeners.Open(ctx); err != nil {
		return nil, err
	}
	limit := descriptorLimit()
	if cfg.Memory > 0 {
		limit = min(limit, max(cfg.Memory/2/bytesPerConn, 1))
	}
	s.metrics = newMetrics(limit, cfg.Registerer)
	s.limit = connlimit.New("egress", int(limit), maxBeginnings)
	s.dialer = &dialer{&s.config, newFence(&s.config), &s.running}
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(s.limit.Metric())
	}
	return s, nil
}

// descriptorLimit returns how many connections the limit of descriptors allows. They take at most half of all descriptors,
// which leaves enough for DNS.
func descriptorLimit() int64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur > 1<<30 {
		limit.Cur = 1 << 30
	}
	return max(int64(limit.Cur)/2/descriptorsPerConn, 1) //nolint:gosec // at most 2^30
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
func (s *Server) Addrs() []netip.AddrPort { return s.listeners.AddrPorts() }

// Listeners returns the listeners.
func (s *Server) Listeners() *listen.Set { return s.listeners }

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
		s.die(errEnded)
	}
	s.end()
}

// Run carries connections until ctx ends or [Server.End] is called. Then it accepts no more connections, waits up to
// [Config.Drain] for the open connections, and resets the rest. When it returns, its goroutines have ended. A
// listener that fails is opened again. Run makes the runtime use at least two processors.
func (s *Server) Run(ctx context.Context) error {
	defer s.limit.Close()
	if runtime.GOMAXPROCS(0) == 1 { // DNS queries need a processor beside a connection that copies
		runtime.GOMAXPROCS(2)
	}
	defer context.AfterFunc(ctx, s.end)()
	tick := time.NewTicker(min(sweepInterval, max(s.config.IdleTimeout/60, time.Millisecond)))
	defer tick.Stop()
	var sweeping sync.WaitGroup
	sweeping.Go(func() {
		for s.dying.Err() == nil {
			select {
			case now := <-tick.C:
				s.sweep(now)
			case <-s.dying.Done():
			}
		}
	})
	err := s.listeners.Serve(s.ending, s.accept)
	s.drain()
	sweeping.Wait()
	return err
}

// drain waits until the open connections have ended, at most for Config.Drain, and resets the rest.
func (s *Server) drain() {
	timer := time.AfterFunc(s.config.Drain, func() { s.die(errEnded) })
	stop := context.AfterFunc(s.dying, func() {
		for c := range s.conns.Range {
			c.(*conn).abort(errEnded) //nolint:forcetypeassert // it has nothing else
		}
	})
	s.running.Wait()
	_, _ = timer.Stop(), stop()
	s.die(errEnded)
}

// accept accepts the clients of a listener until ctx ends. It waits for nothing else: each client has a goroutine.
func (s *Server) accept(ctx context.Context, socket *listen.Socket) error {
	l := socket.Conn.(net.Listener)                          //nolint:forcetypeassert // of network tcp
	defer context.AfterFunc(ctx, func() { _ = l.Close() })() // ends Accept
	pacer := &listen.Pacer{Log: s.log, Listener: "egress " + l.Addr().String()}
	for {
		client, reserved, err := s.limit.Accept(l, pacer, ctx.Done())
		switch {
		case err == nil:
			s.running.Go(func() { s.serve(client.(*net.TCPConn), reserved) }) //nolint:forcetypeassert // of a TCP listener
		case ctx.Err() != nil:
			return nil // the listener is closed
		default:
			return fmt.Errorf("accepting connections to VIPs on %s: %w", l.Addr(), err)
		}
	}
}

// serve carries the connection of a client to its end, or refuses it. One with a reserved descriptor gets a reset at once
// instead of waiting in the queue of the listener.
func (s *Server) serve(client *net.TCPConn, reserved bool) {
	ctx, cancel := context.WithCancelCause(s.dying)
	defer cancel(nil)
	c := &conn{Conn: client, client: client, cancel: cancel}
	c.place = s.limit.Enter(c)
	s.conns.Store(c, nil)
	s.metrics.open.Add(1)
	err := errDescriptors
	if !reserved {
		err = s.carry(ctx, c)
	}
	s.conns.Delete(c)
	s.metrics.open.Add(-1)
	if err != nil {
		s.reject(client, cmp.Or(context.Cause(ctx), err)) // if ctx has ended, err is only a consequence
	}
	c.place.Leave()
}

// carry carries a connection to its end, or returns a refusal.
func (s *Server) carry(ctx context.Context, c *conn) error {
	c.place.Serve()
	vip, redirected, err := conntrack.OriginalTCP(c.client)
	switch {
	case err != nil:
		return refuse(ReasonDirect, "%w", err)
	case !redirected:
		return refuse(ReasonDirect, "the client did not connect to a VIP but to this port itself")
	}
	return s.carryTo(ctx, c, vip)
}

// carryTo is carry for the VIP to which the client has connected.
func (s *Server) carryTo(ctx context.Context, c *conn, vip netip.AddrPort) error {
	var first func() ([]byte, error)
	r, err := s.route(ctx, vip)
	if err == nil {
		first, err = s.connect(ctx, c, &r)
	}
	if err != nil {
		r.record(false)
		return err
	}
	defer c.counts.open.Add(-1)
	if ctx.Err() != nil { // abort was called before the connection was joined
		reset(c.host)
		return ctx.Err()
	}
	return c.copy(&s.buffers, first)
}

// connect connects a client to its host. It returns a function that returns the first bytes of the client for the host, or
// a refusal.
func (s *Server) connect(ctx context.Context, c *conn, r *route) (first func() ([]byte, error), err error) {
	b := &beginning{from: c.client, hold: c.place.Hold, parsing: &s.parsing}
	name, exact := r.exact()
	if !exact {
		c.place.Await()
		defer b.release()
		_ = c.client.SetReadDeadline(time.Now().Add(helloTimeout)) // fails only on a closed connection
		if ctx.Err() != nil {                                      // abort was called before
			return nil, ctx.Err()
		}
		if name, err = b.readName(r); err != nil {
			return nil, err
		}
		_ = c.client.SetReadDeadline(time.Time{})
		c.place.Serve()
	}
	h := r.hostOf(name)
	if h.refused != nil {
		return nil, h.refused
	}
	host, addr, err := s.dialer.connect(ctx, h.targets(hostText(name)), r.reach())
	if err != nil {
		return nil, err
	}
	s.metrics.connections.Inc()
	c.join(host, s.metrics.hosts.countOpen(name, h, r.vip, addr))
	if exact && r.guard != nil {
		return func() ([]byte, error) { return s.look(c, b, r) }, nil
	}
	r.record(true)
	return func() ([]byte, error) { return b.read, nil }, nil
}

// route returns the route to a VIP, or a refusal. It waits for the first table.
func (s *Server) route(ctx context.Context, vip netip.AddrPort) (route, error) {
	if policy := s.config.Guard.Policy(); policy != nil {
		if r, guarded, err := routeGuarded(vip, s.config.Guard, policy); guarded {
			return r, err
		}
	}
	select {
	case <-s.config.Synced:
	case <-ctx.Done():
		return route{}, ctx.Err()
	case <-time.After(connectTimeout):
		return route{}, refuse(ReasonNoHost, "no table has been received yet, so the host of %s is not known", vip.Addr())
	}
	return routeTo(vip, &s.config)
}

// reject resets the connection of a client, and counts and logs why.
func (s *Server) reject(client *net.TCPConn, err error) {
	reason := ReasonConnect
	if r, ok := errors.AsType[*refusal](err); ok {
		reason = r.reason
	}
	count := s.metrics.refusals.add(reason, err)
	reset(client) // a client that sees the reset finds the reason in the status
	if count > 0 {
		s.log.Warn("a connection to a VIP was refused", "reason", reason, "error", err, "count", count)
	}
}

// sweep looks at all connections. It closes those that are idle, or whose client has gone.
func (s *Server) sweep(now time.Time) {
	timeout := s.config.IdleTimeout
	for each := range s.conns.Range {
		c := each.(*conn) //nolint:forcetypeassert // it has nothing else
		switch idle := c.place.Unchanged(now); {
		case c.isGone():
			c.abort(errGone)
		case !c.joined.Load():
		case idle >= timeout, c.halfClosed() && idle >= timeout/halfClosedShare:
			if c.abort(nil) {
				s.metrics.idle.Inc()
			}
		}
	}
}
