package discovery

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/nametap/nametap/discovery/object"
)

// claim is what one object says about one host.
type claim struct {
	host      string // as its author wrote it
	namespace string // of the object
	shortname string // of a Service; empty for an external host
	exportTo  object.ExportTo

	// addrs are cluster IPs and endpoints; a client gets those of its families. literal
	// are the addresses of a ServiceEntry; every client gets all of them, as from istiod.
	addrs   []netip.Addr
	literal []netip.Addr
	// wantsVIP marks an external host that gets an automatic VIP: one of vips, which a controller
	// has given to it, or without any a slot.
	wantsVIP bool
	vips     []netip.Addr
}

func (c claim) kubernetes() bool { return c.shortname != "" }

// owner returns the host that a Sidecar shows or hides: that of the Service for the pod of a
// headless Service, otherwise the host itself.
func (c claim) owner() string {
	if pod, _, found := strings.Cut(c.shortname, "."); found {
		return c.host[len(pod)+1:]
	}
	return c.host
}

// hostKey returns the form of a host in which spellings that differ in case are equal.
func hostKey(host string) string { return strings.ToLower(host) }

// index holds Pods and EndpointSlices by the keys that they are looked up by.
type index struct {
	domain string
	pods   map[string]map[string]*object.Pod            // namespace, name
	slices map[string]map[string][]object.EndpointSlice // namespace, service
}

// buildClaims returns the claims of objects. The order of the objects does not matter for
// the tables.
func buildClaims(objects []object.Object, domain string) []claim {
	ix := index{domain: domain, pods: map[string]map[string]*object.Pod{}, slices: map[string]map[string][]object.EndpointSlice{}}
	for _, o := range objects {
		switch {
		case o.Pod != nil:
			innerMap(ix.pods, o.Key.Namespace)[o.Key.Name] = o.Pod
		case o.Slice != nil && o.Slice.Service != "":
			byService := innerMap(ix.slices, o.Key.Namespace)
			byService[o.Slice.Service] = append(byService[o.Slice.Service], *o.Slice)
		}
	}
	var claims []claim
	services := map[string]bool{}
	for _, o := range objects {
		if o.Service != nil {
			services[hostKey(ix.serviceHost(o.Key))] = true
			claims = append(claims, ix.serviceClaims(o.Key, o.Service)...)
		}
	}
	for _, o := range objects {
		if o.Entry != nil {
			claims = append(claims, entryClaims(o.Key, o.Entry)...)
		}
	}
	dropNeedlessVIPs(claims, services)
	return claims
}

// dropNeedlessVIPs clears wantsVIP for hosts that have an address from another object, or
// that are Services.
func dropNeedlessVIPs(claims []claim, services map[string]bool) {
	addressed := map[string]bool{}
	for _, c := range claims {
		if len(c.addrs)+len(c.literal) > 0 {
			addressed[hostKey(c.host)] = true
		}
	}
	for i := range claims {
		k := hostKey(claims[i].host)
		claims[i].wantsVIP = claims[i].wantsVIP && !addressed[k] && !services[k]
	}
}

func (ix *index) serviceHost(k object.Key) string {
	return k.Name + "." + k.Namespace + ".svc." + ix.domain
}

func (ix *index) serviceClaims(k object.Key, s *object.Service) []claim {
	if s.ExternalName {
		return nil
	}
	c := claim{host: ix.serviceHost(k), namespace: k.Namespace, shortname: k.Name, exportTo: s.ExportTo}
	if !s.Headless {
		c.addrs = s.ClusterIPs
		return []claim{c}
	}
	claims := []claim{c}
	for _, ep := range ix.endpoints(k, s) {
		if !ep.Ready && !s.PublishNotReady {
			continue
		}
		claims[0].addrs = append(claims[0].addrs, ep.Addrs...)
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

// endpoints returns the endpoints of a headless Service: those of its slices or, if it has
// no slices, the Pods that it selects.
func (ix *index) endpoints(k object.Key, s *object.Service) []object.Endpoint {
	pods := ix.pods[k.Namespace]
	var out []object.Endpoint
	if found := ix.slices[k.Namespace][k.Name]; len(found) > 0 {
		for _, slice := range found {
			for _, ep := range slice.Endpoints {
				if p := pods[ep.Pod]; ep.Hostname == "" && p != nil && p.Subdomain == k.Name {
					ep.Hostname = p.Hostname
				}
				out = append(out, ep)
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
		ep := object.Endpoint{Addrs: p.Addrs, Ready: p.Ready}
		if p.Subdomain == k.Name {
			ep.Hostname = p.Hostname
		}
		out = append(out, ep)
	}
	return out
}

// entryClaims returns the claims of a ServiceEntry. They do not include its endpoints,
// which are where a proxy sends connections to the host's address. A host without an
// address gets an automatic VIP. As in istiod, a wildcard gets one only with resolution
// DYNAMIC_DNS, because only then a proxy knows where to send the connection; with
// resolution NONE a proxy never knows.
func entryClaims(k object.Key, e *object.ServiceEntry) []claim {
	var claims []claim
	auto := !e.HasAddresses && !e.NoVIP && e.Resolution != object.ResolutionNone
	for _, host := range e.Hosts {
		claims = append(claims, claim{
			host: host, namespace: k.Namespace, exportTo: e.ExportTo, literal: e.Addrs, vips: e.VIPs[host],
			wantsVIP: auto && (e.Resolution == object.ResolutionDynamic || !object.IsWildcard(host)),
		})
	}
	return claims
}

// innerMap returns the inner map of a key, and creates it if it does not exist.
func innerMap[V any](m map[string]map[string]V, k string) map[string]V {
	if m[k] == nil {
		m[k] = map[string]V{}
	}
	return m[k]
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
