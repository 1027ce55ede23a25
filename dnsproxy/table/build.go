package table

import (
	"bytes"
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// Empty returns a table without hosts, from which [Table.With] makes the first table.
func Empty(c Cluster) *Table { return &Table{hostSet: hostSet{Cluster: c, seed: maphash.MakeSeed()}} }

// With returns a table with new content for some shards. shards maps the number of such a shard ([digest.ShardOf])
// to all entries of the shard: a NameTable in wire form. The result shares with t the shards that are not in this
// map, and shards whose entries have not changed. If all shards are shared, With returns t.
//
// With leaves out keys that are not valid names, and addresses that cannot be parsed; [Table.Skipped]
// lists them. With returns an error if the bytes are not a NameTable, or if an entry
// belongs to another shard. The table does not refer to the memory of shards.
func (t *Table) With(shards map[int][]byte) (*Table, error) {
	b := builder{cluster: &t.Cluster, seed: t.seed}
	var changed []int
	for i := range t.shards {
		content, given := shards[i]
		if !given {
			continue
		}
		for raw, err := range wireEntries(content) {
			var entry wireEntry
			if err == nil {
				entry, err = parseWireEntry(raw)
			}
			if at := digest.ShardOf(entry.key); err == nil && at != i {
				err = fmt.Errorf("host %q is of shard %d", entry.key, at)
			}
			if err != nil {
				return nil, fmt.Errorf("shard %d (%d bytes): %w", i, len(content), err)
			}
			b.contents[i].add(t.seed, raw)
		}
		if b.contents[i] != t.shards[i].content {
			changed = append(changed, i)
		}
	}
	if len(changed) == 0 {
		return t, nil
	}
	return t.rebuild(&b, shards, changed)
}

// rebuild returns a table that differs from t in the shards whose numbers are in changed. b builds these shards.
func (t *Table) rebuild(b *builder, shards map[int][]byte, changed []int) (*Table, error) {
	next := &Table{hostSet: hostSet{Cluster: t.Cluster, seed: t.seed, shards: t.shards}}
	for _, i := range changed {
		var err error
		if next.shards[i], err = b.shard(shards[i]); err != nil {
			return nil, err
		}
		next.shards[i].content = b.contents[i]
	}
	for i := range next.shards {
		next.addCounts(&next.shards[i].counts)
	}
	next.reverse = t.reverse.update(&t.hostSet, &next.hostSet, changed)
	next.ancestors = t.ancestors.update(&t.hostSet, &next.hostSet, changed)
	return next, nil
}

// A builder builds shards. It sorts the entries, and uses the first of several entries with the
// same name. So its result does not depend on the order in which it gets the entries.
type builder struct {
	cluster  *Cluster
	seed     maphash.Seed
	contents [digest.Count]content

	// Buffers for one shard.
	candidates []candidate
	names      []byte
	packed     []byte
	encoded    []byte
	records    []byte
	// Buffers for one entry.
	key    string
	info   nameInfo
	v4, v6 []netip.Addr
	near   [2]int // how many of v4, and how many of v6, are in the agent's cluster
}

// shard builds one shard from its entries.
func (b *builder) shard(content []byte) (shard, error) {
	var s shard
	b.candidates, b.names, b.packed, b.encoded = b.candidates[:0], b.names[:0], b.packed[:0], b.encoded[:0]
	s.records = b.records[:0]
	b.names, s.records = slices.Grow(b.names, len(content)), slices.Grow(s.records, len(content))
	for raw, err := range wireEntries(content) {
		var entry wireEntry
		if err == nil {
			entry, err = parseWireEntry(raw)
		}
		if err == nil {
			err = b.info.parse(entry.info)
		}
		if err != nil {
			return shard{}, fmt.Errorf("host %q: %w", entry.key, err)
		}
		b.key = viewString(entry.key)
		b.addCandidate(&s, raw)
	}
	sorted := make([]*candidate, len(b.candidates)) // pointers, because candidates are too large to be moved
	for i := range b.candidates {
		sorted[i] = &b.candidates[i]
	}
	slices.SortFunc(sorted, (*candidate).compare)
	sortSkipped(s.skipped)
	s.index = newIndex(len(b.candidates))
	var winner *candidate
	for _, c := range sorted {
		if winner != nil && winner.Name == c.Name {
			s.collisions = append(s.collisions, Collision{c.Name.String(), strings.Clone(winner.key), strings.Clone(c.key)})
			continue
		}
		winner = c
		s.add(maphash.String(b.seed, string(c.Name)), c, b.cluster)
	}
	b.records = s.records
	s.records = bytes.Clone(s.records)
	return s, nil
}

// addCandidate makes b.info a candidate if it is valid. It records in s what is wrong with b.info.
func (b *builder) addCandidate(s *shard, raw []byte) {
	key := b.key
	start := len(b.names)
	names, wildcard, err := wire.AppendHost(b.names, key)
	if err != nil {
		s.skip(key, "not a valid name: "+err.Error())
		return
	}
	b.names = names
	c := candidate{Host: Host{Name: wire.Name(viewString(names[start:]))}, key: key, raw: raw, info: b.info.hostInfo}
	if c.Name.Special() {
		s.skip(key, wire.ErrSpecial.Error())
		return
	}
	if c.info.registry == registryKubernetes {
		c.flags |= flagKubernetes
	}
	if wildcard {
		c.flags |= flagWildcard
	}
	if !c.mayHaveName(b.cluster) {
		s.skip(key, "a name of the cluster, which only Services have")
		return
	}
	b.addresses(s, b.info.ips)
	c.alias = b.alias(s, c.Name)
	if len(b.v4)+len(b.v6) == 0 && c.alias == wire.Root && (wildcard || !c.Kubernetes()) {
		return // it has nothing to answer with (docs/behaviour.md, row N11)
	}
	c.V4, c.near[0] = b.packNear(b.v4, b.near[0])
	c.V6, c.near[1] = b.packNear(b.v6, b.near[1])
	if c.allNear() {
		c.near = [2]uint32{}
	}
	c.flags |= c.localFlags(b.cluster)
	switch {
	case c.alias != wire.Root:
	case c.info.registry == registryExternal:
		c.ports = b.destinations(s)
	case c.Kubernetes() && !wildcard:
		if b.info.headless {
			c.flags |= flagHeadless
		}
		c.ports = b.ports(s, &c.addresses)
	}
	if c.derived() {
		var heads [3]wire.Name
		for _, name := range b.cluster.heads(c.Name, heads[:0]) {
			if name.Special() {
				s.skip(key, fmt.Sprintf("short name %q: %v", strings.TrimSuffix(name.String(), "."), wire.ErrSpecial))
			}
		}
	}
	b.candidates = append(b.candidates, c)
}

// addresses parses addresses into b.v4 and b.v6, and sets b.near.
func (b *builder) addresses(s *shard, ips []string) {
	b.v4, b.v6, b.near = b.v4[:0], b.v6[:0], [2]int{}
	for i, ip := range ips {
		if uint64(i) == b.info.near { //nolint:gosec // not negative
			b.near = [2]int{len(b.v4), len(b.v6)}
		}
		addr, err := netip.ParseAddr(ip)
		zone := addr.Zone() // Unmap drops it
		switch addr = addr.Unmap(); {
		case err != nil || zone != "":
			s.skip(b.key, fmt.Sprintf("address %q is neither IPv4 nor IPv6", ip))
		case addr.IsUnspecified():
			s.skip(b.key, fmt.Sprintf("address %q is unspecified", ip))
		case addr.Is4():
			b.v4 = append(b.v4, addr)
		default:
			b.v6 = append(b.v6, addr)
		}
	}
}

// packNear packs addresses of one family, of which the first n are near. nearCount is the number of near addresses in
// packed.
func (b *builder) packNear(addrs []netip.Addr, n int) (packed []byte, nearCount uint32) {
	near := unique(addrs[:n])
	others := slices.DeleteFunc(unique(addrs[n:]), func(a netip.Addr) bool {
		_, found := slices.BinarySearchFunc(near, a, netip.Addr.Compare)
		return found
	})
	return b.pack(near, others), uint32(len(near)) //nolint:gosec // below the limit of a push
}

// unique sorts addresses, and removes duplicates.
func unique(addrs []netip.Addr) []netip.Addr {
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}

// pack appends the bytes of addresses, all of one family, to b.packed and returns them.
func (b *builder) pack(lists ...[]netip.Addr) []byte {
	start := len(b.packed)
	for _, addrs := range lists {
		for _, addr := range addrs {
			bytes := addr.As16()
			b.packed = append(b.packed, bytes[len(bytes)-addr.BitLen()/8:]...)
		}
	}
	return b.packed[start:len(b.packed):len(b.packed)]
}

// alias returns the name of the host of which b.info is an alias, or the root if b.info has no valid alias. name is
// the name of b.info. alias records in s what is wrong with the alias.
func (b *builder) alias(s *shard, name wire.Name) wire.Name {
	text := b.info.alias
	if text == "" {
		return wire.Root
	}
	switch alias, err := wire.ParseHostname(text); {
	case err != nil:
		s.skip(b.key, fmt.Sprintf("alias %q is not a valid name: %v", text, err))
	case alias.Special():
		s.skip(b.key, fmt.Sprintf("alias %q: %v", text, wire.ErrSpecial))
	case alias == name:
		s.skip(b.key, fmt.Sprintf("alias %q is the host itself", text))
	default:
		return alias
	}
	return wire.Root
}

// ports returns the encoded ports of a candidate. It records in s what is wrong with ports that it
// leaves out.
func (b *builder) ports(s *shard, host *addresses) []byte {
	start := len(b.encoded)
	if n := len(b.info.ports); n > maxPorts {
		s.skip(b.key, fmt.Sprintf("%d ports: only the first %d are used", n, maxPorts))
		b.info.ports = b.info.ports[:maxPorts]
	}
	for i := range b.info.ports {
		p, ok := b.port(s, host, &b.info.ports[i])
		eachPort(b.encoded[start:], host, func(earlier port) bool {
			if ok && earlier.name == p.name && earlier.number == p.number && earlier.protocol == p.protocol {
				s.skip(b.key, fmt.Sprintf("port %q: it is there twice", p.name))
				ok = false
			}
			return ok
		})
		if ok {
			b.encoded = appendPort(b.encoded, &p)
		}
	}
	return b.encoded[start:len(b.encoded):len(b.encoded)]
}

// port checks a port of a host and returns it. p.name is valid only until the next call of port, because its memory
// is used again.
func (b *builder) port(s *shard, host *addresses, info *portInfo) (p port, ok bool) {
	skip := func(reason string) (port, bool) {
		s.skip(b.key, fmt.Sprintf("port %q: %s", info.name, reason))
		return port{}, false
	}
	if info.name != "" {
		names, _, err := wire.AppendHost(b.names, info.name)
		label := names[len(b.names):]
		if err != nil || int(label[0]) != len(label)-1 || len(label)-1 > maxPortNameLen || label[1] == '*' {
			return skip("want a label as its name")
		}
		p.name = viewString(label[1:])
	}
	if p.protocol, ok = parseProtocol(info.protocol); !ok {
		return skip(fmt.Sprintf("protocol %q is not TCP, UDP or SCTP", info.protocol))
	}
	if info.number == 0 || info.number > math.MaxUint16 {
		return skip(fmt.Sprintf("number %d is not between 1 and %d", info.number, math.MaxUint16))
	}
	p.number = uint16(info.number)
	if p.partial = len(info.ips) > 0; p.partial {
		b.addresses(s, info.ips)
		lacking := func(addr netip.Addr) bool { return !host.has(addr.AsSlice()) }
		p.V4, p.V6 = b.pack(unique(slices.DeleteFunc(b.v4, lacking))), b.pack(unique(slices.DeleteFunc(b.v6, lacking)))
		if len(p.V4)+len(p.V6) == 0 {
			return port{}, false // the host does not have any of the port's addresses
		}
	}
	return p, true
}

// maxPorts is the largest number of ports of a host. The number is bounded because an SRV query
// compares each port with all ports before it.
const maxPorts = 100

// destinations returns the encoded destinations of a candidate. It records in s what is wrong with
// destinations that it leaves out.
func (b *builder) destinations(s *shard) []byte {
	start := len(b.encoded)
	for i := range b.info.destinations {
		info := &b.info.destinations[i]
		d, ok := b.destination(s, info)
		eachDestination(b.encoded[start:], func(earlier Destination) bool {
			if ok && earlier.Port == d.Port {
				s.skip(b.key, fmt.Sprintf("destination of port %d: it is there twice", info.port))
				ok = false
			}
			return ok
		})
		if ok {
			b.encoded = appendDestination(b.encoded, &d)
		}
	}
	return b.encoded[start:len(b.encoded):len(b.encoded)]
}

// destination checks a destination and returns it. If it has endpoints, at least one of them must be
// valid.
func (b *builder) destination(s *shard, info *destinationInfo) (d Destination, ok bool) {
	skip := func(format string, args ...any) {
		s.skip(b.key, fmt.Sprintf("destination of port %d: ", info.port)+fmt.Sprintf(format, args...))
	}
	switch {
	case info.port == 0 || info.port > math.MaxUint16:
		skip("the port is not between 1 and %d", math.MaxUint16)
		return d, false
	case info.target > math.MaxUint16:
		skip("target %d is not between 1 and %d", info.target, math.MaxUint16)
		return d, false
	case info.target == 0:
		info.target = info.port
	}
	d.Port, d.Target = uint16(info.port), uint16(info.target)
	for _, endpoint := range info.endpoints {
		if err := checkEndpoint(endpoint); err != nil {
			skip("endpoint %q: %v", endpoint, err)
			continue
		}
		if !slices.Contains(d.Endpoints, endpoint) {
			d.Endpoints = append(d.Endpoints, endpoint)
		}
	}
	return d, len(d.Endpoints) > 0 || len(info.endpoints) == 0
}

// checkEndpoint returns an error if text is not an endpoint of a Destination.
func checkEndpoint(text string) error {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return errors.New("want HOST:PORT")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("port %q is not between 1 and %d", port, math.MaxUint16)
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		if addr.Zone() != "" {
			return errors.New("the address has a zone")
		}
		return nil
	}
	name, err := wire.ParseHostname(host)
	switch {
	case err != nil:
		return fmt.Errorf("neither an IP address nor a hostname: %w", err)
	case name.Special():
		return wire.ErrSpecial
	}
	return nil
}
