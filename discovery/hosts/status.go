package hosts

import (
	"net/netip"
	"slices"

	"github.com/nametap/nametap/discovery/object"
)

// Statuses looks at the ServiceEntries that a source of the own cluster has. It returns those whose status must change,
// and the VIPs that the status should have. A host keeps the VIPs that the status gives to it and that belong to no
// other host. If there are none, it gets the VIPs that other ServiceEntries give to it, or else allocated VIPs. If two
// hosts have the same VIP, one of them loses it, and gets another VIP with the next status.
func (h *Hosts) Statuses(source int) map[object.Key]object.VIPStatus {
	owner := h.vipOwners()
	out := map[object.Key]object.VIPStatus{}
	own := h.clusters[ownCluster]
	for key, o := range own.sources[source] {
		if counts, ok := own.get(key); !ok || o.Entry == nil || counts != o {
			continue
		}
		want := h.status(o.Entry, owner)
		if o.Entry.StaleVIPs || !slices.Equal(want, vipsIn(o.Entry)) {
			out[key] = object.VIPStatus{Entry: o.Entry, VIPs: want}
		}
	}
	return out
}

// vipsIn returns the VIPs that the status of a ServiceEntry gives to the hosts in its spec.
func vipsIn(e *object.ServiceEntry) []object.VIP {
	var all []object.VIP
	for _, host := range uniqueHosts(e) {
		for _, a := range e.VIPs[host] {
			all = append(all, object.VIP{Host: host, Addr: a})
		}
	}
	return all
}

// uniqueHosts returns the hosts of a ServiceEntry in their order, each once.
func uniqueHosts(e *object.ServiceEntry) []string {
	all, known := make([]string, 0, len(e.Hosts)), make(map[string]bool, len(e.Hosts))
	for _, host := range e.Hosts {
		if !known[host] {
			known[host] = true
			all = append(all, host)
		}
	}
	return all
}

// vipOwners returns, for each VIP of a status, the host that keeps it: the first in alphabetical order.
func (h *Hosts) vipOwners() map[netip.Addr]string {
	owner := map[netip.Addr]string{}
	for key, claims := range h.byHost {
		for _, c := range claims {
			for _, a := range c.vips {
				if other, taken := owner[a]; !taken || key < other {
					owner[a] = key
				}
			}
		}
	}
	return owner
}

// status returns the VIPs that the status of a ServiceEntry should have.
func (h *Hosts) status(e *object.ServiceEntry, owner map[netip.Addr]string) []object.VIP {
	var all []object.VIP
	for _, name := range uniqueHosts(e) {
		key := hostKey(name)
		host := h.hosts[key]
		if host == nil || !slices.ContainsFunc(host.claims, func(c *claim) bool { return c.host == name && c.wantsVIP }) {
			continue
		}
		kept := func(a netip.Addr) bool { return owner[a] == key }
		addrs := slices.DeleteFunc(slices.Clone(e.VIPs[name]), func(a netip.Addr) bool { return !kept(a) })
		for i := 0; i < len(host.claims) && len(addrs) == 0; i++ {
			for _, a := range host.claims[i].vips {
				if kept(a) {
					addrs = append(addrs, a)
				}
			}
		}
		if len(addrs) == 0 && host.hasSlot {
			addrs = []netip.Addr{slotAddr4(host.slot), slotAddr6(host.slot)}
		}
		for _, a := range addrs {
			all = append(all, object.VIP{Host: name, Addr: a})
		}
	}
	return all
}
