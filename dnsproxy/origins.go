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

	"github.com/nametap/nametap/conntrack"
)

// errOrigin is the error for a query if the kernel cannot be asked where it was captured
// on its way to. The configured nameservers could give the answer of another server.
var errOrigin = errors.New("it cannot be found out which nameserver the query was sent to")

// originsInterval is how often it is tried to open origins that could not be opened, and
// how often their errors are logged at the most.
const originsInterval = time.Second

// originPauses are waited between attempts to find an origin. A client does not notice
// them, and a shortage of the kernel's buffers is over by then.
func originPauses() [4]time.Duration {
	return [4]time.Duration{time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 100 * time.Millisecond}
}

// maxOriginPauses is how many queries wait at a time. More would need a bound in bytes.
const maxOriginPauses = 256

// An originFinder finds the original destinations of UDP queries, as [conntrack.UDP] does.
type originFinder interface {
	Lookup(client, local netip.AddrPort) (netip.AddrPort, bool, error)
	Close() error
}

// Origins find out which nameserver a captured query was on its way to. Their methods may
// be called from any goroutine.
//
// For UDP that takes CAP_NET_ADMIN and a module of the kernel. Without them all queries
// count as not captured. After any other error nothing is known, so it is tried again.
type origins struct {
	log    *slog.Logger
	count  prometheus.Counter // of errors
	open   func() (originFinder, error)
	udp    atomic.Pointer[originFinder] // nil: not open
	lacks  atomic.Bool                  // it is not open for want of something
	pauses atomic.Int64                 // queries that wait
	saying sync.Mutex                   // guards what follows
	lack   string                       // was logged
	logged time.Time                    // when an error was logged
	more   int                          // errors since then
}

// newOrigins returns origins that are not open yet.
func newOrigins(log *slog.Logger, count prometheus.Counter) *origins {
	return &origins{log: log, count: count, open: func() (originFinder, error) { return conntrack.OpenUDP() }}
}

// tryOpen makes UDP queries known. It reports false if it may be able to later.
func (o *origins) tryOpen() (final bool) {
	udp, err := o.open()
	switch {
	case err == nil:
		o.udp.Store(&udp)
		return true
	case lacking(err):
		o.lacks.Store(true)
		o.sayLack(err)
		return errors.Is(err, conntrack.ErrPermission) // a process gets no capability later
	}
	o.lacks.Store(false)
	_ = o.note(err)
	return false
}

// lacking reports whether an error says that something is missing.
func lacking(err error) bool {
	return errors.Is(err, conntrack.ErrPermission) || errors.Is(err, conntrack.ErrUnsupported)
}

// keepOpening calls tryOpen until it need not be called any more, or ctx ends.
func (o *origins) keepOpening(ctx context.Context) {
	ticker := time.NewTicker(originsInterval)
	defer ticker.Stop()
	for final := false; !final; final = o.tryOpen() {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// close closes what is open. Nothing may be asked from then on.
func (o *origins) close() {
	if udp := o.udp.Load(); udp != nil {
		_ = (*udp).Close() // nothing was written
	}
}

// ofUDP returns the nameserver that a UDP query was on its way to when it was captured; it
// is not valid for one that was sent to us. It does not wait.
func (o *origins) ofUDP(client, local netip.AddrPort) (netip.AddrPort, error) {
	udp := o.udp.Load()
	switch {
	case udp == nil && o.lacks.Load():
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
	case lacking(err):
		o.sayLack(err)
		return netip.AddrPort{}, nil
	}
	return netip.AddrPort{}, o.note(err)
}

// awaitUDP is ofUDP, but tries again for a moment after an error, unless too many wait.
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

// ofTCP returns what finds the nameserver that a connection was on its way to when it was
// captured; nil for one that was made to us.
func (o *origins) ofTCP(conn *net.TCPConn) func() (netip.AddrPort, error) {
	server, captured, err := conntrack.OriginalTCP(conn)
	switch {
	case err == nil && captured:
		return func() (netip.AddrPort, error) { return server, nil }
	case err == nil:
		return nil
	}
	_ = o.note(err)
	return func() (netip.AddrPort, error) {
		server, _, err := conntrack.OriginalTCP(conn)
		if err != nil {
			err = o.note(err)
		}
		return server, err
	}
}

// sayLack logs that something is missing, once.
func (o *origins) sayLack(err error) {
	o.saying.Lock()
	defer o.saying.Unlock()
	if text := err.Error(); text != o.lack {
		o.lack = text
		o.log.Info("captured UDP queries all go to the configured nameservers, wherever they were sent to", "reason", err)
	}
}

// note counts an error that may pass, logs it, and returns it as an [errOrigin].
func (o *origins) note(err error) error {
	o.count.Inc()
	o.saying.Lock()
	defer o.saying.Unlock()
	o.more++
	if now := time.Now(); now.Sub(o.logged) >= originsInterval {
		o.log.Warn("captured queries that are not for own names may fail: "+errOrigin.Error(), "errors", o.more, "error", err)
		o.logged, o.more = now, 0
	}
	return fmt.Errorf("%w: %w", errOrigin, err)
}
