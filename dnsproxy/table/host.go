package table

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"unsafe"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// registryKubernetes is the NameInfo.registry of a Service, registryExternal of a
// ServiceEntry's host.
const (
	registryKubernetes = "Kubernetes"
	registryExternal   = "External"
)

// hostFlags describe a host.
type hostFlags uint8

// The flags of a host.
const (
	flagKubernetes hostFlags = 1 << iota // of the registry Kubernetes
	flagWildcard                         // *.suffix
	flagLocal                            // a Service below the cluster domain: it has short names
	flagDerived                          // its short names can be derived from its FQDN
	flagTexts                            // its texts are stored because they cannot be derived
	flagAlias                            // it is an alias of another host
	flagHeadless                         // a headless Service: its addresses belong to endpoints
	flagPorts                            // its ports are known: a Service's ports, or the destinations of an external host
)

// A Host is one entry of a table: a view of its record, valid as long as the table. It
// must not be changed.
//
// A record consists of the flags, the length of the name, the name, the numbers of IPv4 and
// IPv6 addresses as varints, the addresses, and fields, each with its length as a varint
// before it. The first number is doubled; if it is odd, the numbers of near addresses follow
// both. The fields: with flagTexts the key, registry, short name and namespace; with flagAlias the
// alias; with flagPorts the ports, or the destinations of an external host.
type Host struct {
	flags  hostFlags
	Name   wire.Name // folded; a wildcard's begins with wire.WildcardLabel
	V4, V6 []byte    // packed addresses without duplicates: the near ones, then the others, each sorted
	near   [2]uint32 // how many of V4 and V6 are near, if others are not
	fields []byte
}

// recordNameOffset is the offset of the name in a record.
const recordNameOffset = 2

// viewHost returns the host whose record is at the start of b.
func viewHost(b []byte) Host {
	n := int(b[1])
	h := Host{
		flags: hostFlags(b[0]),
		// Records never change, so a name may share their bytes.
		Name: wire.Name(unsafe.String(&b[recordNameOffset], n)),
	}
	b = b[recordNameOffset+n:]
	count4, n4 := binary.Uvarint(b)
	b = b[n4:]
	count6, n6 := binary.Uvarint(b)
	b = b[n6:]
	if count4&1 != 0 {
		for i := range h.near {
			near, n := binary.Uvarint(b)
			h.near[i], b = uint32(near), b[n:] //nolint:gosec // written by appendRecord
		}
	}
	end4 := int(count4>>1) * wire.AddressLen(dns.TypeA) //nolint:gosec // written by appendRecord
	end6 := end4 + int(count6)*wire.AddressLen(dns.TypeAAAA)
	h.V4, h.V6, h.fields = b[:end4], b[end4:end6], b[end6:]
	return h
}

// Kubernetes reports whether the host comes from the registry Kubernetes: a Service.
func (h *Host) Kubernetes() bool { return h.flags&flagKubernetes != 0 }
func (h *Host) wildcard() bool   { return h.flags&flagWildcard != 0 }
func (h *Host) derived() bool    { return h.flags&flagDerived != 0 }
func (h *Host) headless() bool   { return h.flags&flagHeadless != 0 }
func (h *Host) isAlias() bool    { return h.flags&flagAlias != 0 }

// Near returns the packed addresses of the family of rrtype in two parts: the addresses in the
// agent's cluster, and the others. Without that difference, the first part is empty.
func (h *Host) Near(rrtype uint16) (near, others []byte) {
	all, n := h.V4, h.near[0]
	if rrtype == dns.TypeAAAA {
		all, n = h.V6, h.near[1]
	}
	at := int(n) * wire.AddressLen(rrtype)
	return all[:at], all[at:]
}

// alike reports whether all addresses are near.
func (h *Host) alike() bool {
	_, others4 := h.Near(dns.TypeA)
	_, others6 := h.Near(dns.TypeAAAA)
	return len(others4)+len(others6) == 0
}

// addresses yields the addresses of both families, near ones first, and of these IPv4.
func (h *Host) addresses() iter.Seq[netip.Addr] {
	near4, others4 := h.Near(dns.TypeA)
	near6, others6 := h.Near(dns.TypeAAAA)
	return func(yield func(netip.Addr) bool) {
		for _, list := range [...]struct {
			rrtype uint16
			packed []byte
		}{{dns.TypeA, near4}, {dns.TypeAAAA, near6}, {dns.TypeA, others4}, {dns.TypeAAAA, others6}} {
			for packed := range slices.Chunk(list.packed, wire.AddressLen(list.rrtype)) {
				if addr, _ := netip.AddrFromSlice(packed); !yield(addr) {
					return
				}
			}
		}
	}
}

// has reports whether the host has a packed address.
func (h *Host) has(packed []byte) bool { return h.find(packed) != nil }

// find returns the host's own copy of a packed address, or nil if the host does not have it.
func (h *Host) find(packed []byte) []byte {
	rrtype := dns.TypeA
	if len(packed) == wire.AddressLen(dns.TypeAAAA) {
		rrtype = dns.TypeAAAA
	}
	near, others := h.Near(rrtype)
	if found := findPacked(near, packed); found != nil {
		return found
	}
	return findPacked(others, packed)
}

// findPacked returns the copy of a packed address in a sorted list of packed addresses of its
// family, or nil. It takes a logarithm of the list's length.
func findPacked(list, packed []byte) []byte {
	size := len(packed)
	low, high := 0, len(list)/size
	for low < high {
		middle := (low + high) / 2
		one := list[middle*size:][:size:size]
		switch order := bytes.Compare(one, packed); {
		case order == 0:
			return one
		case order < 0:
			low = middle + 1
		default:
			high = middle
		}
	}
	return nil
}

// A hostInfo is what a control plane says about a host besides its addresses.
type hostInfo struct {
	key                            string
	registry, shortname, namespace string
}

// Key returns the key under which the control plane sent the host, which is in a table with
// cluster c.
func (h *Host) Key(c *Cluster) string { return h.info(c).key }

// info returns the texts of a host of a table with cluster c.
func (h *Host) info(c *Cluster) hostInfo {
	if h.flags&flagTexts == 0 {
		return h.usualInfo(c)
	}
	var texts [textFields]string
	b := h.fields
	for i := range texts {
		var text []byte
		text, b = cutField(b)
		texts[i] = string(text)
	}
	return hostInfo{key: texts[0], registry: texts[1], shortname: texts[2], namespace: texts[3]}
}

// textFields is the number of a record's fields that flagTexts stands for.
const textFields = 4

// cutField returns the field at the start of b and what follows it.
func cutField(b []byte) (field, rest []byte) {
	n, used := binary.Uvarint(b)
	end := used + int(n) //nolint:gosec // written by appendField
	return b[used:end], b[end:]
}

// appendField appends a field of a record to dst.
func appendField[T string | []byte](dst []byte, field T) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(field))), field...)
}

// afterTexts returns the fields that follow the texts.
func (h *Host) afterTexts() []byte {
	rest := h.fields
	if h.flags&flagTexts != 0 {
		for range textFields {
			_, rest = cutField(rest)
		}
	}
	return rest
}

// Alias returns the host whose addresses h has, of which h is an alias; the root if h is no alias.
func (h *Host) Alias() wire.Name {
	if !h.isAlias() {
		return wire.Root
	}
	return h.aliasField()
}

func (h *Host) aliasField() wire.Name {
	alias, _ := cutField(h.afterTexts())
	return wire.Name(viewString(alias))
}

// usualInfo derives the texts of a host without flagTexts.
func (h *Host) usualInfo(c *Cluster) hostInfo {
	info := hostInfo{key: strings.TrimSuffix(wire.Presentation(string(h.Name)), "."), registry: registryExternal}
	if h.Kubernetes() {
		info.registry = registryKubernetes
	}
	if h.derived() {
		short, _ := h.Name.CutSuffix(c.services)
		dotted := strings.TrimSuffix(short.String(), ".")
		last := strings.LastIndexByte(dotted, '.')
		info.shortname, info.namespace = dotted[:last], dotted[last+1:]
	}
	return info
}

// isUsual reports whether info equals the result of usualInfo, without building that.
func (h *Host) isUsual(info *hostInfo) bool {
	if len(info.key) != len(h.Name)-1 {
		return false
	}
	at := 0
	for n := h.Name; n != wire.Root; n = n.Parent() {
		label := n.FirstLabel()
		if info.key[at:at+len(label)] != label || at > 0 && info.key[at-1] != '.' {
			return false
		}
		at += len(label) + 1
	}
	switch {
	case !h.Kubernetes():
		return info.registry == registryExternal && info.shortname == "" && info.namespace == ""
	case !h.derived():
		return info.shortname == "" && info.namespace == ""
	}
	// Short name and namespace are the first labels of the key, apart from case.
	short := len(info.shortname)
	return strings.HasPrefix(info.key, info.shortname) && strings.HasPrefix(info.key[short+1:], info.namespace)
}

// appendRecord appends the record of a candidate to dst, with its texts unless they can be
// derived.
func (c *candidate) appendRecord(dst []byte) []byte {
	h, info, flags := &c.Host, &c.info, c.flags
	if !h.isUsual(info) {
		flags |= flagTexts
	}
	if c.alias != wire.Root {
		flags |= flagAlias
	}
	if len(c.ports) > 0 {
		flags |= flagPorts
	}
	dst = append(dst, byte(flags), byte(len(h.Name)))
	dst = append(dst, h.Name...)
	count4, hasNear := uint64(len(h.V4)/wire.AddressLen(dns.TypeA))<<1, h.near != [2]uint32{}
	if hasNear {
		count4 |= 1
	}
	dst = binary.AppendUvarint(dst, count4)
	dst = binary.AppendUvarint(dst, uint64(len(h.V6)/wire.AddressLen(dns.TypeAAAA)))
	if hasNear {
		dst = binary.AppendUvarint(binary.AppendUvarint(dst, uint64(h.near[0])), uint64(h.near[1]))
	}
	dst = append(append(dst, h.V4...), h.V6...)
	if flags&flagTexts != 0 {
		for _, text := range [textFields]string{info.key, info.registry, info.shortname, info.namespace} {
			dst = appendField(dst, text)
		}
	}
	if c.alias != wire.Root {
		dst = appendField(dst, string(c.alias))
	}
	if len(c.ports) > 0 {
		dst = appendField(dst, c.ports)
	}
	return dst
}

// recordLen returns the length in bytes of the record at the start of b.
func recordLen(b []byte) int {
	h := viewHost(b)
	rest := h.afterTexts()
	for _, flag := range [...]hostFlags{flagAlias, flagPorts} {
		if h.flags&flag != 0 {
			_, rest = cutField(rest)
		}
	}
	return len(b) - len(rest)
}

// A content identifies the set of entries of a shard, in any order. Two different sets have
// the same content with a probability of 2^-64.
type content struct {
	sum     uint64 // of the entries' hashes
	entries int
}

// add adds an entry in wire form.
func (c *content) add(seed maphash.Seed, raw []byte) {
	c.entries++
	c.sum += maphash.Bytes(seed, raw)
}

// A shard holds the hosts of a shard ([digest.ShardOf]): a push that changes one host of 100,000 builds
// one shard of some 400 hosts. It is immutable; the zero value is empty.
type shard struct {
	content content
	records []byte
	// index maps the hash of a name to the offset of its record plus one: open addressing
	// in a power of two that is never full. It is empty without records.
	index []uint32
	counts

	// These are rare: invalid entries, names that two entries claim, and names that cannot
	// be derived from a host's FQDN.
	skipped    []Skipped
	collisions []Collision
	claims     []claim
}

// counts are numbers of hosts.
type counts struct {
	hosts, wildcards uint32 // hosts are without wildcards
	headless, ported uint32 // of these: headless Services, and Services with ports
}

func (c *counts) addCounts(other *counts) {
	c.hosts += other.hosts
	c.wildcards += other.wildcards
	c.headless += other.headless
	c.ported += other.ported
}

// A claim is a name besides its FQDN by which a host wants to be found.
type claim struct {
	name wire.Name
	fqdn wire.Name
	key  string // the host's
}

// find returns the host with a name whose hash is hash.
func (s *shard) find(hash uint64, name wire.Name) (h Host, ok bool) {
	if len(s.index) == 0 {
		return Host{}, false
	}
	mask := uint64(len(s.index) - 1)
	for i := hash & mask; s.index[i] != 0; i = (i + 1) & mask {
		record := s.records[s.index[i]-1:]
		if int(record[1]) == len(name) && string(record[recordNameOffset:][:len(name)]) == string(name) {
			return viewHost(record), true
		}
	}
	return Host{}, false
}

// all yields the hosts, in the order of their names.
func (s *shard) all(yield func(Host) bool) {
	for rest := s.records; len(rest) > 0; {
		h := viewHost(rest)
		if !yield(h) {
			return
		}
		rest = rest[recordLen(rest):]
	}
}

// viewString returns b as a string without a copy. b must not change while the string is
// in use.
func viewString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
