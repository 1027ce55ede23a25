package discovery

import (
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// claim is what one object says of one host.
type claim struct {
	host      string // as its author wrote it
	namespace string // the owner's
	shortname string // only of Kubernetes' own; empty marks an external host
	exportTo  exportTo

	// addrs are cluster IPs and endpoints: a client gets those of its
	// families. literal are addresses that a person wrote into a ServiceEntry:
	// every client gets them all, as from istiod.
	addrs   []netip.Addr
	literal []netip.Addr
	// wantsVIP marks an external host that shall have an automatic address.
	wantsVIP bool
}

func (c claim) kubernetes() bool { return c.shortname != "" }

// hostKey is what makes two spellings of a host one.
func hostKey(host string) string { return strings.ToLower(host) }

// index gives the builder the objects by what they are looked up by.
type index struct {
	domain string
	pods   map[string]map[string]*pod            // namespace, name
	slices map[string]map[string][]endpointSlice // namespace, service
}

// buildClaims says which hosts the objects make. It depends on the objects
// only, not on their order.
func buildClaims(objects []object, domain string) []claim {
	ix := index{domain: domain, pods: map[string]map[string]*pod{}, slices: map[string]map[string][]endpointSlice{}}
	for _, o := range objects {
		switch {
		case o.pod != nil:
			put(ix.pods, o.key.namespace)[o.key.name] = o.pod
		case o.slice != nil && o.slice.service != "":
			byService := put(ix.slices, o.key.namespace)
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
	settleVIPs(claims, services)
	return claims
}

// settleVIPs takes the wish for an automatic address from hosts that have an
// address by another object, or that are Services.
func settleVIPs(claims []claim, services map[string]bool) {
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

// endpoints gives the endpoints of a headless Service: from its slices, or, if
// it has none, from the Pods that it selects.
func (ix *index) endpoints(k key, s *service) []endpoint {
	pods := ix.pods[k.namespace]
	var out []endpoint
	if own := ix.slices[k.namespace][k.name]; len(own) > 0 {
		for _, slice := range own {
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
		if p.gone || !selects(s.selector, p.labels) {
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

// entryClaims says what a ServiceEntry makes. Its endpoints are not answered:
// they are where a proxy sends what reaches the host's address, and without an
// address the host gets an automatic one. As in istiod a wildcard gets one
// only if its resolution is DYNAMIC_DNS, since only then a proxy knows where
// to send a connection to it; with NONE it never does.
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

// put returns the inner map of a key, made if need be.
func put[V any](m map[string]map[string]V, k string) map[string]V {
	if m[k] == nil {
		m[k] = map[string]V{}
	}
	return m[k]
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func mapKeys[K comparable, V any](m map[K]V) iter.Seq[K] { return maps.Keys(m) }
