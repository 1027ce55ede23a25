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
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/sockets"
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
	// maxResolved is the largest number of endpoints of one connection whose names are resolved.
	maxResolved = 16
	// maxListedErrors is how many errors the text of attemptErrors has at most.
	maxListedErrors = 8
)

// A dialer connects to hosts. It belongs to a loop.
type dialer struct {
	config *Config
	guard  *guard
	extra  int64 // how many attempts may still start beside another attempt of the same connection: each takes a descriptor
}

// A dialing tries addresses until one accepts the connection (RFC 8305).
type dialing struct {
	*dialer
	*task

	allowForbidden bool             // forbidden addresses are allowed, too
	lookups        int              // how many lookups have not ended
	cancel         func()           // ends the lookups; nil without any
	heldAddrs      []netip.AddrPort // found addresses that are not yet in addrs: see release
	holdUntil      time.Time        // until this time, heldAddrs wait for other lookups
	addrs          []netip.AddrPort // the next addresses to dial
	alternate      bool             // dial IPv6 and IPv4 alternately
	attempts       []*attempt       // attempts that have not ended
	next           time.Time        // when the next address is dialled although attempts have not ended
	failed         []error          // errors of attempts
	failedLookups  []failedLookup
}

// A failedLookup is a lookup that found no addresses.
type failedLookup struct {
	name string
	err  error
}

// An attempt is one attempt to connect to an address.
type attempt struct {
	*socket

	addr    netip.AddrPort
	isExtra bool // it began while another attempt of this dialing ran
}

// dial connects to one of targets. It suspends the task t while it waits, and gives up at deadline. If allowForbidden
// is true, it also dials forbidden addresses. The error is a refusal.
func (d *dialer) dial(t *task, targets []endpoint, allowForbidden bool, deadline time.Time) (*socket, netip.AddrPort, error) {
	r := &dialing{dialer: d, task: t, allowForbidden: allowForbidden, alternate: len(targets) == 1}
	defer r.giveUp()
	r.lookUp(targets, deadline)
	for {
		if won := r.winner(); won != nil {
			return won.socket, won.addr, nil
		}
		r.release()
		switch {
		case len(r.addrs) > 0 && r.mayBegin():
			r.begin()
			continue
		case len(r.addrs)+len(r.heldAddrs)+len(r.attempts)+r.lookups == 0:
			return nil, netip.AddrPort{}, r.failure(targets)
		case !t.now.Before(deadline):
			for _, a := range r.attempts {
				r.failed = append(r.failed, dialError(a.addr, os.ErrDeadlineExceeded))
			}
			return nil, netip.AddrPort{}, r.failure(targets)
		}
		if err := t.wait(r.wakeTime(deadline)); err != nil {
			return nil, netip.AddrPort{}, err
		}
	}
}

// lookUp starts to look up the names of targets, for both families at the same time. When it returns, r has the
// cached results; other results come later.
func (r *dialing) lookUp(targets []endpoint, deadline time.Time) {
	names := 0
	ctx := r.ctx
	for _, target := range targets {
		if target.name == "" {
			r.heldAddrs = append(r.heldAddrs, netip.AddrPortFrom(target.addr, target.port))
			continue
		}
		if names++; names > maxResolved {
			continue
		}
		for _, family := range r.families() {
			if addrs, known, err := r.config.Resolve(ctx, target.name, family, true); known {
				r.addResult(target, addrs, err)
				continue
			}
			if r.lookups++; r.lookups == 1 {
				ctx, r.cancel = context.WithDeadline(ctx, deadline)
			}
			r.running.Go(func() {
				addrs, _, err := r.config.Resolve(ctx, target.name, family, false)
				r.post(func() {
					r.lookups--
					r.addResult(target, addrs, err)
					r.wakeUp()
				})
			})
		}
	}
}

// families returns the families for which names are resolved.
func (d *dialer) families() []family.Family {
	if len(d.config.Sources) != 1 {
		return []family.Family{family.IPv6, family.IPv4}
	}
	return []family.Family{family.Of(d.config.Sources[0])}
}

// addResult takes the result of a lookup of target's name.
func (r *dialing) addResult(target endpoint, addrs []netip.Addr, err error) {
	if err != nil {
		r.failedLookups = append(r.failedLookups, failedLookup{target.name, err})
	}
	for _, addr := range addrs {
		r.heldAddrs = append(r.heldAddrs, netip.AddrPortFrom(addr.Unmap(), target.port))
	}
	if r.holdUntil.IsZero() && len(addrs) > 0 {
		r.holdUntil = r.now.Add(resolutionDelay)
	}
}

// release moves the addresses in heldAddrs to addrs, unless lookups still run and it is earlier than holdUntil. If
// r.alternate is true, the families alternate, IPv6 first (RFC 8305, section 4); otherwise the order stays.
func (r *dialing) release() {
	if r.lookups > 0 && r.now.Before(r.holdUntil) {
		return
	}
	all := r.heldAddrs
	if r.heldAddrs = nil; r.alternate {
		all = alternateFamilies(all)
	}
	r.addrs = append(r.addrs, all...)
}

// alternateFamilies returns addrs in an order in which the families alternate, IPv6 first.
func alternateFamilies(addrs []netip.AddrPort) (all []netip.AddrPort) {
	var next [2][]netip.AddrPort // IPv6, IPv4
	for _, a := range addrs {
		family := 0
		if a.Addr().Is4() {
			family = 1
		}
		next[family] = append(next[family], a)
	}
	for family := 0; len(all) < len(addrs); family = 1 - family {
		if len(next[family]) > 0 {
			all, next[family] = append(all, next[family][0]), next[family][1:]
		}
	}
	return all
}

// mayBegin reports whether it is time to dial another address.
func (r *dialing) mayBegin() bool {
	return len(r.attempts) == 0 || !r.now.Before(r.next) && r.extra > 0
}

// begin dials the next address.
func (r *dialing) begin() {
	addr := r.addrs[0]
	r.addrs, r.next = r.addrs[1:], r.now.Add(attemptDelay)
	a := &attempt{addr: addr, isExtra: len(r.attempts) > 0}
	err := error(nil)
	if !r.allowForbidden {
		err = r.allow(r.task, addr)
	}
	if err == nil {
		a.socket, err = r.open(addr)
	}
	if err != nil {
		r.fail(err)
		return
	}
	if r.attempts = append(r.attempts, a); a.isExtra {
		r.extra--
	}
}

// allow returns a refusal if no connection may be made to addr.
func (d *dialer) allow(t *task, addr netip.AddrPort) (err error) {
	forbids := func() { err = d.guard.forbids(t.ctx, addr) }
	if d.guard.mayWait(addr.Addr()) {
		t.await(forbids)
	} else {
		forbids()
	}
	if err != nil {
		return &refusal{ReasonAddress, err}
	}
	return nil
}

// fail records the error of an attempt. The next address is dialled at once.
func (r *dialing) fail(err error) {
	r.failed = append(r.failed, err)
	r.next = r.now
}

// winner returns the attempt that is connected; nil while there is none. It ends attempts that have failed, and
// records their errors.
func (r *dialing) winner() *attempt {
	for _, a := range slices.Clone(r.attempts) {
		if !a.writable {
			continue
		}
		r.end(a)
		code, err := unix.Errno(0), error(nil)
		if a.failed {
			var n int
			n, err = unix.GetsockoptInt(a.fd, unix.SOL_SOCKET, unix.SO_ERROR)
			code = unix.Errno(n) //nolint:gosec // an error number
		}
		// A host that resets a connection has accepted it before, and may have sent data.
		if err == nil && (code == 0 && !a.failed || code == unix.ECONNRESET || code == unix.EPIPE) {
			return a
		}
		r.close(a.socket)
		r.fail(dialError(a.addr, cmp.Or(err, os.NewSyscallError("connect", code))))
	}
	return nil
}

// end takes an attempt out of r.attempts.
func (r *dialing) end(a *attempt) {
	r.attempts = slices.DeleteFunc(r.attempts, func(other *attempt) bool { return other == a })
	if a.isExtra {
		r.extra++
	}
}

// giveUp ends the lookups and attempts that have not ended.
func (r *dialing) giveUp() {
	if r.cancel != nil {
		r.cancel()
	}
	for _, a := range slices.Clone(r.attempts) {
		r.end(a)
		r.close(a.socket)
	}
}

// wakeTime returns when dial goes on if no event comes earlier. The time is never later than deadline.
func (r *dialing) wakeTime(deadline time.Time) time.Time {
	wake := deadline
	if len(r.addrs) > 0 {
		next := r.next
		if r.extra <= 0 && len(r.attempts) > 0 { // other connections have to end attempts first
			next = r.now.Add(attemptDelay)
		}
		if next.Before(wake) {
			wake = next
		}
	}
	if len(r.heldAddrs) > 0 && r.holdUntil.Before(wake) {
		wake = r.holdUntil
	}
	return wake
}

// failure returns a refusal that says why there is no connection: the errors of the attempts or, if there was no
// attempt, the error of a lookup.
func (r *dialing) failure(targets []endpoint) error {
	text := targets[0].String()
	if more := len(targets) - 1; more > 0 {
		text += fmt.Sprintf(" and %d other endpoints", more)
	}
	var forbidden *refusal
	for _, err := range r.failed {
		if refused, ok := errors.AsType[*refusal](err); ok && forbidden == nil {
			forbidden = refused
		} else if !ok {
			reason := ReasonConnect
			if sockets.OutOfDescriptors(attemptErrors(r.failed)) {
				reason = ReasonDescriptor
			}
			return refuse(reason, "connecting to %s: %w", text, attemptErrors(r.failed))
		}
	}
	switch {
	case forbidden != nil && targets[0].name == "":
		return refuse(ReasonAddress, "the endpoint %s is refused: %w", text, forbidden)
	case forbidden != nil:
		return refuse(ReasonAddress, "%s has only addresses that are refused: %w", targets[0].name, forbidden)
	case len(r.failedLookups) > 0:
		return refuse(ReasonResolution, "resolving %s: %w", r.failedLookups[0].name, r.failedLookups[0].err)
	case r.lookups > 0:
		return refuse(ReasonResolution, "resolving %s: no answer within %v", text, connectTimeout)
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

// open begins to connect to addr, from the configured source of its family and with the configured mark.
func (r *dialing) open(addr netip.AddrPort) (*socket, error) {
	domain := unix.AF_INET6
	if addr.Addr().Is4() {
		domain = unix.AF_INET
	}
	source := slices.IndexFunc(r.config.Sources, func(a netip.Addr) bool { return family.Of(a) == family.Of(addr.Addr()) })
	if source < 0 && len(r.config.Sources) > 0 {
		return nil, refuse(ReasonAddress, "%s is refused: there is no --egress-source of its family", addr.Addr())
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return nil, dialError(addr, os.NewSyscallError("socket", err))
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // the host gets at once what a client has sent
	if source >= 0 {
		// Without this option, bind takes a port that no other connection of this host can use, whatever its
		// destination. Linux before 4.2 lacks the option.
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
		err = os.NewSyscallError("bind", unix.Bind(fd, sockaddr(netip.AddrPortFrom(r.config.Sources[source], 0))))
	}
	if err == nil {
		err = setMark(fd, r.config.Mark)
	}
	if err == nil {
		err = os.NewSyscallError("connect", unix.Connect(fd, sockaddr(addr)))
	}
	var s *socket
	if err == nil || errors.Is(err, unix.EINPROGRESS) {
		s, err = r.watch(fd, eventsOfWriting, r.wakeUp)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, dialError(addr, err)
	}
	return s, nil
}

// dialError returns the error of an attempt in the form of package net.
func dialError(addr netip.AddrPort, err error) error {
	return &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(addr), Err: err}
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
