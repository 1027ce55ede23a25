package table

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"strings"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A candidate is a valid entry of a push. It becomes a host unless another candidate with the same name wins.
type candidate struct {
	Host
	key   string
	raw   []byte // the whole entry
	info  hostInfo
	alias wire.Name
	ports []byte // the encoded ports or, for an external host, the encoded destinations
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
	if !c.Kubernetes() || c.wildcard() || c.Name == cl.Domain || !c.Name.Below(cl.Domain) {
		return 0
	}
	head, ok := c.Name.CutSuffix(cl.services)
	service, namespace := c.info.shortname, c.info.namespace
	if ok && service != "" && namespace != "" && len(head) == len("..")+len(service)+len(namespace) &&
		c.key[len(service)] == '.' && strings.EqualFold(c.key[:len(service)], service) &&
		strings.EqualFold(c.key[len(service)+1:][:len(namespace)], namespace) {
		return flagLocal | flagDerived
	}
	return flagLocal
}

// compare orders candidates by their names, and candidates with the same name by precedence: the first one wins. The same
// key can be in two NameTables of a push. Then the bytes of the entries decide, and not the order in which they arrive.
func (c *candidate) compare(other *candidate) int {
	if order := cmp.Compare(c.Name, other.Name); order != 0 {
		return order
	}
	return cmp.Or(
		-cmp.Compare(c.flags&flagKubernetes, other.flags&flagKubernetes),
		cmp.Compare(c.key, other.key),
		bytes.Compare(c.raw, other.raw),
	)
}

// appendRecord appends the record of a candidate to dst. It leaves out the texts of the candidate if they can be
// derived.
func (c *candidate) appendRecord(dst []byte) []byte {
	h, info, flags := &c.Host, &c.info, c.flags
	if !h.derived() && *info != h.usualInfo() {
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
		for _, text := range [textFields]string{info.registry, info.shortname, info.namespace} {
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
