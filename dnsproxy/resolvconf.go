package dnsproxy

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/miekg/dns"
)

// dnsPort is where nameservers of a resolv.conf listen.
const dnsPort = 53

// A resolvConf is what a resolv.conf(5) says. It never changes.
type resolvConf struct {
	// search is the client's search list, in its order.
	search []wireName
	// servers are the nameservers, in their order.
	servers []netip.AddrPort
	// ignored lists the values that are neither domain nor address.
	ignored []string
}

// readResolvConf reads the file at path. It fails only if the file cannot be
// read; a value in it that cannot be used is listed and the others count.
func readResolvConf(path string) (*resolvConf, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading nameservers and search list: %w", err)
	}
	file, err := dns.ClientConfigFromReader(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("reading nameservers and search list of %q: %w", path, err)
	}
	conf := &resolvConf{}
	for _, domain := range file.Search {
		if domain == "." {
			continue // the root as a search domain changes no name
		}
		name, err := parseHostname(domain)
		if err != nil {
			conf.ignored = append(conf.ignored, fmt.Sprintf("search %q: %v", domain, err))
			continue
		}
		conf.search = append(conf.search, name)
	}
	for _, server := range file.Servers {
		addr, err := netip.ParseAddr(server)
		if err != nil {
			conf.ignored = append(conf.ignored, fmt.Sprintf("nameserver %q: want an IP address", server))
			continue
		}
		conf.servers = append(conf.servers, netip.AddrPortFrom(addr.Unmap(), dnsPort))
	}
	return conf, nil
}

// ParseUpstream reads a nameserver as a setting gives it: an IP address, with
// port 53 unless it names another.
func ParseUpstream(s string) (netip.AddrPort, error) {
	if addr, err := netip.ParseAddr(s); err == nil {
		return netip.AddrPortFrom(addr.Unmap(), dnsPort), nil
	}
	upstream, err := netip.ParseAddrPort(s)
	if err != nil || upstream.Port() == 0 {
		return netip.AddrPort{}, fmt.Errorf("upstream %q: want an IP address, or one with a port such as %q",
			s, net.JoinHostPort("192.0.2.53", "53"))
	}
	return netip.AddrPortFrom(upstream.Addr().Unmap(), upstream.Port()), nil
}
