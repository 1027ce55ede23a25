package agent

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/agent/resolved"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/listen"
)

// newRegistrar returns the registrar that registers the agent with systemd-resolved.
func newRegistrar(c *core, capture *capture, interval time.Duration) *resolved.Registrar {
	return resolved.New(resolved.Config{
		Enabled: func() bool {
			in := capture.current()
			return in.On && in.Resolved
		},
		Server:  func() netip.AddrPort { return loopbackListener(c.proxy.Addrs()) },
		Domains: func() []string { return domains(c.proxy) }, Returned: c.proxy.SetReturned, Interval: interval, Logger: c.log,
	})
}

// domains returns the domains for which systemd-resolved should query the agent, whatever is in the table. It sends no
// query for names below .local, except to nameservers that are registered for them.
func domains(proxy *dnsproxy.Server) []string {
	all := []string{proxy.ClusterDomain(), "svc", "local"}
	for _, suffix := range proxy.LocalOnly() {
		all = append(all, suffix.String())
	}
	for i, name := range all {
		all[i] = strings.ToLower(strings.TrimSuffix(name, "."))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// loopbackListener returns an address of a UDP listener that programs of this host can reach, preferably an IPv4
// address. If there is none, the address is invalid.
func loopbackListener(listeners []dnsproxy.Addr) netip.AddrPort {
	var found netip.AddrPort
	for _, l := range listeners {
		reachable, _ := listen.Reachable(l.Address) // fails for no address of a listener
		address, err := netip.ParseAddrPort(reachable)
		if err == nil && l.Network == "udp" && (!found.IsValid() || found.Addr().Is6()) {
			found = netip.AddrPortFrom(address.Addr().Unmap(), address.Port())
		}
	}
	return found
}
