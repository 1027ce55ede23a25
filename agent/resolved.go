package agent

import (
	"net/netip"
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/resolved"
)

// virtualReverse are the domains of the PTR names of automatic VIPs: Istio allocates them from
// 240.240.0.0/16 and 2001:2::/48.
func virtualReverse() []string {
	return []string{"240.240.in-addr.arpa", "0.0.0.0.2.0.0.0.1.0.0.2.ip6.arpa"}
}

// newRegistrar returns what registers an agent with systemd-resolved.
func (a *Agent) newRegistrar(interval time.Duration) *resolved.Registrar {
	return resolved.New(resolved.Config{
		Server: func() netip.AddrPort { return loopbackListener(a.proxy.Addrs()) },
		Names:  a.names, Returned: a.proxy.SetReturned, Interval: interval, Logger: a.log,
	})
}

// names returns the names for which systemd-resolved is to query the agent.
func (a *Agent) names() resolved.Names {
	names := resolved.Names{Always: []string{a.proxy.ClusterDomain(), "svc"}}
	if a.config.XDS.Node.AutoAllocate {
		names.Always = append(names.Always, virtualReverse()...)
	}
	for _, suffix := range a.config.DNS.LocalOnly {
		names.Always = append(names.Always, trimDot(suffix))
	}
	if table := a.proxy.Table(); table != nil {
		domains, fingerprint := table.Domains()
		names.Fingerprint = fingerprint
		for _, domain := range domains {
			names.Domains = append(names.Domains, trimDot(domain.String()))
		}
	}
	return names
}

func trimDot(name string) string { return strings.TrimSuffix(name, ".") }

// loopbackListener returns the address of a listener that programs of this host reach over UDP,
// preferably over IPv4; an invalid one if there is none.
func loopbackListener(listeners []dnsproxy.Addr) netip.AddrPort {
	var found netip.AddrPort
	for _, l := range listeners {
		address, err := netip.ParseAddrPort(reachable(l.Address))
		if err == nil && l.Network == "udp" && (!found.IsValid() || found.Addr().Is6()) {
			found = netip.AddrPortFrom(address.Addr().Unmap(), address.Port())
		}
	}
	return found
}
