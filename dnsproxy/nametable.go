package dnsproxy

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
)

// NewTable builds a table from NameTables in wire form, as one push holds them.
// namespace and domain are the agent's own, as in [Config].
//
// Keys that are no names and addresses that do not parse are left out and listed
// by [Table.Skipped]; the rest counts. An error means that nothing could be
// used: bytes that are no NameTable, or a bad namespace or domain.
func NewTable(namespace, domain string, resources [][]byte) (*Table, error) {
	c, err := newCluster(namespace, domain)
	if err != nil {
		return nil, err
	}
	return newTable(c, resources)
}

func newTable(c cluster, resources [][]byte) (*Table, error) {
	b := builder{table: &Table{
		cluster:   c,
		hosts:     map[wireName]*host{},
		wildcards: map[wireName]*host{},
		aliases:   map[wireName]*host{},
		reverse:   map[netip.Addr][]wireName{},
	}}
	for i, wire := range resources {
		var pushed api.NameTable
		if err := proto.Unmarshal(wire, &pushed); err != nil {
			return nil, fmt.Errorf("NameTable %d of %d (%d bytes): %w", i+1, len(resources), len(wire), err)
		}
		for key, info := range pushed.GetTable() {
			b.parse(key, info)
		}
	}
	b.build()
	return b.table, nil
}

// A builder fills a table. Its result depends on the set of entries alone, not
// on their order: entries are sorted before any may win over another.
type builder struct {
	table   *Table
	entries []entry
	scratch nameBuffer
}

// An entry is a host with the alternative names that came with it.
type entry struct {
	host     *host
	altHosts []string
}

// parse takes in one entry of a push, unless it can be of no use.
func (b *builder) parse(key string, info *api.NameTable_NameInfo) {
	name, wildcard, err := parseHost(key)
	if err != nil {
		b.skip(key, "no valid name: "+err.Error())
		return
	}
	if name.special() {
		b.skip(key, errSpecial.Error())
		return
	}
	h := &host{
		key: key, name: name, wildcard: wildcard,
		registry: info.GetRegistry(), shortname: info.GetShortname(), namespace: info.GetNamespace(),
	}
	var v4, v6 []netip.Addr
	for _, ip := range info.GetIps() {
		addr, err := netip.ParseAddr(ip)
		switch addr = addr.Unmap(); {
		case err != nil || addr.Zone() != "":
			b.skip(key, fmt.Sprintf("address %q is neither IPv4 nor IPv6", ip))
		case addr.IsUnspecified():
			b.skip(key, fmt.Sprintf("address %q is unspecified", ip))
		case addr.Is4():
			v4 = append(v4, addr)
		default:
			v6 = append(v6, addr)
		}
	}
	h.v4, h.v6 = pack(v4), pack(v6)
	if len(h.v4)+len(h.v6) == 0 {
		return // as if the control plane had left it out, which Istio's does
	}
	b.table.cluster.place(h)
	//nolint:staticcheck // Istio's control planes up to 1.9 still fill it.
	b.entries = append(b.entries, entry{host: h, altHosts: info.GetAltHosts()})
}

// build indexes the entries, the winners of every name first.
func (b *builder) build() {
	slices.SortFunc(b.entries, func(x, y entry) int {
		return cmp.Or(
			cmp.Compare(rank(x.host), rank(y.host)),
			cmp.Compare(x.host.key, y.host.key),
			bytes.Compare(x.host.v4, y.host.v4),
			bytes.Compare(x.host.v6, y.host.v6),
			// One key can come in two NameTables of a push.
			cmp.Compare(x.host.registry, y.host.registry),
			cmp.Compare(x.host.namespace, y.host.namespace),
			cmp.Compare(x.host.shortname, y.host.shortname),
			slices.Compare(x.altHosts, y.altHosts),
		)
	})
	for _, e := range b.entries {
		index := b.table.hosts
		if e.host.wildcard {
			index = b.table.wildcards
		}
		b.claim(index, e.host.name, e.host)
	}
	for _, e := range b.entries {
		b.indexShortNames(e)
	}
	b.indexAddresses()
	t := b.table
	slices.SortFunc(t.skipped, func(x, y Skipped) int {
		return cmp.Or(cmp.Compare(x.Key, y.Key), cmp.Compare(x.Reason, y.Reason))
	})
	slices.SortFunc(t.collisions, func(x, y Collision) int {
		return cmp.Or(cmp.Compare(x.Name, y.Name), cmp.Compare(x.Loser, y.Loser))
	})
	t.collisions = slices.Compact(t.collisions)
}

// rank orders hosts by who wins a name: those of the Kubernetes registry first.
func rank(h *host) int {
	if h.kubernetes() {
		return 0
	}
	return 1
}

// claim gives name to h unless another host has it.
func (b *builder) claim(index map[wireName]*host, name wireName, h *host) {
	switch winner := index[name]; winner {
	case nil:
		index[name] = h
	case h:
	default:
		b.collide(name, winner, h)
	}
}

// indexShortNames stores the short names that [cluster.expansions] cannot derive
// from the FQDN, and notes which ones another host answers.
func (b *builder) indexShortNames(e entry) {
	h := e.host
	if !h.local || b.table.hosts[h.name] != h {
		return
	}
	names := append(shortNames(h, b.table.cluster), e.altHosts...)
	for _, s := range names {
		name, err := parseHostname(s)
		if err != nil {
			b.skip(h.key, fmt.Sprintf("short name %q is no valid name: %v", s, err))
			continue
		}
		if name.special() {
			b.skip(h.key, fmt.Sprintf("short name %q: %v", s, errSpecial))
			continue
		}
		switch winner := b.owner(name); winner {
		case nil:
			b.table.aliases[name] = h
		case h:
		default:
			b.collide(name, winner, h)
		}
	}
}

// owner returns the host that answers name without a wildcard's help.
func (b *builder) owner(name wireName) *host {
	if h := b.table.hosts[name]; h != nil {
		return h
	}
	return b.table.shortName(name, &b.scratch)
}

// shortNames lists the names that Istio's agent derives for a Kubernetes host.
func shortNames(h *host, c cluster) []string {
	if h.shortname == "" || h.namespace == "" {
		return nil
	}
	names := []string{h.shortname + "." + h.namespace, h.shortname + "." + h.namespace + "." + svcLabel}
	if own := c.own.firstLabel(); own != "" && strings.EqualFold(own, h.namespace) {
		names = append(names, h.shortname)
	}
	return names
}

// indexAddresses fills the table's reverse index. A wildcard has no FQDN that a
// PTR record could name.
func (b *builder) indexAddresses() {
	reverse := b.table.reverse
	for _, h := range b.table.hosts {
		for addr := range h.addresses() {
			reverse[addr] = append(reverse[addr], h.name)
		}
	}
	for _, names := range reverse {
		slices.SortFunc(names, func(x, y wireName) int { return cmp.Compare(x.String(), y.String()) })
	}
}

func (b *builder) skip(key, reason string) {
	b.table.skipped = append(b.table.skipped, Skipped{Key: key, Reason: reason})
}

func (b *builder) collide(name wireName, winner, loser *host) {
	c := Collision{Name: name.String(), Winner: winner.key, Loser: loser.key}
	if winner.wildcard {
		c.Name = "*." + c.Name
	}
	b.table.collisions = append(b.table.collisions, c)
}

// NameTable returns the table as a NameTable: every host under the key that the
// control plane gave it, and the short names that answer as entries of their
// own, as Istio's agent shows them. The caller owns the result.
func (t *Table) NameTable() *api.NameTable {
	out := &api.NameTable{Table: make(map[string]*api.NameTable_NameInfo, 3*t.Len())}
	for _, index := range []map[wireName]*host{t.hosts, t.wildcards} {
		for _, h := range index {
			out.Table[h.key] = &api.NameTable_NameInfo{
				Ips: addresses(h), Registry: h.registry, Shortname: h.shortname, Namespace: h.namespace,
			}
		}
	}
	for _, h := range t.hosts {
		if !h.derived {
			continue
		}
		for _, s := range shortNames(h, t.cluster) {
			if name, err := parseHostname(s); err == nil {
				t.listShortName(out, name, h)
			}
		}
	}
	for name, h := range t.aliases {
		t.listShortName(out, name, h)
	}
	return out
}

// listShortName puts name in out if it is h that answers it.
func (t *Table) listShortName(out *api.NameTable, name wireName, h *host) {
	if t.lookup(name, nil, new(nameBuffer)).host == h {
		out.Table[name.String()] = &api.NameTable_NameInfo{Ips: addresses(h), Registry: h.registry}
	}
}

func addresses(h *host) []string {
	var out []string
	for addr := range h.addresses() {
		out = append(out, addr.String())
	}
	return out
}

// pack returns the bytes of addrs, all of one family, sorted and without
// duplicates.
func pack(addrs []netip.Addr) []byte {
	slices.SortFunc(addrs, netip.Addr.Compare)
	var packed []byte
	for _, addr := range slices.Compact(addrs) {
		packed = append(packed, addr.AsSlice()...)
	}
	return packed
}
