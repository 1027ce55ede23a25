package agent

import (
	"context"
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/egress"
)

// resetTime is how long the resets of connections after the drain may take. Without the rules, the kernel
// would no longer translate them, and clients would wait for ever.
const resetTime = 5 * time.Second

// newEgress returns the server for connections to automatic VIPs, nil if none are carried. It finds their
// hosts in the table of the query path, and resolves names through its forwarder.
func newEgress(ctx context.Context, agent Config, a *Agent) (*egress.Server, error) {
	if agent.Egress == nil {
		return nil, nil
	}
	cfg, proxy := *agent.Egress, a.proxy
	cfg.Drain = agent.Drain
	cfg.Table, cfg.Synced, cfg.Logger, cfg.Registerer = proxy.Table, proxy.Synced(), agent.Logger, agent.DNS.Registerer
	cfg.Resolve = func(ctx context.Context, name string, family egress.Family, onlyCached bool) ([]netip.Addr, bool, error) {
		if family == egress.IPv4 {
			return proxy.Resolve(ctx, name, dns.TypeA, onlyCached)
		}
		return proxy.Resolve(ctx, name, dns.TypeAAAA, onlyCached)
	}
	for _, addr := range []string{agent.DNS.Addr, agent.StatusAddr, cfg.Addr} {
		cfg.OwnPorts = append(cfg.OwnPorts, portOf(addr))
	}
	cfg.Store = func(listener net.Listener) {
		if storeSocket(VIPsFDName, listener, a.log) {
			a.vipsHeld.Store(true)
		}
	}
	if len(cfg.Sockets) > 0 {
		a.vipsHeld.Store(true)
	}
	if a.capture != nil {
		cfg.Opened = func(listeners []netip.AddrPort) {
			a.capture.follow(func(in *inputs) { in.vips = listeners })
		}
	}
	server, err := egress.New(ctx, cfg)
	if err == nil && a.capture != nil {
		a.capture.kernel.SetOpen(server.Open, cfg.Drain+resetTime)
		a.capture.inputs.vips = server.Addrs()
	}
	return server, err
}

// runEgress carries connections until they have ended.
func (a *Agent) runEgress(serving context.Context) error {
	defer close(a.egressEnded)
	if a.egress == nil {
		return nil
	}
	return a.egress.Run(serving)
}

// endEgress ends the connections to VIPs, with a drain or at once.
func (a *Agent) endEgress(drain bool) {
	if a.egress != nil {
		a.egress.End(drain)
	}
}

// drainEgress lets the open connections go on for the drain, while queries are still answered, if another
// process holds the listeners for VIPs: then new connections wait for the next agent instead of being refused.
func (a *Agent) drainEgress(serving context.Context) {
	if a.egress == nil || !a.vipsHeld.Load() {
		return
	}
	a.log.Info("connections to VIPs go on: queries are still answered", "for", a.config.Drain)
	a.endEgress(true)
	select {
	case <-a.egressEnded:
	case <-a.hastened:
	case <-serving.Done():
	}
}

// portOf returns the port of a host:port, which was checked before; 0 if the kernel chooses it.
func portOf(addr string) uint16 {
	_, text, _ := net.SplitHostPort(addr)
	port, _ := strconv.ParseUint(text, 10, 16)
	return uint16(port)
}
