package dnsproxy

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

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/conntrack"
)

// errOrigin is the error for a query whose original destination cannot be looked up. The query
// is not sent to resolv.conf's nameservers, because they may give another answer.
var errOrigin = errors.New("the kernel did not say which nameserver the query was sent to")

// originPauses returns the pauses between attempts to look up an original destination. They are short enough for a
// client to wait, and long enough for a shortage of kernel buffers to end.
func originPauses() [4]time.Duration {
	return [4]time.Duration{time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 100 * time.Millisecond}
}

// maxOriginPauses bounds how many queries wait in such a pause at a time.
const maxOriginPauses = 256

// An originFinder finds the original destinations of UDP queries, as [conntrack.UDP] does.
type originFinder interface {
	Lookup(client, local netip.AddrPort) (netip.AddrPort, bool, error)
	Close() error
}

// origins looks up the original destinations of captured queries. Its methods are safe for
// concurrent use.
//
// The lookup for UDP needs CAP_NET_ADMIN and a kernel module. Without them, all queries go to the configured
// nameservers ([origins.ignored]). This includes queries over TCP, so that a name has the same answer over UDP and
// TCP. After any other error the original destination is unknown, and the lookup is retried.
type origins struct {
	log    *slog.Logger
	errors prometheus.Counter
	open   func() (originFinder, error)
	udp    atomic.Pointer[originFinder] // nil: not open
	// unsupported is true if udp cannot be opened because a capability or a kernel module is missing.
	unsupported atomic.Bool
	pauses      atomic.Int64 // how many queries wait in a pause

	logging sync.Mutex // guards missing
	missing string     // the error that logMissing last logged
}

// newOrigins returns origins. The caller must call tryOpen before the first lookup.
func newOrigins(log *slog.Logger, failures prometheus.Counter) *origins {
	return &origins{log: log, errors: failures, open: func() (originFinder, error) { return conntrack.OpenUDP() }}
}

// tryOpen tries to open the connection to the kernel. It reports false if it fails and a later call may succeed.
func (o *origins) tryOpen() (final bool) {
	udp, err := o.open()
	switch {
	case err == nil:
		o.udp.Store(&udp)
		return true
	case isUnsupported(err):
		o.unsupported.Store(true)
		o.logMissing(err)
		return errors.Is(err, conntrack.ErrPermission) // a process cannot gain a capability later
	}
	o.unsupported.Store(false)
	_ = o.record(err)
	return false
}

// isUnsupported reports whether err means that a capability or a kernel module is missing.
func isUnsupported(err error) bool {
	return errors.Is(err, conntrack.ErrPermission) || errors.Is(err, conntrack.ErrUnsupported)
}

// keepOpening calls tryOpen until its result is final or ctx ends.
func (o *origins) keepOpening(ctx context.Context) {
	clock.Retry(ctx, o.tryOpen)
}

// close closes the connection to the kernel. No other method may be called after it.
func (o *origins) close() {
	if udp := o.udp.Load(); udp != nil {
		_ = (*udp).Close() // nothing was written
	}
}

// ignored reports whether all queries go to the configured nameservers, because original destinations cannot be
// looked up.
func (o *origins) ignored() bool { return o.unsupported.Load() }

// ofUDP returns the original destination of a UDP query from client to local. If the query was not captured, the
// result is an address that is not valid. ofUDP does not block.
func (o *origins) ofUDP(client, local netip.AddrPort) (netip.AddrPort, error) {
	udp := o.udp.Load()
	switch {
	case udp == nil && o.unsupported.Load():
		return netip.AddrPort{}, nil
	case udp == nil:
		return netip.AddrPort{}, errOrigin
	}
	server, captured, err := (*udp).Lookup(client, local)
	switch {
	case err == nil && captured:
		return server, nil
	case err == nil:
		return netip.AddrPort{}, nil
	case isUnsupported(err):
		o.logMissing(err)
		return netip.AddrPort{}, nil
	}
	return netip.AddrPort{}, o.record(err)
}

// awaitUDP is like ofUDP, but retries after an error, unless too many queries are already retrying.
func (o *origins) awaitUDP(client, local netip.AddrPort) (server netip.AddrPort, err error) {
	server, err = o.ofUDP(client, local)
	if err == nil {
		return server, nil
	}
	defer o.pauses.Add(-1)
	if o.pauses.Add(1) > maxOriginPauses {
		return server, err
	}
	for _, pause := range originPauses() {
		time.Sleep(pause)
		if server, err = o.ofUDP(client, local); err == nil {
			break
		}
	}
	return server, err
}

// ofTCP returns a function that returns the original destination of a connection. If the
// connection was not captured, ofTCP returns nil.
func (o *origins) ofTCP(conn *net.TCPConn) func() (netip.AddrPort, error) {
	server, captured, err := conntrack.OriginalTCP(conn)
	switch {
	case err == nil && captured:
		return func() (netip.AddrPort, error) { return server, nil }
	case err == nil:
		return nil
	}
	_ = o.record(err)
	return func() (netip.AddrPort, error) {
		server, _, err := conntrack.OriginalTCP(conn)
		if err != nil {
			err = o.record(err)
		}
		return server, err
	}
}

// logMissing logs that a capability or a kernel module is missing. It logs nothing if its last line was about the
// same error.
func (o *origins) logMissing(err error) {
	o.logging.Lock()
	defer o.logging.Unlock()
	if text := err.Error(); text != o.missing {
		o.missing = text
		o.log.Info("captured queries go to the configured nameservers, not to their original destinations", "reason", err)
	}
}

// record counts a transient error, and returns it wrapped in errOrigin. The query log shows the result if the retry
// fails, too.
func (o *origins) record(err error) error {
	o.errors.Inc()
	return fmt.Errorf("%w: %w", errOrigin, err)
}
