package agent

import (
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/agent/resolved"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/egress"
)

// virtualReverse returns the domains of the PTR names of automatic VIPs.
func virtualReverse() []string {
	var domains []string
	for _, vips := range egress.VIPs() {
		name, _ := dns.ReverseAddr(vips.Addr().String()) // never fails for an address
		labels, bits := dns.SplitDomainName(name), 8
		if vips.Addr().Is6() {
			bits = 4
		}
		const suffix = 2 // in-addr.arpa or ip6.arpa
		domains = append(domains, strings.Join(labels[len(labels)-suffix-vips.Bits()/bits:], "."))
	}
	return domains
}

// newRegistrar returns the registrar that registers the agent with systemd-resolved.
func newRegistrar(c *core, interval time.Duration) *resolved.Registrar {
	return resolved.New(resolved.Config{
		Server: func() netip.AddrPort { return loopbackListener(c.proxy.Addrs()) },
		Names:  func() resolved.Names { return names(c) }, Returned: c.proxy.SetReturned, Interval: interval, Logger: c.log,
	})
}

// names returns the names for which systemd-resolved should query the agent.
func names(c *core) resolved.Names {
	found := resolved.Names{Required: []string{c.proxy.ClusterDomain(), "svc"}}
	if c.config.XDS.Node.AutoAllocate {
		found.Required = append(found.Required, virtualReverse()...)
	}
	for _, suffix := range c.proxy.LocalOnly() {
		found.Required = append(found.Required, trimDot(suffix.String()))
	}
	if table := c.proxy.Table(); table != nil {
		domains, fingerprint := table.Domains()
		found.Fingerprint = fingerprint
		for _, domain := range domains {
			found.Domains = append(found.Domains, trimDot(domain.String()))
		}
	}
	return found
}

func trimDot(name string) string { return strings.TrimSuffix(name, ".") }

// loopbackListener returns an address of a UDP listener that programs of this host can reach, preferably an IPv4
// address. If there is none, the address is invalid.
func loopbackListener(listeners []dnsproxy.Addr) netip.AddrPort {
	var found netip.AddrPort
	for _, l := range listeners {
		address, err := netip.ParseAddrPort(probe.Reachable(l.Address))
		if err == nil && l.Network == "udp" && (!found.IsValid() || found.Addr().Is6()) {
			found = netip.AddrPortFrom(address.Addr().Unmap(), address.Port())
		}
	}
	return found
}
