package egress

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clip"
)

// A route says where a connection leads, as far as the VIP and the port alone can tell.
type route struct {
	vip   netip.AddrPort
	hosts []vipHost // the hosts that have the VIP; none if a VIP of the guard is not known

	guarded // for a VIP of the guard, and for an address in audit
}

// A vipHost is a host that has the VIP of a route, and where connections to the route's port lead.
type vipHost struct {
	name      wire.Name // a wildcard begins with wire.WildcardLabel
	port      uint16    // the port of the host itself
	endpoints []string  // HOST:PORT; if empty, the connections lead to the host itself
	known     bool      // the table has the ports of the host
	refused   error     // not nil if the host does not have the port
}

// routeTo returns the route to a VIP, or a refusal.
func routeTo(vip netip.AddrPort, cfg *Config) (route, error) {
	r := route{vip: vip}
	cfg.Table().HostsAt(vip.Addr(), func(h table.Host) {
		r.hosts = append(r.hosts, hostOn(&h, vip.Port()))
	})
	if len(r.hosts) == 0 {
		return r, refuse(ReasonNoHost, "no host of the table has the address %s", vip.Addr())
	}
	sort.Slice(r.hosts, func(i, j int) bool { return r.hosts[i].name < r.hosts[j].name })
	// If at least one host has the port, the route is not refused yet: the client may say the name of this host.
	if !slices.ContainsFunc(r.hosts, func(h vipHost) bool { return h.refused == nil }) {
		return r, r.hosts[0].refused
	}
	return r, nil
}

// exact returns a host of the VIP. The second result is true if this host is the only one and no wildcard of the table.
func (r *route) exact() (wire.Name, bool) {
	if len(r.hosts) == 0 {
		return wire.Root, false
	}
	only := r.hosts[0].name
	_, wildcard := suffixOf(only)
	return only, len(r.hosts) == 1 && (!wildcard || r.guard != nil)
}

// hostOf returns the host of the VIP to which a name belongs: the host of that name or, if there is none, the
// wildcard above the name. Of several wildcards, hostOf returns the wildcard with the longest suffix, as in DNS. If
// there is no such host, hostOf returns nil.
func (r *route) hostOf(name wire.Name) *vipHost {
	var found *vipHost
	for i := range r.hosts {
		h := &r.hosts[i]
		if h.name == name {
			return h
		}
		suffix, wildcard := suffixOf(h.name)
		if wildcard && len(name) > len(suffix) && name.Below(suffix) && (found == nil || len(h.name) > len(found.name)) {
			found = h
		}
	}
	return found
}

// suffixOf returns the suffix of a host that is a wildcard.
func suffixOf(host wire.Name) (suffix wire.Name, wildcard bool) {
	text, wildcard := strings.CutPrefix(string(host), string(wire.WildcardLabel))
	return wire.Name(text), wildcard
}

// text names the route in errors.
func (r *route) text() string {
	if len(r.hosts) == 0 {
		return r.vip.String()
	}
	return fmt.Sprintf("%s (%s)", hostText(r.hosts[0].name), r.vip)
}

// check parses the name that a client said. It returns a refusal if no host of the route has that name.
func (r *route) check(text string) (wire.Name, error) {
	name, err := wire.ParseHostname(text)
	if err != nil {
		return wire.Root, refuse(ReasonOtherName, "%s: the client said %.300q, which is not a hostname: %w", r.text(), text, err)
	}
	if r.audited {
		r.judge(name)
		return name, nil
	}
	if r.guard != nil && len(r.hosts) == 0 && r.guard.Owns(name, r.vip.Addr()) {
		return name, r.admit(name)
	}
	if r.hostOf(name) == nil {
		return wire.Root, refuse(ReasonOtherName, "%s: the client said %q, which is no host of this address", r.text(), hostText(name))
	}
	return name, nil
}

// maxPortsText is how many bytes of a refusal list ports.
const maxPortsText = 100

// hostOn returns a host of the table with where connections to a port lead. If the host has ports but not this one, they are
// refused.
func hostOn(h *table.Host, port uint16) vipHost {
	var ports []uint16
	for to := range h.Destinations {
		if to.Port == port {
			return vipHost{h.Name, to.Target, to.Endpoints, true, nil}
		}
		ports = append(ports, to.Port)
	}
	if len(ports) == 0 {
		return vipHost{name: h.Name, port: port}
	}
	slices.Sort(ports)
	return vipHost{name: h.Name, refused: refuse(ReasonPort, "%s port %d: the host has only the ports %s",
		hostText(h.Name), port, portsText(ports))}
}

// portsText lists ports for a refusal.
func portsText(ports []uint16) string {
	return clip.Text(strings.ReplaceAll(strings.Trim(fmt.Sprint(ports), "[]"), " ", ", "), maxPortsText)
}

// An endpoint is where a connection leads: a name or an address, and a port.
type endpoint struct {
	name string     // empty for an address
	addr netip.Addr // zero for a name
	port uint16
}

// String returns HOST:PORT.
func (e endpoint) String() string {
	host := e.name
	if host == "" {
		host = e.addr.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(e.port)))
}

// parseEndpoint parses HOST:PORT. The table, and Validate, have checked that the text has this form.
func parseEndpoint(text string) endpoint {
	if a, err := netip.ParseAddrPort(text); err == nil {
		return endpoint{addr: a.Addr().Unmap(), port: a.Port()}
	}
	host, port, _ := net.SplitHostPort(text)
	n, _ := strconv.ParseUint(port, 10, 16)
	return endpoint{name: host, port: uint16(n)}
}

// targets returns the endpoints in random order, which spreads connections over them. If there are none, it returns the host
// itself, under the name that the client wants.
func (h *vipHost) targets(host string) []endpoint {
	if len(h.endpoints) == 0 {
		return []endpoint{{name: host, port: h.port}}
	}
	all := make([]endpoint, 0, len(h.endpoints))
	for _, at := range rand.Perm(len(h.endpoints)) {
		all = append(all, parseEndpoint(h.endpoints[at]))
	}
	return all
}

// hostText returns the name of a host without the dot at the end.
func hostText(name wire.Name) string {
	text := name.String()
	return text[:max(len(text)-1, 0)]
}
