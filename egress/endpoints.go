package egress

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clip"
)

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
