package dnsproxy

import (
	"errors"
	"log/slog"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/conntrack"
)

// fakeFinder returns one server for all flows.
type fakeFinder netip.AddrPort

func (f fakeFinder) Lookup(netip.AddrPort, netip.AddrPort) (netip.AddrPort, bool, error) {
	return netip.AddrPort(f), true, nil
}

func (fakeFinder) Close() error { return nil }

// Opening is retried after a transient error, and until it succeeds original destinations
// are unknown. If something is missing, queries count as not captured until it is there.
func TestOriginsOpening(t *testing.T) { // F14
	client, local := netip.MustParseAddrPort("192.0.2.1:1000"), netip.MustParseAddrPort("127.0.0.1:53")
	server := netip.MustParseAddrPort("192.0.2.2:53")
	for what, c := range map[string]struct {
		fails error
		known bool // queries count as not captured until it is open
		final bool
	}{
		"out of descriptors": {fails: unix.EMFILE},
		"no buffers":         {fails: unix.ENOBUFS},
		"unknown":            {fails: errors.New("something else")},
		"no module":          {fails: conntrack.ErrUnsupported, known: true},
		"no capability":      {fails: conntrack.ErrPermission, known: true, final: true},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOrigins(slog.New(slog.DiscardHandler), newMetrics().originErrors)
				attempts, began := 0, time.Now()
				o.open = func() (originFinder, error) {
					if attempts++; attempts < 10 {
						return nil, c.fails
					}
					return fakeFinder(server), nil
				}
				defer o.close()
				if final := o.tryOpen(); final != c.final {
					t.Errorf("final is %v", final)
				}
				found, err := o.ofUDP(client, local)
				if found.IsValid() || (err == nil) != c.known || err != nil && !errors.Is(err, errOrigin) {
					t.Errorf("meanwhile: %v, %v", found, err)
				}
				if c.final {
					return
				}
				o.keepOpening(t.Context())
				if found, err := o.ofUDP(client, local); found != server || err != nil || attempts != 10 {
					t.Errorf("after %d attempts: %v, %v", attempts, found, err)
				}
				if took := time.Since(began); took < 10*time.Second || took > 30*time.Second { // the pauses grow to 5 s
					t.Errorf("the attempts took %v", took)
				}
			})
		})
	}
}
