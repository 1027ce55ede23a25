package hosts

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/object"
)

// An endpoint is an endpoint of a headless Service, with its ports.
type endpoint struct {
	object.Endpoint
	ports object.Ports
}

// addEndpoint adds the addresses of an endpoint to the claim of its Service, and their ports.
func (c *claim) addEndpoint(ep *endpoint) {
	switch {
	case c.mixed != nil:
	case len(c.addrs) == 0:
		c.ports = ep.ports
	case c.ports != ep.ports:
		mixed := slices.Repeat([]object.Ports{c.ports}, len(c.addrs))
		c.ports, c.mixed = object.Ports{}, &mixed
	}
	c.addrs = append(c.addrs, ep.Addrs...)
	if c.mixed != nil {
		*c.mixed = append(*c.mixed, slices.Repeat([]object.Ports{ep.ports}, len(ep.Addrs))...)
	}
}

// mixedPorts returns the ports of each of addrs if they differ, otherwise nil.
func (c *claim) mixedPorts() []object.Ports {
	if c.mixed == nil {
		return nil
	}
	return *c.mixed
}

// eachPort calls yield for each port of each address that a client gets, at times twice.
func (c *visibleClaim) eachPort(yield func(object.Port, netip.Addr)) {
	visible := sorted(slices.Concat(c.near, c.addrs))
	if c.mixed == nil {
		for _, p := range c.ports.List() {
			for _, a := range visible {
				yield(p, a)
			}
		}
		return
	}
	for i, a := range c.claim.addrs {
		if _, found := slices.BinarySearchFunc(visible, a, netip.Addr.Compare); found {
			for _, p := range (*c.mixed)[i].List() {
				yield(p, a)
			}
		}
	}
}

// portsOf returns the ports of an entry with n addresses. A port that only some of them have lists
// these.
func portsOf(claims []visibleClaim, n int) []*api.NameTable_Port {
	first := claims[0].ports
	differs := func(c visibleClaim) bool { return c.mixed != nil || c.ports != first }
	if !slices.ContainsFunc(claims, differs) {
		var ports []*api.NameTable_Port
		for _, p := range first.List() {
			ports = append(ports, newPort(p))
		}
		return ports
	}
	addrs := map[object.Port][]netip.Addr{}
	for _, c := range claims {
		c.eachPort(func(p object.Port, a netip.Addr) { addrs[p] = append(addrs[p], a) })
	}
	var ports []*api.NameTable_Port
	for p, having := range addrs {
		port := newPort(p)
		if having = sorted(having); len(having) < n {
			for _, a := range having {
				port.Ips = append(port.Ips, a.String())
			}
		}
		ports = append(ports, port)
	}
	slices.SortFunc(ports, func(a, b *api.NameTable_Port) int {
		return cmp.Or(cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetNumber(), b.GetNumber()), cmp.Compare(a.GetProtocol(), b.GetProtocol()))
	})
	return ports
}

// maxPortName is the length of the longest name of a port that can be part of a DNS name, which has
// an underscore before it.
const maxPortName = 62

func newPort(p object.Port) *api.NameTable_Port {
	port := &api.NameTable_Port{Name: p.Name, Number: uint32(p.Number)}
	if len(p.Name) > maxPortName {
		port.Name = "" // it has a number, and no name to find that by
	}
	if p.Protocol != "TCP" {
		port.Protocol = p.Protocol
	}
	return port
}
