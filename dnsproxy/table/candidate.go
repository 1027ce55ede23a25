package table

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"slices"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A candidate is a valid entry of a push. It becomes a host unless another candidate with the same name wins.
type candidate struct {
	Host
	info  hostInfo
	alias wire.Name
	ports []byte // the encoded ports or, for an external host, the encoded destinations
}

// registryFlags returns flagKubernetes and flagWildcard, as far as they apply to the candidate.
func (c *candidate) registryFlags(wildcard bool) (flags hostFlags) {
	if c.info.registry == registryKubernetes {
		flags = flagKubernetes
	}
	if wildcard {
		flags |= flagWildcard
	}
	return flags
}

// mayHaveName reports whether the candidate may have its name. In the zones of the cluster, this is a Service, or an
// external host of which the control plane says by a namespace that it may have the name. A wildcard is below a zone.
func (c *candidate) mayHaveName(cl *Cluster) bool {
	zone := cl.zone(c.Name)
	if !c.wildcard() {
		return zone == wire.Root || c.Kubernetes() || c.info.namespace != ""
	}
	return zone == wire.Root || c.Name.Parent() != zone && c.info.namespace != ""
}

// localFlags returns flagLocal and flagDerived, as far as they apply to the candidate.
func (c *candidate) localFlags(cl *Cluster) hostFlags {
	info := &c.info
	if info.registry != registryKubernetes || c.Name == cl.Domain || !c.Name.Below(cl.Domain) {
		return 0
	}
	short, ok := c.Name.CutSuffix(cl.services)
	if !ok || len(short) != len(info.shortname)+len(info.namespace)+2 || info.shortname == "" || info.namespace == "" {
		return flagLocal
	}
	var buf [wire.MaxNameLen + 2]byte
	head := foldText(buf[:0], info.shortname)
	if head = foldText(head, info.namespace); wire.Name(head) != short {
		return flagLocal
	}
	return flagLocal | flagDerived
}

// compare orders candidates by their names, and candidates with the same name by precedence: the first one wins.
func (c *candidate) compare(other *candidate) int {
	if order := cmp.Compare(c.Name, other.Name); order != 0 {
		return order
	}
	return cmp.Or(
		// The registry Kubernetes wins.
		-cmp.Compare(c.flags&flagKubernetes, other.flags&flagKubernetes),
		cmp.Compare(c.info.key, other.info.key),
		// The same key can be in two NameTables of a push. The rest makes the result independent of the order in
		// which they arrive.
		bytes.Compare(c.V4, other.V4),
		bytes.Compare(c.V6, other.V6),
		slices.Compare(c.near[:], other.near[:]),
		cmp.Compare(c.info.registry, other.info.registry),
		cmp.Compare(c.info.namespace, other.info.namespace),
		cmp.Compare(c.info.shortname, other.info.shortname),
		cmp.Compare(c.alias, other.alias),
		cmp.Compare(c.flags, other.flags),
		bytes.Compare(c.ports, other.ports),
	)
}

// appendRecord appends the record of a candidate to dst. It leaves out the texts of the candidate if they can be
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

// foldText appends text to dst as a wire.Name. text should be a hostname without a trailing dot. For any other text,
// the result has no meaning.
func foldText(dst []byte, text string) []byte {
	label := len(dst) // offset of the label's length
	dst = append(append(dst, '.'), text...)
	for i := label + 1; i < len(dst); i++ {
		if dst[i] == '.' {
			dst[label] = byte(i - label - 1) //nolint:gosec // truncated if text is not a name
			label = i
		}
		dst[i] = wire.FoldByte(dst[i])
	}
	dst[label] = byte(len(dst) - label - 1) //nolint:gosec // the same
	return dst
}
