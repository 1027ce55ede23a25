package table

import (
	"encoding/binary"
	"strings"
	"unsafe"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Host is one entry of a table. It refers to the memory of the host's record, so it is valid only as long as the
// table is. It must not be changed.
//
// A record consists of these parts:
//   - the flags, one byte;
//   - the length of the name, one byte, and the name;
//   - twice the number of IPv4 addresses, plus 1 if there are near addresses (see addresses), as a varint;
//   - the number of IPv6 addresses, as a varint;
//   - if there are near addresses, how many IPv4 and how many IPv6 addresses are near, as two varints;
//   - the IPv4 addresses, and the IPv6 addresses;
//   - if flagTexts is set, the registry, the short name and the namespace, as fields;
//   - if flagAlias is set, the alias, as a field;
//   - if flagPorts is set, the ports or, for an external host, the destinations, as one field.
//
// A field is its length as a varint, followed by its content.
type Host struct {
	flags hostFlags
	Name  wire.Name // the name of a wildcard begins with wire.WildcardLabel
	addresses
	fields []byte
}

// hostFlags describe a host.
type hostFlags uint8

// The flags of a host.
const (
	flagKubernetes hostFlags = 1 << iota // it is of the registry Kubernetes
	flagWildcard                         // it is a wildcard
	flagLocal                            // it is a Service below the cluster domain, so it has short names
	flagDerived                          // its short names can be derived from its FQDN
	flagTexts                            // the texts of its hostInfo are stored, because they cannot be derived
	flagAlias                            // it is an alias of another host
	flagHeadless                         // it is a headless Service: its addresses are the addresses of endpoints
	flagPorts                            // its ports or destinations are stored
)

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

// Kubernetes reports whether the host is a Service: whether it comes from the registry Kubernetes.
func (h *Host) Kubernetes() bool { return h.flags&flagKubernetes != 0 }
func (h *Host) wildcard() bool   { return h.flags&flagWildcard != 0 }
func (h *Host) derived() bool    { return h.flags&flagDerived != 0 }
func (h *Host) headless() bool   { return h.flags&flagHeadless != 0 }
func (h *Host) isAlias() bool    { return h.flags&flagAlias != 0 }

// A hostInfo has the texts that a control plane sends about a host, besides its name and addresses.
type hostInfo struct{ registry, shortname, namespace string }

// registryKubernetes is the NameInfo.registry of a Service. registryExternal is the
// NameInfo.registry of a ServiceEntry's host.
const (
	registryKubernetes = "Kubernetes"
	registryExternal   = "External"
)

// Key returns the name as a control plane writes it, in lower case.
func (h *Host) Key() string { return strings.TrimSuffix(h.Name.String(), ".") }

// info returns the texts of a host; c is the cluster of its table.
func (h *Host) info(c *Cluster) hostInfo {
	switch {
	case h.derived():
		short, _ := h.Name.CutSuffix(c.services)
		dotted := strings.TrimSuffix(short.String(), ".")
		last := strings.LastIndexByte(dotted, '.')
		return hostInfo{registryKubernetes, dotted[:last], dotted[last+1:]}
	case h.flags&flagTexts == 0:
		return h.usualInfo()
	}
	var texts [textFields]string
	b := h.fields
	for i := range texts {
		var text []byte
		text, b = cutField(b)
		texts[i] = string(text)
	}
	return hostInfo{texts[0], texts[1], texts[2]}
}

// usualInfo returns the texts of a host without flagDerived and flagTexts.
func (h *Host) usualInfo() hostInfo {
	if h.Kubernetes() {
		return hostInfo{registry: registryKubernetes}
	}
	return hostInfo{registry: registryExternal}
}

// textFields is the number of a record's fields that flagTexts stands for.
const textFields = 3

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

// Alias returns the name of the host of which h is an alias. h then has the addresses of that host. Alias returns the
// root if h is no alias.
func (h *Host) Alias() wire.Name {
	if !h.isAlias() {
		return wire.Root
	}
	alias, _ := cutField(h.afterTexts())
	return wire.Name(viewString(alias))
}

// hasPorts reports whether the ports of a Service are known.
func (h *Host) hasPorts() bool { return h.flags&flagPorts != 0 && h.Kubernetes() }

// ports yields the ports of a Service.
func (h *Host) ports(yield func(port) bool) {
	if h.hasPorts() {
		field, _ := cutField(h.afterTexts()) // an alias has no ports
		eachPort(field, &h.addresses, yield)
	}
}

// Destinations yields where connections to an external host go, one Destination for each port of
// the host. It yields none if the ports are not known.
func (h *Host) Destinations(yield func(Destination) bool) {
	if h.flags&flagPorts != 0 && !h.Kubernetes() {
		field, _ := cutField(h.afterTexts()) // an alias has none
		eachDestination(field, yield)
	}
}

// mayBePod reports whether the host may be a pod of a headless Service. Below svc.cluster.local, a pod's name has
// more labels than a Service's name.
func (h *Host) mayBePod(c *Cluster) bool {
	if !h.Kubernetes() || h.headless() || h.isAlias() || h.wildcard() {
		return false
	}
	head, local := h.Name.CutSuffix(c.services)
	return !local || head.Parent() != wire.Root && head.Parent().Parent() != wire.Root
}

// podOf reports whether the host is a pod of the headless Service whose name is service.
func (h *Host) podOf(service wire.Name) bool {
	parent, grandparent := h.servicesOfPod()
	return h.Kubernetes() && !h.headless() && (parent == service || grandparent == service && grandparent != wire.Root)
}

// servicesOfPod returns the names of the two Services that the host may be a pod of. If the host's name is
// HOST.SERVICE, the Service is parent. If the host's name is HOST.CLUSTER.SERVICE, as for a ServiceImport, the Service
// is grandparent. Pods below the cluster domain have no names of the second form; for them, grandparent is the root.
func (h *Host) servicesOfPod() (parent, grandparent wire.Name) {
	if parent = h.Name.Parent(); parent != wire.Root && h.flags&flagLocal == 0 {
		grandparent = parent.Parent()
	}
	return parent, grandparent
}

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

// viewString returns b as a string without a copy. b must not change while the string is
// in use.
func viewString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
