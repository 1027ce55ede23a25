package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/family"
)

// resetTime is how long it may take to reset the connections after the drain. The rules stay until all connections
// are reset: without the rules, the kernel would not translate the addresses of the resets, and clients would wait for
// ever.
const resetTime = 5 * time.Second

// A vipCarrier carries the connections to automatic VIPs. A nil *vipCarrier carries none.
type vipCarrier struct {
	*egress.Server
	log      *slog.Logger
	draining time.Duration // egress.Config.Drain
	ended    chan struct{} // closed when all connections have ended
}

// newVIPCarrier returns a vipCarrier, or nil if the settings want none.
func newVIPCarrier(ctx context.Context, c *core) (*vipCarrier, error) {
	if c.config.Egress == nil {
		return nil, nil
	}
	cfg, proxy := *c.config.Egress, c.proxy
	cfg.Drain, cfg.Inherited, cfg.Guard = c.config.Drain, c.config.Inherited, c.config.Guard
	v := &vipCarrier{log: c.log, draining: cfg.Drain, ended: make(chan struct{})}
	cfg.Table, cfg.Synced, cfg.Logger, cfg.Registerer = proxy.Table, proxy.Synced(), c.log, c.config.DNS.Registerer
	cfg.Resolve = func(ctx context.Context, name string, f family.Family, onlyCached bool) ([]netip.Addr, bool, error) {
		if f == family.IPv4 {
			return proxy.Resolve(ctx, name, dns.TypeA, onlyCached)
		}
		return proxy.Resolve(ctx, name, dns.TypeAAAA, onlyCached)
	}
	for _, addr := range []string{c.config.DNS.Addr, c.config.StatusAddr, cfg.Addr} {
		cfg.OwnPorts = append(cfg.OwnPorts, portOf(addr))
	}
	if c.capture != nil {
		cfg.Opened = func(listeners []netip.AddrPort) {
			c.capture.tryChange(func(in *inputs) { in.vips = listeners })
		}
	}
	var err error
	if v.Server, err = egress.New(ctx, cfg); err != nil {
		return nil, err
	}
	if c.capture != nil {
		c.capture.kernel.SetOpen(v.Open, cfg.Drain+resetTime)
		c.capture.inputs.vips = v.Addrs()
	}
	return v, nil
}

// run carries connections until serving ends or [vipCarrier.end] is called. It returns when all connections have
// ended.
func (v *vipCarrier) run(serving context.Context) error {
	if v == nil {
		return nil
	}
	defer close(v.ended)
	return v.Run(serving)
}

// end ends the connections to VIPs, after a drain if drain is true, otherwise at once.
func (v *vipCarrier) end(drain bool) {
	if v != nil {
		v.End(drain)
	}
}

// drain keeps the open connections for the time of the drain, while queries are still answered. It returns early when
// hastened is closed. If another process holds the listeners for VIPs, new connections wait there for the next agent.
// If no other process does, new connections would be refused during the drain, so drain returns at once.
func (v *vipCarrier) drain(serving context.Context, hastened <-chan struct{}) {
	if v == nil || !v.Listeners().Held() {
		return
	}
	v.log.Info("connections to VIPs go on, and queries are still answered", "for", v.draining)
	v.end(true)
	select {
	case <-v.ended:
	case <-hastened:
	case <-serving.Done():
	}
}
