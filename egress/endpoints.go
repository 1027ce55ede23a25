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
)

// maxListedPorts is how many ports the text of a refusal has at most.
const maxListedPorts = 16

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
	var list []string
	for _, p := range ports[:min(len(ports), maxListedPorts)] {
		list = append(list, strconv.Itoa(int(p)))
	}
	if more := len(ports) - len(list); more > 0 {
		list = append(list, fmt.Sprintf("%d more", more))
	}
	return vipHost{name: h.Name, refused: refuse(ReasonPort, "%s port %d: the host has only the ports %s",
		hostText(h.Name), port, strings.Join(list, ", "))}
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

// parseEndpoint parses HOST:PORT. The caller has checked that the text has this form.
func parseEndpoint(text string) (endpoint, error) {
	if a, err := netip.ParseAddrPort(text); err == nil {
		return endpoint{addr: a.Addr().Unmap(), port: a.Port()}, nil
	}
	at := strings.LastIndexByte(text, ':')
	port, err := strconv.ParseUint(text[at+1:], 10, 16)
	if err != nil {
		return endpoint{}, fmt.Errorf("endpoint %q: %w", text, err)
	}
	return endpoint{name: text[:max(at, 0)], port: uint16(port)}, nil
}

// targets returns the endpoints in random order, which spreads connections over them. If there are none, it returns the host
// itself, under the name that the client wants.
func (h *vipHost) targets(host string) ([]endpoint, error) {
	if len(h.endpoints) == 0 {
		return []endpoint{{name: host, port: h.port}}, nil
	}
	all := make([]endpoint, 0, len(h.endpoints))
	for _, text := range h.endpoints {
		e, err := parseEndpoint(text)
		if err != nil {
			return nil, refuse(ReasonAddress, "%s: %w", host, err)
		}
		all = append(all, e)
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all, nil
}

// hostText returns the name of a host without the dot at the end.
func hostText(name wire.Name) string {
	text := name.String()
	return text[:max(len(text)-1, 0)]
}
