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
//   - if flagTexts is set, the key, the registry, the short name and the namespace, as fields;
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

// A hostInfo has the texts that a control plane sends about a host, besides its addresses.
type hostInfo struct {
	key                            string
	registry, shortname, namespace string
}

// registryKubernetes is the NameInfo.registry of a Service. registryExternal is the
// NameInfo.registry of a ServiceEntry's host.
const (
	registryKubernetes = "Kubernetes"
	registryExternal   = "External"
)

// Key returns the key under which the control plane sent the host. c is the cluster of the host's
// table.
func (h *Host) Key(c *Cluster) string { return h.info(c).key }

// info returns the texts of a host; c is the cluster of its table.
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

// isUsual reports whether info equals the result of usualInfo, without building that result.
func (h *Host) isUsual(info *hostInfo) bool {
	if len(info.key) != len(h.Name)-1 {
		return false
	}
	start := 0
	for n := h.Name; n != wire.Root; n = n.Parent() {
		label := n.FirstLabel()
		if info.key[start:start+len(label)] != label || start > 0 && info.key[start-1] != '.' {
			return false
		}
		start += len(label) + 1
	}
	switch {
	case !h.Kubernetes():
		return info.registry == registryExternal && info.shortname == "" && info.namespace == ""
	case !h.derived():
		return info.shortname == "" && info.namespace == ""
	}
	// The short name and the namespace may differ from the first labels of the key only in case: see localFlags.
	short := len(info.shortname)
	return strings.HasPrefix(info.key, info.shortname) && strings.HasPrefix(info.key[short+1:], info.namespace)
}

// textFields is the number of a record's fields that flagTexts stands for.
const textFields = 4

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
	return h.aliasField()
}

func (h *Host) aliasField() wire.Name {
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

// hasDestinations reports whether the ports of an external host are known.
func (h *Host) hasDestinations() bool { return h.flags&flagPorts != 0 && !h.Kubernetes() }

// Destinations yields where connections to an external host go, one Destination for each port of
// the host. It yields none if the ports are not known.
func (h *Host) Destinations(yield func(Destination) bool) {
	if h.hasDestinations() {
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
