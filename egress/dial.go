package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/listen"
)

const (
	// connectTimeout is how long the lookup of the name and all attempts to connect may take together.
	connectTimeout = 10 * time.Second
	// resolutionDelay is how long the first addresses that are found wait for the addresses of other lookups (RFC 8305,
	// section 3).
	resolutionDelay = 50 * time.Millisecond
	// attemptDelay is how long an attempt to connect runs before the next address is tried beside it (RFC 8305,
	// section 5).
	attemptDelay = 250 * time.Millisecond
	// maxAttempts is how many attempts of one connection run at a time, each with a descriptor. So an attempt has at least
	// a second.
	maxAttempts = 4
	// maxResolved is the largest number of endpoints of one connection whose names are resolved.
	maxResolved = 16
	// maxListedErrors is how many errors a text has at most.
	maxListedErrors = 8
)

// A dialer connects to hosts.
type dialer struct {
	config  *Config
	fence   *fence
	running *sync.WaitGroup // goroutines of lookups and attempts
}

// An attempt dials an address.
type attempt struct {
	addr netip.AddrPort
	stop context.CancelFunc
}

// A dialing tries addresses until one accepts the connection (RFC 8305). Lookups and attempts have goroutines of their
// own, unless there is nothing else to wait for; what they find is recorded by functions that they send to events.
type dialing struct {
	*dialer

	ctx       context.Context // ends when there is a connection, or none is wanted any longer
	allow     func(netip.AddrPort) error
	events    chan func()
	alternate bool             // dial IPv6 and IPv4 alternately, IPv6 first (RFC 8305, section 4), and not in the order of addrs
	wasIPv6   bool             // the address that was dialled last is one of IPv6
	lookups   int              // how many lookups have not ended
	addrs     []netip.AddrPort // the next addresses to dial
	holdUntil time.Time        // until this time, addrs wait for other lookups
	attempts  []*attempt       // those that run, in the order of their begins
	next      time.Time        // when the next address is dialled although attempts have not ended
	failed    []error          // errors of attempts
	refused   error            // the first refusal of an address
	unknown   error            // the error of the first lookup that failed

	conn *net.TCPConn // the connection
	to   netip.AddrPort
}

// dial connects to one of targets, if allow returns no error for its address. It gives up when ctx ends, or after
// connectTimeout. The error is a refusal.
func (d *dialer) dial(ctx context.Context, targets []endpoint, allow func(netip.AddrPort) error) (*net.TCPConn, netip.AddrPort, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	r := &dialing{dialer: d, ctx: ctx, allow: allow, events: make(chan func()), alternate: len(targets) == 1}
	r.lookUp(targets)
	for r.conn == nil {
		var wake <-chan time.Time
		switch wait := time.Until(r.due()); {
		case len(r.addrs) > 0 && wait <= 0 && ctx.Err() == nil:
			if len(r.attempts) < maxAttempts {
				r.begin()
				continue
			}
			r.attempts[0].stop() // its end makes room, and not only its stop: until then it has a descriptor
		case len(r.addrs) > 0:
			wake = time.After(wait)
		case len(r.attempts)+r.lookups == 0:
			return nil, netip.AddrPort{}, r.failure(targets)
		}
		select {
		case record := <-r.events:
			record()
		case <-wake:
		case <-ctx.Done():
			for _, a := range r.attempts {
				r.failed = append(r.failed, &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(a.addr), Err: os.ErrDeadlineExceeded})
			}
			return nil, netip.AddrPort{}, r.failure(targets)
		}
	}
	return r.conn, r.to, nil
}

// due returns when the next address is dialled, unless something happens earlier.
func (r *dialing) due() (due time.Time) {
	if r.lookups > 0 {
		due = r.holdUntil
	}
	if len(r.attempts) > 0 && r.next.After(due) {
		due = r.next
	}
	return due
}

// send makes the goroutine of dial call record. It returns false if dial has ended.
func (r *dialing) send(record func()) bool {
	select {
	case r.events <- record:
		return true
	case <-r.ctx.Done():
		return false
	}
}

// lookUp starts to look up the names of targets, for both families at the same time. When it returns, r has the
// cached results; other results come later.
func (r *dialing) lookUp(targets []endpoint) {
	families := []family.Family{family.IPv6, family.IPv4}
	if len(r.config.Sources) == 1 {
		families = []family.Family{family.Of(r.config.Sources[0])}
	}
	names := 0
	for _, target := range targets {
		if target.name == "" {
			r.addrs = append(r.addrs, netip.AddrPortFrom(target.addr, target.port))
			continue
		}
		if names++; names > maxResolved {
			continue
		}
		for _, family := range families {
			if addrs, known, err := r.config.Resolve(r.ctx, target.name, family, true); known {
				r.addResult(target, addrs, err)
				continue
			}
			r.lookups++
			r.running.Go(func() {
				addrs, _, err := r.config.Resolve(r.ctx, target.name, family, false)
				r.send(func() {
					r.lookups--
					r.addResult(target, addrs, err)
				})
			})
		}
	}
}

// addResult takes the result of a lookup of target's name.
func (r *dialing) addResult(target endpoint, addrs []netip.Addr, err error) {
	r.unknown = cmp.Or(r.unknown, err)
	for _, addr := range addrs {
		r.addrs = append(r.addrs, netip.AddrPortFrom(addr.Unmap(), target.port))
	}
	if r.holdUntil.IsZero() && len(addrs) > 0 {
		r.holdUntil = time.Now().Add(resolutionDelay)
	}
}

// begin dials the next address.
func (r *dialing) begin() {
	at := 0
	if r.alternate {
		at = max(0, slices.IndexFunc(r.addrs, func(a netip.AddrPort) bool { return a.Addr().Is6() != r.wasIPv6 }))
	}
	addr := r.addrs[at]
	r.addrs, r.wasIPv6, r.next = slices.Delete(r.addrs, at, at+1), addr.Addr().Is6(), time.Now().Add(attemptDelay)
	ctx, stop := context.WithCancel(r.ctx)
	this := &attempt{addr, stop}
	r.attempts = append(r.attempts, this)
	run := func(send func(record func()) bool) {
		conn, err := r.open(ctx, addr)
		stopped := ctx.Err() != nil
		sent := send(func() {
			r.attempts = slices.DeleteFunc(r.attempts, func(a *attempt) bool { return a == this })
			r.conn, r.to = conn, addr
			if err != nil && !stopped {
				r.next = time.Now() // the next address is dialled at once
			}
			if _, isRefusal := errors.AsType[*refusal](err); isRefusal {
				r.refused = cmp.Or(r.refused, err)
			} else if err != nil {
				r.failed = append(r.failed, err)
			}
		})
		if !sent && err == nil {
			_ = conn.Close() // it was never used
		}
		stop()
	}
	if len(r.addrs)+r.lookups == 0 && len(r.attempts) == 1 { // there is nothing else to wait for
		run(func(record func()) bool { record(); return true })
	} else {
		r.running.Go(func() { run(r.send) })
	}
}

// failure returns a refusal that says why there is no connection: the errors of the attempts or, if there was no
// attempt, the error of a lookup.
func (r *dialing) failure(targets []endpoint) error {
	text := targets[0].String()
	if more := len(targets) - 1; more > 0 {
		text += fmt.Sprintf(" and %d other endpoints", more)
	}
	switch {
	case len(r.failed) > 0:
		err, reason := joined(r.failed), ReasonConnect
		if listen.OutOfDescriptors(err) {
			reason = ReasonDescriptor
		}
		return refuse(reason, "connecting to %s: %w", text, err)
	case r.refused != nil && targets[0].name == "":
		return refuse(ReasonAddress, "the endpoint %s is refused: %w", text, r.refused)
	case r.refused != nil:
		return refuse(ReasonAddress, "%s has only addresses that are refused: %w", targets[0].name, r.refused)
	case r.unknown != nil:
		return refuse(ReasonResolution, "resolving %s: %w", text, r.unknown)
	case r.lookups > 0:
		return refuse(ReasonResolution, "resolving %s: no answer within %v", text, connectTimeout)
	}
	return refuse(ReasonResolution, "resolving %s: it has no addresses", text)
}

// joined returns one error of several, with the texts of the first ones in one line.
func joined(errs []error) error {
	err := errs[0]
	for _, next := range errs[1:min(len(errs), maxListedErrors)] {
		err = fmt.Errorf("%w, %w", err, next)
	}
	if more := len(errs) - maxListedErrors; more > 0 {
		err = fmt.Errorf("%w, %d more", err, more)
	}
	return err
}

// open connects to addr, from the configured source of its family and with the configured mark.
func (r *dialing) open(ctx context.Context, addr netip.AddrPort) (*net.TCPConn, error) {
	if err := r.allow(addr); err != nil {
		return nil, err
	}
	var d net.Dialer
	d.SetMultipathTCP(false)
	for _, a := range r.config.Sources {
		if family.Of(a) == family.Of(addr.Addr()) {
			d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0))
		}
	}
	if d.LocalAddr == nil && len(r.config.Sources) > 0 {
		return nil, refuse(ReasonAddress, "%s is refused: there is no --egress-source of its family", addr.Addr())
	}
	if d.LocalAddr != nil || r.config.Mark != 0 {
		d.Control = func(_, _ string, conn syscall.RawConn) (err error) {
			controlErr := conn.Control(func(fd uintptr) {
				// Without this option, bind takes a port that no other connection of this host can use, whatever its
				// destination. Linux before 4.2 lacks the option.
				_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1) //nolint:gosec // a descriptor
				err = setMark(int(fd), r.config.Mark)                                             //nolint:gosec // a descriptor
			})
			return errors.Join(controlErr, err)
		}
	}
	conn, err := d.DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil //nolint:forcetypeassert // of network tcp
}

// setMark sets the mark of a socket's packets, unless mark is 0.
func setMark(fd int, mark uint32) error {
	if mark == 0 {
		return nil
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		return fmt.Errorf("setting the mark %d (--egress-mark; it needs CAP_NET_ADMIN): %w", mark, err)
	}
	return nil
}
