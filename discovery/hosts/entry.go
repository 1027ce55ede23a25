package hosts

import (
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
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

// An Entry is the line of a host in a name table. It is shared by all clients that see the same.
type Entry struct {
	// Host is the name in the table, as its author wrote it.
	Host string
	// Encoded is a NameTable with only this entry. Because a NameTable is a map, the concatenated
	// entries of several hosts are the NameTable with all of them.
	Encoded []byte
	// Sum is a checksum of Encoded.
	Sum digest.Sum
}

func newEntry(host string, info *api.NameTable_NameInfo) *Entry {
	// The strings of a NameInfo are valid UTF-8, because they are names and addresses.
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
	return &Entry{Host: host, Encoded: b, Sum: digest.Of(b)}
}

// addrs returns the addresses of the entry; near come first.
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

// visibleClaim is a claim with the addresses that a client gets.
type visibleClaim struct {
	*claim
	near, addrs []netip.Addr // near comes first
}

func isKubernetes(c visibleClaim) bool { return c.kubernetes() }

// mergeClaims makes one table entry of all claims to a host. Kubernetes Services take
// precedence over ServiceEntries of the same host; among equals, the addresses add up.
// alias is the host that claims of aliases stand for.
func mergeClaims(claims []visibleClaim, alias string) (host string, info *api.NameTable_NameInfo) {
	if slices.ContainsFunc(claims, isKubernetes) {
		claims = slices.DeleteFunc(claims, func(c visibleClaim) bool { return !isKubernetes(c) })
	}
	owner, host := claims[0], claims[0].host
	var near, addrs []netip.Addr
	for _, c := range claims {
		if c.alias == "" {
			alias = ""
		}
		near, addrs = append(near, c.near...), append(addrs, c.addrs...)
		// Claims to the same host may differ in case. The spelling and the owner must not
		// depend on the order of files.
		host = min(host, c.host)
		if c.namespace < owner.namespace {
			owner = c
		}
	}
	info = owner.info(near, addrs)
	info.Alias = alias
	info.Headless = !slices.ContainsFunc(claims, func(c visibleClaim) bool { return !c.endpoints || c.pod() })
	info.Ports = portsOf(claims, len(info.GetIps()))
	info.Destinations = destinationsOf(claims, host)
	return host, info
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

// sorted sorts addresses, and returns each once.
func sorted(addrs []netip.Addr) []netip.Addr {
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}
