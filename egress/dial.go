package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/sockets"
)

const (
	// connectTimeout is how long the name's resolution and all attempts to connect may take together.
	connectTimeout = 10 * time.Second
	// resolutionDelay is how long the first addresses wait for those of other lookups (RFC 8305, section 3).
	resolutionDelay = 50 * time.Millisecond
	// attemptDelay is how long an attempt to connect has before the next address is tried beside it (RFC 8305,
	// section 5).
	attemptDelay = 250 * time.Millisecond
	// maxResolved is the number of endpoints whose names are resolved for one connection.
	maxResolved = 16
	// maxListedErrors is the number of errors in the text of attemptErrors.
	maxListedErrors = 8
)

// A dialing connects to the first of some addresses that accepts. [net.Dialer] connects to each: of several, it would
// try those of a family one after the other, each for its share of the timeout.
type dialing struct {
	server  *Server
	any     bool                // also forbidden addresses
	addrs   chan netip.AddrPort // closed after the last one
	running sync.WaitGroup      // of attempts beside the first one, and of lookups
	won     func()              // ends all attempts

	mu     sync.Mutex
	conn   *net.TCPConn
	failed []error // of attempts
	lost   []error // of lookups
}

// race connects to one of the targets; any allows all addresses. The error is a refusal.
func (s *Server) race(ctx context.Context, targets []endpoint, any bool) (*net.TCPConn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d := &dialing{server: s, any: any, won: cancel}
	lookups, n := s.lookUp(ctx, targets)
	if len(lookups) == n { // all are cached
		var all []netip.AddrPort
		for range n {
			all = append(all, d.take(<-lookups)...)
		}
		d.addrs = make(chan netip.AddrPort, len(all))
		d.offer(ctx, all, len(targets) == 1)
		close(d.addrs)
	} else {
		d.addrs = make(chan netip.AddrPort)
		d.running.Go(func() { d.follow(ctx, lookups, n, len(targets) == 1) })
	}
	d.dialNext(ctx)
	d.running.Wait()
	if d.conn == nil {
		return nil, d.refusal(targets)
	}
	return d.conn, nil
}

// dialNext dials one address after the other until one accepts. While an attempt takes longer than attemptDelay,
// another goroutine dials the next ones, unless the server makes too many such attempts: each takes a descriptor.
func (d *dialing) dialNext(ctx context.Context) {
	for addr := range d.addrs {
		if ctx.Err() != nil {
			d.end(nil, ctx.Err())
			return
		}
		d.running.Add(1)
		beside := time.AfterFunc(attemptDelay, func() {
			defer d.running.Done()
			if d.server.attempts.TryAcquire(1) {
				defer d.server.attempts.Release(1)
				d.dialNext(ctx)
			}
		})
		conn, err := d.server.dial(ctx, addr, d.any)
		if beside.Stop() {
			d.running.Done()
		}
		if d.end(conn, err) {
			return
		}
	}
}

// end takes the result of an attempt. It reports whether there is a connection now.
func (d *dialing) end(conn *net.TCPConn, err error) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case err != nil:
		d.failed = append(d.failed, err)
	case d.conn != nil:
		reset(conn)
	default:
		d.conn = conn
		d.won()
	}
	return d.conn != nil
}

// A found is the result of a lookup: addresses to dial, or a refusal that says why there are none.
type found struct {
	addrs []netip.AddrPort
	err   error
}

// lookUp finds the addresses of targets, each family of a name at the same time. It sends n results, for which the
// channel has room; those that are cached before it returns.
func (s *Server) lookUp(ctx context.Context, targets []endpoint) (results <-chan found, n int) {
	families := s.families()
	all := make(chan found, len(families)*len(targets))
	names := 0
	for _, target := range targets {
		if target.name == "" {
			n++
			all <- found{addrs: []netip.AddrPort{netip.AddrPortFrom(target.addr, target.port)}}
			continue
		}
		if names++; names > maxResolved {
			continue
		}
		for _, family := range families {
			n++
			if addrs, known, err := s.config.Resolve(ctx, target.name, family, true); known {
				all <- target.at(addrs, err)
				continue
			}
			go func() {
				addrs, _, err := s.config.Resolve(ctx, target.name, family, false)
				all <- target.at(addrs, err)
			}()
		}
	}
	return all, n
}

// at returns the result of a lookup of the endpoint's name.
func (e endpoint) at(addrs []netip.Addr, err error) (f found) {
	if err != nil {
		return found{err: refuse(ReasonResolution, "resolving %s: %w", e.name, err)}
	}
	for _, addr := range addrs {
		f.addrs = append(f.addrs, netip.AddrPortFrom(addr.Unmap(), e.port))
	}
	return f
}

// families returns the families that names are resolved for.
func (s *Server) families() []Family {
	if len(s.config.Sources) != 1 {
		return []Family{IPv6, IPv4}
	}
	return []Family{familyOf(s.config.Sources[0])}
}

// follow offers the addresses of n lookups. The first ones wait a little for those of other lookups.
func (d *dialing) follow(ctx context.Context, lookups <-chan found, n int, inTurn bool) {
	defer close(d.addrs)
	var waited <-chan time.Time
	var all []netip.AddrPort
	for n > 0 {
		select {
		case f := <-lookups:
			n--
			if all = append(all, d.take(f)...); waited == nil && len(all) > 0 {
				waited = time.After(resolutionDelay)
			}
			if n > 0 {
				continue
			}
		case <-waited: // never again: further addresses do not wait
		case <-ctx.Done():
			return
		}
		d.offer(ctx, all, inTurn)
		all = nil
	}
}

// take returns the addresses that a lookup has found.
func (d *dialing) take(f found) []netip.AddrPort {
	if f.err != nil {
		d.mu.Lock()
		d.lost = append(d.lost, f.err)
		d.mu.Unlock()
	}
	return f.addrs
}

// offer gives addresses to the attempts: in the order in which they are found, or the families in turn, IPv6 first (RFC
// 8305, section 4).
func (d *dialing) offer(ctx context.Context, addrs []netip.AddrPort, inTurn bool) {
	rank := map[netip.AddrPort]int{}
	if inTurn && len(addrs) > 1 {
		counts := map[bool]int{true: 1} // IPv4 is odd
		for _, a := range addrs {
			rank[a] = counts[a.Addr().Is4()]
			counts[a.Addr().Is4()] += 2
		}
		slices.SortStableFunc(addrs, func(a, b netip.AddrPort) int { return rank[a] - rank[b] })
	}
	for _, addr := range addrs {
		select {
		case d.addrs <- addr:
		case <-ctx.Done():
			return
		}
	}
}

// refusal returns why there is no connection: the errors of the attempts or, without any, those of the lookups.
func (d *dialing) refusal(targets []endpoint) error {
	text := targets[0].String()
	if more := len(targets) - 1; more > 0 {
		text += fmt.Sprintf(" and %d other endpoints", more)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var forbidden *refusal
	for _, err := range d.failed {
		if r, ok := errors.AsType[*refusal](err); ok && forbidden == nil {
			forbidden = r
		} else if !ok {
			reason := ReasonConnect
			if sockets.OutOfDescriptors(attemptErrors(d.failed)) {
				reason = ReasonDescriptor
			}
			return refuse(reason, "connecting to %s: %w", text, attemptErrors(d.failed))
		}
	}
	switch {
	case forbidden != nil && targets[0].name == "":
		return refuse(ReasonAddress, "the endpoint %s is refused: %w", text, forbidden)
	case forbidden != nil:
		return refuse(ReasonAddress, "%s has only addresses that are refused: %w", targets[0].name, forbidden)
	case len(d.lost) > 0:
		return d.lost[0]
	}
	return refuse(ReasonResolution, "resolving %s: it has no addresses", text)
}

// attemptErrors are the errors of attempts to connect, in one line of text.
type attemptErrors []error

// Error returns the texts of the first errors.
func (a attemptErrors) Error() string {
	var texts []string
	for _, err := range a[:min(len(a), maxListedErrors)] {
		texts = append(texts, err.Error())
	}
	if more := len(a) - len(texts); more > 0 {
		texts = append(texts, fmt.Sprintf("%d more", more))
	}
	return strings.Join(texts, ", ")
}

// Unwrap returns the errors.
func (a attemptErrors) Unwrap() []error { return a }

// dial connects to one address, from the source of its family and with the mark. A forbidden address is a refusal,
// unless any is true.
func (s *Server) dial(ctx context.Context, addr netip.AddrPort, any bool) (*net.TCPConn, error) {
	dialer := net.Dialer{KeepAliveConfig: keepAlive()}
	for _, source := range s.config.Sources {
		if familyOf(source) == familyOf(addr.Addr()) {
			dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0))
		}
	}
	dialer.ControlContext = func(ctx context.Context, _, final string, conn syscall.RawConn) error {
		addr, err := netip.ParseAddrPort(final)
		if err == nil && !any {
			err = s.forbids(ctx, addr)
		}
		switch {
		case err != nil:
			return &refusal{ReasonAddress, err}
		case dialer.LocalAddr != nil:
			choosePortLate(conn)
		case len(s.config.Sources) > 0:
			return refuse(ReasonAddress, "%s is refused: there is no --egress-source of its family", addr.Addr())
		}
		return setMark(conn, s.config.Mark)
	}
	conn, err := dialer.DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// setMark sets the mark of a socket's packets, unless it is 0.
func setMark(conn syscall.RawConn, mark uint32) error {
	if mark == 0 {
		return nil
	}
	var err error
	controlErr := conn.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)) //nolint:gosec // a descriptor
	})
	if err = errors.Join(controlErr, err); err != nil {
		return fmt.Errorf("setting the mark %d (--egress-mark; it needs CAP_NET_ADMIN): %w", mark, err)
	}
	return nil
}

// choosePortLate lets the kernel choose the port of a socket with a source address when it connects.
// Otherwise it chooses one when it binds the socket, and no other connection of the host gets that port,
// whatever its destination: the connections to all hosts together, and those of other programs, would
// share the 28,000 ports that connections to one host may have. Before Linux 4.2 they do.
func choosePortLate(conn syscall.RawConn) {
	_ = conn.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1) //nolint:gosec // a descriptor
	})
}

// keepAlive returns how a connection is probed while it is idle: a peer that has vanished is noticed
// after about five minutes.
func keepAlive() net.KeepAliveConfig {
	return net.KeepAliveConfig{Enable: true, Idle: 3 * time.Minute, Interval: 20 * time.Second, Count: 6}
}

// reset closes a connection with a reset, which discards what was not sent.
func reset(conn *net.TCPConn) {
	_ = conn.SetLinger(0) // fails for a connection that was reset by the peer, only
	_ = conn.Close()
}
