package discovery

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// claim is what one object says about one host.
type claim struct {
	host      string // as its author wrote it
	namespace string // of the object
	shortname string // of a Service; empty for an external host
	exportTo  exportTo

	// addrs are cluster IPs and endpoints; a client gets those of its families. literal
	// are the addresses of a ServiceEntry; every client gets all of them, as from istiod.
	addrs   []netip.Addr
	literal []netip.Addr
	// wantsVIP marks an external host that gets an automatic VIP.
	wantsVIP bool
}

func (c claim) kubernetes() bool { return c.shortname != "" }

// hostKey returns the form of a host in which spellings that differ in case are equal.
func hostKey(host string) string { return strings.ToLower(host) }

// index holds Pods and EndpointSlices by the keys that they are looked up by.
type index struct {
	domain string
	pods   map[string]map[string]*pod            // namespace, name
	slices map[string]map[string][]endpointSlice // namespace, service
}

// buildClaims returns the claims of objects. The order of the objects does not matter for
// the tables.
func buildClaims(objects []object, domain string) []claim {
	ix := index{domain: domain, pods: map[string]map[string]*pod{}, slices: map[string]map[string][]endpointSlice{}}
	for _, o := range objects {
		switch {
		case o.pod != nil:
			innerMap(ix.pods, o.key.namespace)[o.key.name] = o.pod
		case o.slice != nil && o.slice.service != "":
			byService := innerMap(ix.slices, o.key.namespace)
			byService[o.slice.service] = append(byService[o.slice.service], *o.slice)
		}
	}
	var claims []claim
	services := map[string]bool{}
	for _, o := range objects {
		if o.service != nil {
			services[hostKey(ix.serviceHost(o.key))] = true
			claims = append(claims, ix.serviceClaims(o.key, o.service)...)
		}
	}
	for _, o := range objects {
		if o.entry != nil {
			claims = append(claims, entryClaims(o.key, o.entry)...)
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

func (ix *index) serviceHost(k key) string {
	return k.name + "." + k.namespace + ".svc." + ix.domain
}

func (ix *index) serviceClaims(k key, s *service) []claim {
	if s.externalName {
		return nil
	}
	c := claim{host: ix.serviceHost(k), namespace: k.namespace, shortname: k.name, exportTo: s.exportTo}
	if !s.headless {
		c.addrs = s.clusterIPs
		return []claim{c}
	}
	claims := []claim{c}
	for _, ep := range ix.endpoints(k, s) {
		if !ep.ready && !s.publishNotReady {
			continue
		}
		claims[0].addrs = append(claims[0].addrs, ep.addrs...)
		if ep.hostname != "" {
			one := c
			one.shortname = ep.hostname + "." + k.name
			one.host = ep.hostname + "." + c.host
			one.addrs = ep.addrs
			claims = append(claims, one)
		}
	}
	return claims
}

// endpoints returns the endpoints of a headless Service: those of its slices or, if it has
// no slices, the Pods that it selects.
func (ix *index) endpoints(k key, s *service) []endpoint {
	pods := ix.pods[k.namespace]
	var out []endpoint
	if found := ix.slices[k.namespace][k.name]; len(found) > 0 {
		for _, slice := range found {
			for _, ep := range slice.endpoints {
				if p := pods[ep.pod]; ep.hostname == "" && p != nil && p.subdomain == k.name {
					ep.hostname = p.hostname
				}
				out = append(out, ep)
			}
		}
		return out
	}
	if len(s.selector) == 0 {
		return nil
	}
	for _, name := range sortedKeys(pods) {
		p := pods[name]
		if p.terminated || !selects(s.selector, p.labels) {
			continue
		}
		ep := endpoint{addrs: p.addrs, ready: p.ready}
		if p.subdomain == k.name {
			ep.hostname = p.hostname
		}
		out = append(out, ep)
	}
	return out
}

func selects(selector, labels map[string]string) bool {
	for name, value := range selector {
		if got, ok := labels[name]; !ok || got != value {
			return false
		}
	}
	return true
}

// entryClaims returns the claims of a ServiceEntry. They do not include its endpoints,
// which are where a proxy sends connections to the host's address. A host without an
// address gets an automatic VIP. As in istiod, a wildcard gets one only with resolution
// DYNAMIC_DNS, because only then a proxy knows where to send the connection; with
// resolution NONE a proxy never knows.
func entryClaims(k key, e *serviceEntry) []claim {
	var claims []claim
	auto := !e.hasAddresses && !e.noVIP && e.resolution != resolutionNone
	for _, host := range e.hosts {
		claims = append(claims, claim{
			host: host, namespace: k.namespace, exportTo: e.exportTo, literal: e.addrs,
			wantsVIP: auto && (e.resolution == resolutionDynamic || !strings.HasPrefix(host, wildcardPrefix)),
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
