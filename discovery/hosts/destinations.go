package hosts

import (
	"cmp"
	"slices"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/object"
)

// destinationsOf returns where connections to the automatic VIPs of a host lead: the ports of all
// claims, and for each port the endpoints of all of them. Only claims to a VIP have some, and none of
// these has addresses of another kind.
func destinationsOf(claims []visibleClaim, host string) []*api.NameTable_Destination {
	var all []object.Destination
	for _, c := range claims {
		all = append(all, c.destinations.List()...)
	}
	slices.SortFunc(all, object.Destination.Compare)
	all = slices.CompactFunc(all, func(a, b object.Destination) bool { return a.Compare(b) == 0 })
	var messages []*api.NameTable_Destination
	for len(all) > 0 {
		n := 1
		for n < len(all) && all[n].Port == all[0].Port {
			n++
		}
		d := joined(all[:n], host)
		messages = append(messages, &api.NameTable_Destination{Port: uint32(d.Port), Target: uint32(d.Target), Endpoints: d.Endpoints})
		all = all[n:]
	}
	return messages
}

// joined returns one destination for several of one port. The host itself is then one of the
// endpoints, but no endpoint can stand for all names below a wildcard.
func joined(several []object.Destination, host string) object.Destination {
	if len(several) == 1 || object.IsWildcard(host) {
		return several[0]
	}
	d := object.Destination{Port: several[0].Port}
	for _, one := range several {
		d.Endpoints = append(d.Endpoints, one.Endpoints...)
		if len(one.Endpoints) == 0 {
			d.Endpoints = append(d.Endpoints, object.JoinEndpoint(host, cmp.Or(one.Target, one.Port)))
		}
	}
	slices.Sort(d.Endpoints)
	d.Endpoints = slices.Compact(d.Endpoints)
	return d
}
