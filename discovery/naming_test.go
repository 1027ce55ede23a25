package discovery

import (
	"maps"
	"slices"
	"strings"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/nametap/nametap/api"
)

// A naming client takes tables as resources with names, as nametap's agent does.
type naming struct {
	client
	t        *testing.T
	versions map[string]string // of its resources, by name
	tables   map[string]*api.NameTable
}

// openNaming opens a stream of a client that has the table of before, unless that is nil.
func openNaming(t *testing.T, r running, before *naming) *naming {
	t.Helper()
	c := &naming{t: t, versions: map[string]string{}, tables: map[string]*api.NameTable{}}
	if before != nil {
		c.versions, c.tables = maps.Clone(before.versions), maps.Clone(before.tables)
	}
	n := node(t, "shop")
	n.ClientFeatures = []string{"nametap.named-tables"}
	c.client = openDelta(t, r, n, c.versions)
	return c
}

// take waits for a push, and applies it. It returns the hosts that are new or have changed, and those that were removed,
// without the domain of Services.
func (c *naming) take() (changed, removed string) {
	c.t.Helper()
	before := c.hosts()
	p := c.next()
	for _, r := range p.raw.(*discoveryv3.DeltaDiscoveryResponse).GetResources() {
		c.versions[r.GetName()], c.tables[r.GetName()] = r.GetVersion(), p.tables[r.GetName()]
	}
	for _, name := range p.removed {
		delete(c.versions, name)
		delete(c.tables, name)
	}
	var names, without []string
	after := c.hosts()
	for host, entry := range after {
		if before[host] != entry {
			names = append(names, strings.TrimSuffix(host, ".shop.svc.cluster.local"))
		}
	}
	for host := range before {
		if after[host] == "" {
			without = append(without, strings.TrimSuffix(host, ".shop.svc.cluster.local"))
		}
	}
	slices.Sort(names)
	return strings.Join(names, " "), strings.Join(without, " ")
}

// hosts returns the hosts that the client has, each as text.
func (c *naming) hosts() map[string]string {
	c.t.Helper()
	all := map[string]string{}
	for host, info := range merged(c.t, c.tables).GetTable() {
		all[host] = bytesOf(c.t, info)
	}
	return all
}

// has reports whether a Service of namespace shop has an address.
func (c *naming) has(name, ip string) bool {
	return strings.Contains(c.hosts()[name+".shop.svc.cluster.local"], ip)
}

// want takes a push, and checks what it has changed and removed.
func (c *naming) want(changed, removed string) {
	c.t.Helper()
	if gotChanged, gotRemoved := c.take(); gotChanged != changed || gotRemoved != removed {
		c.t.Errorf("changed %q, removed %q; want %q and %q", gotChanged, gotRemoved, changed, removed)
	}
}
