package dnsproxy

import (
	"bytes"
	"encoding/binary"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"unsafe"

	"github.com/nametap/nametap/dnsproxy/wire"

	"github.com/miekg/dns"
)

// registryKubernetes is the NameInfo.registry of a Service, registryExternal that of
// a host of a ServiceEntry.
const (
	registryKubernetes = "Kubernetes"
	registryExternal   = "External"
)

// hostFlags say what kind of host an entry is.
type hostFlags uint8

// The flags of a host.
const (
	flagKubernetes hostFlags = 1 << iota // of the registry Kubernetes
	flagWildcard                         // *.suffix
	flagLocal                            // of this cluster's Kubernetes: it has short names
	flagDerived                          // and they can be derived from its FQDN
	flagTexts                            // its texts follow, for they cannot be derived
)

// A host is one entry of a table, as a view of its record. It never changes.
//
// A record is flags, the length of the name, the name, the numbers of IPv4 and IPv6
// addresses as varints, the addresses and, with flagTexts, key, registry, short name
// and namespace, each after its length as a varint.
type host struct {
	flags  hostFlags
	name   wire.Name // folded; a wildcard's begins with wire.WildcardLabel
	v4, v6 []byte    // packed addresses, sorted, without duplicates
	texts  []byte
}

// recordNameOffset is where the name begins in a record.
const recordNameOffset = 2

// viewHost returns the host whose record b begins with.
func viewHost(b []byte) host {
	n := int(b[1])
	h := host{
		flags: hostFlags(b[0]),
		// Records never change, so a name may share their bytes.
		name: wire.Name(unsafe.String(&b[recordNameOffset], n)),
	}
	b = b[recordNameOffset+n:]
	count4, n4 := binary.Uvarint(b)
	b = b[n4:]
	count6, n6 := binary.Uvarint(b)
	b = b[n6:]
	end4 := int(count4) * addressLen(dns.TypeA) //nolint:gosec // what appendRecord wrote
	end6 := end4 + int(count6)*addressLen(dns.TypeAAAA)
	h.v4, h.v6, h.texts = b[:end4], b[end4:end6], b[end6:]
	return h
}

func (h *host) kubernetes() bool { return h.flags&flagKubernetes != 0 }
func (h *host) wildcard() bool   { return h.flags&flagWildcard != 0 }
func (h *host) derived() bool    { return h.flags&flagDerived != 0 }

// addresses yields the addresses of both families, IPv4 first.
func (h *host) addresses() iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for v4 := range slices.Chunk(h.v4, addressLen(dns.TypeA)) {
			if !yield(netip.AddrFrom4([4]byte(v4))) {
				return
			}
		}
		for v6 := range slices.Chunk(h.v6, addressLen(dns.TypeAAAA)) {
			if !yield(netip.AddrFrom16([16]byte(v6))) {
				return
			}
		}
	}
}

// has reports whether a packed address is one of the host's.
func (h *host) has(packed []byte) bool {
	all := h.v4
	if len(packed) == addressLen(dns.TypeAAAA) {
		all = h.v6
	}
	for ; len(all) > 0; all = all[len(packed):] {
		if bytes.Equal(all[:len(packed)], packed) {
			return true
		}
	}
	return false
}

// A hostInfo is what a control plane says of a host in words.
type hostInfo struct {
	key                            string
	registry, shortname, namespace string
}

// info returns the texts of a host of a table with cluster c.
func (h *host) info(c *cluster) hostInfo {
	if h.flags&flagTexts == 0 {
		return h.usualInfo(c)
	}
	var texts [4]string
	b := h.texts
	for i := range texts {
		n, used := binary.Uvarint(b)
		texts[i] = string(b[used : used+int(n)]) //nolint:gosec // what appendRecord wrote
		b = b[used+int(n):]                      //nolint:gosec // the same
	}
	return hostInfo{key: texts[0], registry: texts[1], shortname: texts[2], namespace: texts[3]}
}

// usualInfo returns the texts that a host has whose texts need not be kept.
func (h *host) usualInfo(c *cluster) hostInfo {
	info := hostInfo{key: strings.TrimSuffix(wire.Presentation(string(h.name)), "."), registry: registryExternal}
	if h.kubernetes() {
		info.registry = registryKubernetes
	}
	if h.derived() {
		short, _ := h.name.CutSuffix(c.services)
		dotted := strings.TrimSuffix(short.String(), ".")
		last := strings.LastIndexByte(dotted, '.')
		info.shortname, info.namespace = dotted[:last], dotted[last+1:]
	}
	return info
}

// isUsual reports whether info is what usualInfo returns, without making it.
func (h *host) isUsual(info *hostInfo) bool {
	if len(info.key) != len(h.name)-1 {
		return false
	}
	at := 0
	for n := h.name; n != wire.Root; n = n.Parent() {
		label := n.FirstLabel()
		if info.key[at:at+len(label)] != label || at > 0 && info.key[at-1] != '.' {
			return false
		}
		at += len(label) + 1
	}
	switch {
	case !h.kubernetes():
		return info.registry == registryExternal && info.shortname == "" && info.namespace == ""
	case !h.derived():
		return info.shortname == "" && info.namespace == ""
	}
	// Short name and namespace are the head of the key but for their case.
	short := len(info.shortname)
	return strings.HasPrefix(info.key, info.shortname) && strings.HasPrefix(info.key[short+1:], info.namespace)
}

// appendRecord appends the record of h, with the texts of info unless they are
// those that h has anyway.
func (h *host) appendRecord(dst []byte, info *hostInfo) []byte {
	flags := h.flags
	if !h.isUsual(info) {
		flags |= flagTexts
	}
	dst = append(dst, byte(flags), byte(len(h.name)))
	dst = append(dst, h.name...)
	dst = binary.AppendUvarint(dst, uint64(len(h.v4)/addressLen(dns.TypeA)))
	dst = binary.AppendUvarint(dst, uint64(len(h.v6)/addressLen(dns.TypeAAAA)))
	dst = append(append(dst, h.v4...), h.v6...)
	if flags&flagTexts == 0 {
		return dst
	}
	for _, text := range []string{info.key, info.registry, info.shortname, info.namespace} {
		dst = append(binary.AppendUvarint(dst, uint64(len(text))), text...)
	}
	return dst
}

// recordLen returns the length of the record that b begins with.
func recordLen(b []byte) int {
	h := viewHost(b)
	rest := h.texts
	if h.flags&flagTexts != 0 {
		for range 4 {
			n, used := binary.Uvarint(rest)
			rest = rest[used+int(n):] //nolint:gosec // what appendRecord wrote
		}
	}
	return len(b) - len(rest)
}
