package hosts

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/discovery/object"
)

// A claim has what one object says about one host.
type claim struct {
	host      string // the host's name, as the author of the object wrote it
	namespace string // of the object
	shortname string // of a Service; empty for an external host
	exportTo  object.ExportTo
	ports     []uint16 // that clients connect to, for [object.Egress.Shows]
	created   int64    // when the ServiceEntry was created, in Unix time

	// addrs are cluster IPs, or addresses of endpoints; a client gets the addresses of its
	// families. literal are the addresses of a ServiceEntry; as with istiod, every client gets all
	// of them.
	addrs   []netip.Addr
	literal []netip.Addr
	// wantsVIP is true for an external host that gets automatic VIPs. If a controller has given VIPs to the host, they are
	// in the field vips, and count instead of those of [automaticVIPs].
	vips     []netip.Addr
	wantsVIP bool
	// destinations are where connections to the VIP lead; none if the ports are not known.
	destinations object.Destinations

	// endpoints is true if addrs belong to endpoints, not to a Service; clusterOnly is true if
	// only clients of the object's cluster get addrs.
	endpoints, clusterOnly bool
	imported               bool // of a ServiceImport
	private, hidden        bool // only the namespace of the claim sees it: see [Hosts.admit], and usage
	dropped                bool // nobody sees it: see usage
	cluster                clusterID

	// alias is the externalName of a Service of type ExternalName: the name of the host whose
	// addresses this host has.
	alias string

	// services are the ports in SRV records. If the endpoints of a headless Service have different ports,
	// mixed has the ports of each address in addrs instead.
	services object.Ports
	mixed    *[]object.Ports
}

// kubernetes reports whether the claim is from a Service or a ServiceImport.
func (c *claim) kubernetes() bool { return c.shortname != "" }

// pod reports whether the host is a pod of a headless Service: its short name is POD.SERVICE.
func (c *claim) pod() bool { return strings.Contains(c.shortname, ".") }

// addressed reports whether the object itself gives the host an address.
func (c *claim) addressed() bool { return len(c.addrs)+len(c.literal) > 0 }

// size returns how many bytes a claim to the host needs in a table, at most. If some addresses of a host lack a port, the
// table has the addresses of each port. If merged is true, the namespace has other claims to the host: addresses may lack
// ports, and the host may be an endpoint of its destinations. The size does not depend on other namespaces.
func (h *Host) size(c *claim, merged bool) int {
	const registry, service, vip, endpoint, longest = 10, 13, 48, 9, 41
	n := registry + c.services.Size() + c.destinations.Size() + sizeOf(c.addrs) + sizeOf(c.literal) + sizeOf(c.vips)
	if merged {
		n += c.services.Len()*sizeOf(c.addrs) + len(c.destinations.List())*(endpoint+len(c.host))
	}
	for i, ports := range c.mixedPorts() {
		n += ports.Size() + ports.Len()*sizeOf(c.addrs[i:i+1])
	}
	if c.alias != "" {
		n += 3 + len(c.alias) + maxLent*longest
	}
	if c.kubernetes() {
		n += service + len(c.shortname) + len(c.namespace)
	} else if h.reserved {
		n += 2 + len(c.namespace)
	}
	if c.wantsVIP && len(c.vips) == 0 {
		n += vip
	}
	return 1 + protowire.SizeBytes(2+protowire.SizeBytes(len(c.host))+protowire.SizeBytes(n))
}

// sizeOf returns how many bytes addresses have in a table.
func sizeOf(addrs []netip.Addr) (n int) {
	var text [64]byte
	for _, a := range addrs {
		n += 2 + len(a.AppendTo(text[:0]))
	}
	return n
}

// owner returns the host that a Sidecar must show so that the claim is visible. For the pod of a
// headless Service, it is the Service's host; otherwise it is the host itself.
func (c *claim) owner() string { return c.host[strings.LastIndexByte(c.shortname, '.')+1:] }

// equal reports whether two claims say the same.
func (c *claim) equal(other *claim) bool {
	return c.host == other.host && c.namespace == other.namespace && c.shortname == other.shortname &&
		c.endpoints == other.endpoints && c.clusterOnly == other.clusterOnly && c.imported == other.imported &&
		c.alias == other.alias && c.wantsVIP == other.wantsVIP && c.exportTo.Equal(other.exportTo) && slices.Equal(c.addrs, other.addrs) &&
		slices.Equal(c.literal, other.literal) && slices.Equal(c.vips, other.vips) && slices.Equal(c.ports, other.ports) &&
		c.created == other.created && c.services == other.services && c.destinations == other.destinations && slices.Equal(c.mixedPorts(), other.mixedPorts())
}

// mixedPorts returns the ports of each address in addrs if they differ, otherwise nil.
func (c *claim) mixedPorts() []object.Ports {
	if c.mixed == nil {
		return nil
	}
	return *c.mixed
}

// addEndpoint adds the addresses and the ports of an endpoint to c, the claim of its Service.
func (c *claim) addEndpoint(ep *headlessEndpoint) {
	switch {
	case c.mixed != nil:
	case len(c.addrs) == 0:
		c.services = ep.ports
	case c.services != ep.ports:
		mixed := slices.Repeat([]object.Ports{c.services}, len(c.addrs))
		c.services, c.mixed = object.Ports{}, &mixed
	}
	c.addrs = append(c.addrs, ep.Addrs...)
	if c.mixed != nil {
		*c.mixed = append(*c.mixed, slices.Repeat([]object.Ports{ep.ports}, len(ep.Addrs))...)
	}
}

// endpointsOf returns the claims for an endpoint of an imported headless Service. An endpoint without
// a hostname has a name for each of its addresses.
func (c *claim) endpointsOf(ep object.Endpoint, cluster string) []claim {
	named := func(hostname string, addrs []netip.Addr) claim {
		one := *c
		label := hostname + "." + cluster + "."
		one.host, one.shortname, one.addrs = label+c.host, label+c.shortname, addrs
		return one
	}
	if ep.Hostname != "" {
		return []claim{named(ep.Hostname, ep.Addrs)}
	}
	var claims []claim
	for i := range ep.Addrs {
		if label := dashed(ep.Addrs[i]); object.IsLabel(label) {
			claims = append(claims, named(label, ep.Addrs[i:i+1:i+1]))
		}
	}
	return claims
}

// dashed returns the label that agents and CoreDNS use for an address, for example 10-1-2-3 for 10.1.2.3.
func dashed(a netip.Addr) string {
	label := strings.NewReplacer(".", "-", ":", "-").Replace(a.String())
	if strings.HasSuffix(label, "-") {
		label += "0"
	}
	return label
}

// hostKey returns the key of a host: its name in lower case.
func hostKey(host string) string { return strings.ToLower(host) }

// clusterID is the number of a cluster.
type clusterID uint16

// ownCluster is the number of the control plane's own cluster, whose name is empty.
const ownCluster clusterID = 0

// claims returns the claims of an object.
func (cl *cluster) claims(o object.Object) []claim {
	var claims []claim
	switch {
	case o.Service != nil:
		claims = cl.serviceClaims(o.Key, o.Service)
	case o.Entry != nil:
		claims = cl.entryClaims(o.Key, o.Entry)
	case o.Import != nil:
		claims = cl.importClaims(o.Key, o.Import)
		// The name of a ServiceImport may be too long for a host.
		claims = slices.DeleteFunc(claims, func(c claim) bool { return !object.IsHost(c.host) })
	}
	for i := range claims {
		claims[i].cluster = cl.id
	}
	return claims
}

func (cl *cluster) serviceClaims(k object.Key, s *object.Service) []claim {
	c := claim{host: k.Name + "." + k.Namespace + ".svc." + cl.domain, namespace: k.Namespace, shortname: k.Name, exportTo: s.ExportTo, ports: s.Numbers}
	switch {
	case s.ExternalName != "":
		c.alias = s.ExternalName
		return []claim{c}
	case !s.Headless:
		c.addrs, c.services = s.ClusterIPs, s.Ports
		return []claim{c}
	}
	c.endpoints, c.clusterOnly = true, s.ClusterOnly
	claims := []claim{c}
	for _, ep := range cl.endpoints(k, s) {
		if !ep.Ready && !s.PublishNotReady {
			continue
		}
		claims[0].addEndpoint(&ep)
		if ep.Hostname != "" {
			one := c
			one.shortname = ep.Hostname + "." + k.Name
			one.host = ep.Hostname + "." + c.host
			one.addrs = ep.Addrs
			claims = append(claims, one)
		}
	}
	return claims
}

// endpoints returns the endpoints of a headless Service, from its slices or, if it has no
// slices, from the Pods that it selects.
func (cl *cluster) endpoints(k object.Key, s *object.Service) []headlessEndpoint {
	pods := cl.pods[k.Namespace]
	var out []headlessEndpoint
	if found := cl.slices[k]; len(found) > 0 {
		for _, name := range sortedKeys(found) {
			for _, ep := range found[name].Endpoints {
				if p := pods[ep.Pod]; ep.Hostname == "" && p != nil && p.Subdomain == k.Name {
					ep.Hostname = p.Hostname
				}
				out = append(out, headlessEndpoint{ep, found[name].Ports})
			}
		}
		return out
	}
	if len(s.Selector) == 0 {
		return nil
	}
	for _, name := range sortedKeys(pods) {
		p := pods[name]
		if p.Terminated || !object.Selects(s.Selector, p.Labels) {
			continue
		}
		ep := headlessEndpoint{object.Endpoint{Addrs: p.Addrs, Ready: p.Ready}, s.Ports}
		if p.Subdomain == k.Name {
			ep.Hostname = p.Hostname
		}
		out = append(out, ep)
	}
	return out
}

// A headlessEndpoint is an endpoint of a headless Service, with its ports.
type headlessEndpoint struct {
	object.Endpoint
	ports object.Ports
}

// importClaims returns the claims of a ServiceImport: its address or, if it is headless, its
// endpoints in all clusters. Each endpoint also has a name of its own: HOST.CLUSTER followed by the
// name of the ServiceImport. Endpoints that are not ready are left out.
func (cl *cluster) importClaims(k object.Key, s *object.ServiceImport) []claim {
	c := claim{host: object.ImportHost(k), namespace: k.Namespace, shortname: k.Name, imported: true, ports: s.Numbers}
	if !s.Headless {
		c.addrs, c.services = s.IPs, s.Ports
		return []claim{c}
	}
	c.endpoints = true
	claims := []claim{c}
	found := cl.slices[k]
	for _, name := range sortedKeys(found) {
		slice := found[name]
		for _, ep := range slice.Endpoints {
			if !ep.Ready {
				continue
			}
			claims[0].addEndpoint(&headlessEndpoint{ep, slice.Ports})
			if slice.Cluster != "" {
				claims = append(claims, c.endpointsOf(ep, slice.Cluster)...)
			}
		}
	}
	return claims
}

// entryClaims returns the claims of a ServiceEntry. The endpoints of a ServiceEntry are not
// addresses of its hosts: connections to the hosts' addresses lead to the endpoints. A host without
// an address gets an automatic VIP. As in istiod, a wildcard gets a VIP only with resolution DYNAMIC_DNS: with
// other resolutions, a proxy does not know where to send the connection. With resolution NONE, a proxy never knows,
// so no host gets a VIP, and the addresses of the Pods that the ServiceEntry selects are those of its hosts.
func (cl *cluster) entryClaims(k object.Key, e *object.ServiceEntry) []claim {
	var claims []claim
	auto, addrs := !e.HasAddresses && !e.NoVIP && e.Resolution != object.ResolutionNone, e.Addrs
	if !e.HasAddresses && len(e.Selector) > 0 && len(e.Numbers) > 0 {
		for _, p := range cl.pods[k.Namespace] {
			if p.Ready && !p.Terminated && object.Selects(e.Selector, p.Labels) {
				addrs = append(addrs, p.Addrs...)
			}
		}
		addrs = sorted(addrs)
	}
	for _, host := range e.Hosts {
		c := claim{
			host: host, namespace: k.Namespace, exportTo: e.ExportTo, ports: e.Numbers, created: e.Created.Unix(), literal: addrs, vips: e.VIPs[host],
			wantsVIP: auto && (e.Resolution == object.ResolutionDynamic || !object.IsWildcard(host)),
		}
		if c.wantsVIP {
			c.destinations = e.Destinations
		}
		claims = append(claims, c)
	}
	return claims
}

// setInner sets a key of an inner map, and makes the inner map if there is none. The zero value removes the key, and the
// inner map when it is empty.
func setInner[O, K, V comparable](m map[O]map[K]V, outer O, inner K, v V) {
	if v != *new(V) {
		if m[outer] == nil {
			m[outer] = map[K]V{}
		}
		m[outer][inner] = v
		return
	}
	if delete(m[outer], inner); len(m[outer]) == 0 {
		delete(m, outer)
	}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// A listed has values by the key of a host. Any tenant can make many of them, so they are listed only after a change. The
// zero value is empty.
type listed[V any] struct {
	byKey map[string][]V
	list  []V // in the order of the keys; nil if byKey has changed
}

// set sets the values of a key; none removes it.
func (l *listed[V]) set(key string, values ...V) {
	if len(values)+len(l.byKey[key]) == 0 {
		return
	}
	if l.byKey == nil {
		l.byKey = map[string][]V{}
	}
	if l.byKey[key], l.list = values, nil; len(values) == 0 {
		delete(l.byKey, key)
	}
}

// all returns the values in the order of their keys. It returns the same slice until the values change. The caller must
// not change the slice.
func (l *listed[V]) all() []V {
	if l.list == nil {
		l.list = []V{}
		for _, key := range sortedKeys(l.byKey) {
			l.list = append(l.list, l.byKey[key]...)
		}
	}
	return l.list
}
