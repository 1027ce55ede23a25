package dnsproxy

import (
	"net/netip"
	"slices"
	"strings"
)

// refDashed returns the label of an endpoint with an address (D21).
func refDashed(addr netip.Addr) string {
	label := strings.NewReplacer(".", "-", ":", "-").Replace(addr.String())
	if strings.HasSuffix(label, "-") {
		label += "0"
	}
	return label
}

// endpoint returns the endpoint of a headless Service, which may be nil, that has the first of
// labels as its own: a host with one address and the FQDN of the endpoint (D21).
func (r *reference) endpoint(labels []string, service *refHost) *refHost {
	if service == nil || !service.headless || len(labels) < 2 {
		return nil
	}
	name, ok := refName(labels[0] + "." + service.name)
	if !ok {
		return nil
	}
	for _, addr := range slices.Concat(service.v4, service.v6) {
		if refDashed(addr) == labels[0] && r.pod(service, addr) == nil {
			one := &refHost{key: service.key, name: name, kubernetes: true, info: service.info}
			if one.v4 = []netip.Addr{addr}; addr.Is6() {
				one.v4, one.v6 = nil, one.v4
			}
			return one
		}
	}
	return nil
}

// pod returns the host of a pod of a headless Service that has an address.
func (r *reference) pod(service *refHost, addr netip.Addr) *refHost {
	for name, h := range r.hosts {
		_, parent, _ := strings.Cut(name, ".")
		if parent == service.name && h.kubernetes && !h.headless && h.alias == "" && slices.Contains(slices.Concat(h.v4, h.v6), addr) {
			return h
		}
	}
	return nil
}

// loadPointers adds the names of all addresses (N8, D21).
func (r *reference) loadPointers() {
	owners := map[netip.Addr][]*refHost{}
	for _, h := range r.hosts {
		for _, addr := range slices.Concat(h.v4, h.v6) {
			if h.alias == "" { // D9
				owners[addr] = append(owners[addr], h)
			}
		}
	}
	for addr, hosts := range owners {
		var names, endpoints []string
		named := false
		for _, h := range hosts {
			if !h.headless {
				names = append(names, h.name)
				continue
			}
			named = named || r.pod(h, addr) != nil
			if name, ok := refName(refDashed(addr) + "." + h.name); ok {
				endpoints = append(endpoints, name)
			}
		}
		if !named {
			names = append(names, endpoints...)
		}
		slices.Sort(names)
		for _, name := range refReverseNames(addr) {
			r.pointers[name] = names
		}
	}
}
