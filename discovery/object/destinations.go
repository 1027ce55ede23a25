package object

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unique"
)

// An EntryPort is a TCP or UDP port of a ServiceEntry.
type EntryPort struct {
	Name     string
	Protocol string // as in the ServiceEntry: "HTTP", "TLS", "UDP" and so on
	Number   uint16 // 0 if the number is not known
	Target   uint16 // the port to which connections to Number lead; 0 if it is Number
}

// An EntryEndpoint is an endpoint of a ServiceEntry.
type EntryEndpoint struct {
	Address string // from [ParseEndpoint]
	// Ports are the numbers of the endpoint's ports, by the names of the ServiceEntry's ports. A missing port has the
	// number in the ServiceEntry: Target or, if that is 0, Number of the [EntryPort].
	Ports map[string]uint16
}

// ParseEndpoint parses the address of an endpoint of a ServiceEntry: an IP address or a DNS name,
// which may have a trailing dot.
func ParseEndpoint(text string) (string, error) {
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		return a.Unmap().String(), nil
	}
	host := strings.TrimSuffix(text, ".")
	if !IsHost(host) || IsWildcard(host) {
		return "", fmt.Errorf("want an IP address or a DNS name, got %q", text)
	}
	return host, nil
}

// A Destination says where connections to a TCP port of an external host lead: to one of Endpoints or, without
// Endpoints, to the host itself.
type Destination struct {
	Port      uint16
	Target    uint16   // the port at the host itself; 0 if it is Port
	Endpoints []string // HOST:PORT, sorted, each once
}

// Compare orders destinations by port, target and endpoints.
func (d Destination) Compare(other Destination) int {
	return cmp.Or(cmp.Compare(d.Port, other.Port), cmp.Compare(d.Target, other.Target), slices.Compare(d.Endpoints, other.Endpoints))
}

// Destinations is a list of destinations that needs little memory, like [Ports]: equal lists share
// their memory. Use == to compare two lists. The zero value has no destinations.
type Destinations struct{ text unique.Handle[string] }

// NewDestinations returns where connections to the hosts of a ServiceEntry lead. Ports for UDP and ports without a
// number are left out. Endpoints are left out unless the resolution is STATIC, DNS or DNS_ROUND_ROBIN: with other
// resolutions, connections do not lead to endpoints.
func NewDestinations(resolution string, ports []EntryPort, endpoints []EntryEndpoint) Destinations {
	switch resolution {
	case ResolutionStatic, ResolutionDNS, ResolutionRoundRobin:
	default:
		endpoints = nil
	}
	var list []Destination
	for _, p := range ports {
		if p.Number == 0 || strings.EqualFold(p.Protocol, "UDP") {
			continue
		}
		d := Destination{Port: p.Number}
		if len(endpoints) == 0 && p.Target != p.Number {
			d.Target = p.Target
		}
		for _, e := range endpoints {
			d.Endpoints = append(d.Endpoints, JoinEndpoint(e.Address, cmp.Or(e.Ports[p.Name], p.Target, p.Number)))
		}
		slices.Sort(d.Endpoints)
		d.Endpoints = slices.Compact(d.Endpoints)
		list = append(list, d)
	}
	if len(list) == 0 {
		return Destinations{}
	}
	slices.SortFunc(list, Destination.Compare)
	list = slices.CompactFunc(list, func(a, b Destination) bool { return a.Compare(b) == 0 })
	var text strings.Builder
	for _, d := range list {
		fmt.Fprintln(&text, strings.Join(append([]string{strconv.Itoa(int(d.Port)), strconv.Itoa(int(d.Target))}, d.Endpoints...), " "))
	}
	return Destinations{unique.Make(text.String())}
}

// JoinEndpoint returns an endpoint of a Destination.
func JoinEndpoint(host string, port uint16) string {
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// Size returns how many bytes the destinations have in a table, at most.
func (d Destinations) Size() int {
	if d == (Destinations{}) {
		return 0
	}
	return len(d.text.Value()) + 2*strings.Count(d.text.Value(), " ")
}

// List returns the destinations in the order of [Destination.Compare]. Several destinations may have the same port.
func (d Destinations) List() []Destination {
	if d == (Destinations{}) {
		return nil
	}
	var list []Destination
	for line := range strings.Lines(d.text.Value()) {
		words := strings.Fields(line)
		port, _ := strconv.ParseUint(words[0], 10, 16)   // NewDestinations has written it
		target, _ := strconv.ParseUint(words[1], 10, 16) // the same
		list = append(list, Destination{uint16(port), uint16(target), slices.Clip(words[2:])})
	}
	return list
}
