package agent

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/nds"
)

// A core has the state that the parts of an agent share: the settings, the query path, the push path, and whether the
// agent starts or ends.
type core struct {
	config  Config
	log     *slog.Logger
	proxy   *dnsproxy.Server
	client  *nds.Client
	capture *capture    // nil: the agent captures nothing
	vips    *vipCarrier // nil: the agent carries no connections

	started  time.Time
	clock    *clock.Clock
	draining atomic.Bool
	refusals atomic.Pointer[[]probe.Refusal] // what the last packets of observeGuard have shown
	silent   atomic.Pointer[[]string]        // why listeners have not answered the last probes of watchListeners
	notified atomic.Bool                     // whether systemd knows that the agent is ready
	quit     func()                          // ends the agent; may be called any number of times
}

// open reports whether the DNS listeners are open.
func (c *core) open() bool { return chans.Closed(c.proxy.Ready()) }

// notReady returns why queries should not be sent to this agent yet, or any longer; "" if they should be sent.
func (c *core) notReady() string {
	switch {
	case c.draining.Load():
		return "draining"
	case !c.open():
		return "the DNS listeners are not open yet"
	case !chans.Closed(c.proxy.Synced()) && time.Since(c.started) < c.config.ReadyTimeout:
		return "no table of mesh hosts has been received yet"
	}
	return ""
}

// hangError returns an error if queries to the open UDP listeners get no answer: then a restart would help. It returns
// nil while the agent starts or ends.
func (c *core) hangError(ctx context.Context) error {
	if !c.open() || c.draining.Load() ||
		!hangs(map[string]bool{}, probe.Listeners(ctx, udpListeners(c.proxy)...)) {
		return nil
	}
	return errors.New("the UDP listeners are silent")
}

// udpListeners returns the UDP listeners of a query path.
func udpListeners(proxy *dnsproxy.Server) []dnsproxy.Addr {
	return slices.DeleteFunc(proxy.Addrs(), func(l dnsproxy.Addr) bool { return l.Network != "udp" })
}

// addrPorts returns the addresses of the UDP listeners of a query path.
func addrPorts(proxy *dnsproxy.Server) []netip.AddrPort {
	var all []netip.AddrPort
	for _, l := range udpListeners(proxy) {
		if addr, err := netip.ParseAddrPort(l.Address); err == nil {
			all = append(all, addr)
		}
	}
	return all
}
