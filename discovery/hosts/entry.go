package hosts

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/object"
)

const (
	registryKubernetes = "Kubernetes"
	registryExternal   = "External"
)

// Field numbers of a NameTable, which has a map, and of the entries of that map.
const (
	fieldTable = 1
	fieldKey   = 1
	fieldValue = 2
)

// An Entry is a host in a name table, with its addresses. All clients whose tables have the same content for the host
// share the Entry.
type Entry struct {
	// Host is the name in the table, as its author wrote it.
	Host string
	// Encoded is a NameTable with only this entry. Because a NameTable is a map, the concatenated
	// entries of several hosts are the NameTable with all of them.
	Encoded []byte
}

func newEntry(host string, info *api.NameTable_NameInfo) *Entry {
	// Marshal fails only for strings that are not valid UTF-8. These are names and addresses.
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(info)
	if err != nil {
		panic(fmt.Sprintf("encoding host %q: %v", host, err))
	}
	size := protowire.SizeTag(fieldKey) + protowire.SizeBytes(len(host)) + protowire.SizeTag(fieldValue) + protowire.SizeBytes(len(value))
	b := make([]byte, 0, protowire.SizeTag(fieldTable)+protowire.SizeBytes(size))
	b = protowire.AppendTag(b, fieldTable, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(size))
	b = protowire.AppendTag(b, fieldKey, protowire.BytesType)
	b = protowire.AppendString(b, host)
	b = protowire.AppendTag(b, fieldValue, protowire.BytesType)
	b = protowire.AppendBytes(b, value)
	return &Entry{Host: host, Encoded: b}
}

// Differs reports whether two entries differ; nil stands for no entry.
func (e *Entry) Differs(other *Entry) bool {
	return e != other && (e == nil || other == nil || !bytes.Equal(e.Encoded, other.Encoded))
}

// visibleClaim is a claim with the addresses that a client gets.
type visibleClaim struct {
	*claim
	near, addrs []netip.Addr // near has the addresses in the client's cluster, which the client gets first
}

// merge makes one table entry of claims of one namespace to a host. The claims are all of Services, or all of
// ServiceEntries. The entry has the addresses of all of them.
func merge(h *Host, claims []visibleClaim) (host string, info *api.NameTable_NameInfo) {
	host = claims[0].host
	var near, addrs []netip.Addr
	for _, c := range claims {
		near, addrs = append(near, c.near...), append(addrs, c.addrs...)
		host = min(host, c.host) // claims to the same host may differ in case
	}
	info = claims[0].info(near, addrs)
	if h.reserved && info.GetRegistry() == registryExternal {
		info.Namespace = claims[0].namespace
	}
	info.Headless = !slices.ContainsFunc(claims, func(c visibleClaim) bool { return !c.endpoints || c.pod() })
	info.Ports = portsOf(claims, len(info.GetIps()))
	info.Destinations = destinationsOf(claims, host)
	return host, info
}

// maxLent bounds the addresses of its target that an alias has, so that the size of an alias depends on nothing that
// another namespace can make. Not many more fit into a response over UDP.
const maxLent = 32

// aliasOf makes the entry of the first of claims that is an alias of a name. The parameter target is the entry that
// answers for that name; nil for a name outside the mesh, which agents forward.
func aliasOf(claims []*claim, name string, target *Entry) (host string, info *api.NameTable_NameInfo) {
	c := claims[slices.IndexFunc(claims, func(c *claim) bool { return c.alias != "" })]
	var near, addrs []netip.Addr
	if target != nil {
		near, addrs = target.addrs()
		near = near[:min(len(near), maxLent)]
		addrs = addrs[:min(len(addrs), maxLent-len(near))]
	}
	info = (visibleClaim{claim: c}).info(near, addrs)
	info.Alias = name
	return c.host, info
}

// sorted sorts addresses, and returns each once.
func sorted(addrs []netip.Addr) []netip.Addr {
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}

// addrs returns the addresses of the entry: the addresses in the client's cluster, which come first in the entry, and
// the others.
func (e *Entry) addrs() (near, others []netip.Addr) {
	var table api.NameTable
	if err := proto.Unmarshal(e.Encoded, &table); err != nil {
		panic(fmt.Sprintf("decoding the entry of host %q: %v", e.Host, err)) // newEntry has encoded it
	}
	info := table.GetTable()[e.Host]
	addrs := make([]netip.Addr, len(info.GetIps()))
	for i, text := range info.GetIps() {
		addrs[i] = netip.MustParseAddr(text)
	}
	return addrs[:info.GetNear():info.GetNear()], addrs[info.GetNear():]
}

func (c visibleClaim) info(near, addrs []netip.Addr) *api.NameTable_NameInfo {
	near, addrs = sorted(near), sorted(addrs)
	if len(near) > 0 {
		addrs = slices.DeleteFunc(addrs, func(a netip.Addr) bool {
			_, found := slices.BinarySearchFunc(near, a, netip.Addr.Compare)
			return found
		})
	}
	info := &api.NameTable_NameInfo{Registry: registryExternal, Ips: make([]string, 0, len(near)+len(addrs))}
	for _, a := range near {
		info.Ips = append(info.Ips, a.String())
	}
	for _, a := range addrs {
		info.Ips = append(info.Ips, a.String())
	}
	if len(addrs) > 0 {
		info.Near = uint32(len(near)) //nolint:gosec // endpoints of one host
	}
	if c.kubernetes() {
		info.Registry = registryKubernetes
	}
	if c.kubernetes() && !c.imported { // as in istiod, a ServiceImport has no short names
		info.Shortname, info.Namespace = c.shortname, c.namespace
	}
	return info
}

// eachPort calls yield for each port of each address that a client gets, perhaps more than once for the same
// port and address.
func (c *visibleClaim) eachPort(yield func(object.Port, netip.Addr)) {
	visible := sorted(slices.Concat(c.near, c.addrs))
	if c.mixed == nil {
		for _, p := range c.services.List() {
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

// portsOf returns the ports of an entry with n addresses. If only some of the addresses have a port, the
// port lists these addresses.
func portsOf(claims []visibleClaim, n int) []*api.NameTable_Port {
	first := claims[0].services
	differs := func(c visibleClaim) bool { return c.mixed != nil || c.services != first }
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

// maxPortName is the length of the longest port name that fits into a label of a DNS name. Such a label is an
// underscore and the name, as in _http._tcp.
const maxPortName = 62

func newPort(p object.Port) *api.NameTable_Port {
	port := &api.NameTable_Port{Name: p.Name, Number: uint32(p.Number)}
	if len(p.Name) > maxPortName {
		port.Name = "" // the port cannot be found by its name
	}
	if p.Protocol != "TCP" {
		port.Protocol = p.Protocol
	}
	return port
}

// destinationsOf returns where connections to the automatic VIPs of a host lead: the ports of all
// claims, and for each port the endpoints of all claims. Only claims that want a VIP have destinations.
// These claims have no other addresses.
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

// joined returns one destination for several destinations of one port. For a destination without
// endpoints, the host itself becomes an endpoint. For a wildcard, the first destination is returned,
// because no endpoint can stand for all names below a wildcard.
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
