package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/nametap/nametap/dnsproxy/sockets"
)

// Delays of RFC 8305, sections 3 and 5.
const (
	// resolutionDelay is how long the first addresses wait for those of other lookups.
	resolutionDelay = 50 * time.Millisecond
	// attemptDelay is how long an attempt to connect has before the next address is tried beside it.
	attemptDelay = 250 * time.Millisecond
)

// An attempt is the result of one attempt to connect.
type attempt struct {
	conn *net.TCPConn
	err  error
}

// A racer connects to the first address that accepts, while lookups may still find others. Only one
// goroutine uses it.
type racer struct {
	dial    func(context.Context, netip.AddrPort) (*net.TCPConn, error)
	beside  *semaphore.Weighted // bounds attempts beside others
	inTurn  bool                // the families in turn; otherwise in the order in which they are found
	lookups int                 // that have not ended
	queue   []netip.AddrPort
	running int // attempts
	results chan attempt
	next    *time.Timer // when the next address is tried
	due     bool        // that time has come, and there was no address
	refused []error     // of lookups
	failed  []error     // of attempts
}

// race connects to one of the targets. any allows all addresses. The error is a refusal.
func (s *Server) race(ctx context.Context, targets []endpoint, any bool) (*net.TCPConn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	found, n := s.lookUp(ctx, targets, any)
	r := &racer{
		dial: s.dial, beside: s.attempts, inTurn: len(targets) == 1, lookups: n, results: make(chan attempt), next: time.NewTimer(time.Hour),
	}
	defer r.next.Stop()
	if len(found) == n { // all are cached
		for range n {
			r.take(<-found)
		}
		if len(r.queue) == 1 { // there is no race
			conn, err := s.dial(ctx, r.queue[0])
			if err != nil {
				r.failed = append(r.failed, err)
				err = r.refusal(targets)
			}
			return conn, err
		}
		r.start(ctx)
	}
	defer func() {
		if r.running > 0 {
			go closeLate(r.results, r.running)
		}
	}()
	for r.lookups+len(r.queue)+r.running > 0 {
		select {
		case f := <-found:
			r.add(ctx, f)
		case a := <-r.results:
			r.running--
			if a.err == nil {
				return a.conn, nil
			}
			r.failed = append(r.failed, a.err)
			r.start(ctx)
		case <-r.next.C:
			r.start(ctx)
		case <-ctx.Done():
			r.failed = append(r.failed, ctx.Err())
			return nil, r.refusal(targets)
		}
	}
	return nil, r.refusal(targets)
}

// take takes the result of a lookup.
func (r *racer) take(f found) {
	r.lookups--
	if f.err != nil {
		r.refused = append(r.refused, f.err)
	}
	r.queue = append(r.queue, f.addrs...)
	if r.inTurn {
		r.queue = inTurn(r.queue)
	}
}

// add adds the addresses of a lookup. The first ones wait a little for those of others.
func (r *racer) add(ctx context.Context, f found) {
	first := len(r.queue) == 0
	r.take(f)
	switch {
	case len(r.queue) == 0: // there is nothing to try
	case r.due, r.running == 0 && r.lookups == 0:
		r.start(ctx)
	case r.running == 0 && first:
		r.next.Reset(resolutionDelay)
	}
}

// start tries the next address. Beside another attempt, it does so later if the server makes too many such
// attempts, each of which takes a descriptor.
func (r *racer) start(ctx context.Context) {
	if r.due = len(r.queue) == 0; r.due {
		return
	}
	beside := r.running > 0
	if beside && !r.beside.TryAcquire(1) {
		r.next.Reset(attemptDelay)
		return
	}
	addr := r.queue[0]
	r.queue = r.queue[1:]
	r.running++
	go func() {
		conn, err := r.dial(ctx, addr)
		if beside {
			r.beside.Release(1)
		}
		r.results <- attempt{conn, err}
	}()
	r.next.Reset(attemptDelay)
}

// closeLate closes the connections of the n attempts whose results are still to come.
func closeLate(results <-chan attempt, n int) {
	for range n {
		if a := <-results; a.conn != nil {
			reset(a.conn)
		}
	}
}

// refusal returns why there is no connection: the errors of the attempts or, without any, those of the
// lookups.
func (r *racer) refusal(targets []endpoint) error {
	text := targets[0].String()
	if more := len(targets) - 1; more > 0 {
		text += fmt.Sprintf(" and %d other endpoints", more)
	}
	if len(r.failed) > 0 {
		err := attemptErrors(r.failed)
		reason := ReasonConnect
		if sockets.OutOfDescriptors(err) {
			reason = ReasonDescriptor
		}
		return refuse(reason, "connecting to %s: %w", text, err)
	}
	if at := slices.IndexFunc(r.refused, isOfAddress); at >= 0 {
		return r.refused[at]
	}
	if len(r.refused) == 0 {
		return refuse(ReasonResolution, "resolving %s: it has no addresses", text)
	}
	return r.refused[0]
}

// attemptErrors are the errors of attempts to connect, in one line of text.
type attemptErrors []error

// maxListedErrors is the number of errors in the text of attemptErrors.
const maxListedErrors = 8

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

// isOfAddress reports whether a refusal is one of an address. It says more than that the name has no
// addresses of the other family.
func isOfAddress(err error) bool {
	r, ok := errors.AsType[*refusal](err)
	return ok && r.reason == ReasonAddress
}
