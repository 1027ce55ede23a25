package hosts

import (
	"net/netip"
	"strings"

	"github.com/nametap/nametap/discovery/object"
)

// clusterSetDomain is the domain of ServiceImports (KEP-1645).
const clusterSetDomain = "clusterset.local"

// importClaims returns the claims of a ServiceImport: its address or, if it is headless, its
// endpoints in all clusters. Each endpoint also has a name of its own: HOST.CLUSTER before the name
// of the ServiceImport. Endpoints that are not ready have none.
func (ix *index) importClaims(k object.Key, s *object.ServiceImport) []claim {
	c := claim{host: k.Name + "." + k.Namespace + ".svc." + clusterSetDomain, namespace: k.Namespace, shortname: k.Name, imported: true}
	if !s.Headless {
		c.addrs, c.ports = s.IPs, s.Ports
		return []claim{c}
	}
	c.endpoints = true
	claims := []claim{c}
	found := ix.imported[k.Namespace][k.Name]
	for _, name := range sortedKeys(found) {
		slice := found[name]
		for _, ep := range slice.Endpoints {
			if !ep.Ready {
				continue
			}
			claims[0].addEndpoint(&endpoint{ep, slice.Ports})
			if slice.Import.Cluster != "" {
				claims = append(claims, c.endpointsOf(ep, slice.Import.Cluster)...)
			}
		}
	}
	return claims
}

// endpointsOf returns the claims of an endpoint of an imported headless Service. One without a
// hostname has its address as its name.
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

// dashed returns the label of an address that agents and CoreDNS use: the address with dashes.
func dashed(a netip.Addr) string {
	label := strings.NewReplacer(".", "-", ":", "-").Replace(a.String())
	if strings.HasSuffix(label, "-") {
		label += "0"
	}
	return label
}
