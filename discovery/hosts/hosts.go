package hosts

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/nametap/nametap/discovery/object"
)

// Hosts holds all hosts of the mesh. Make one with [New].
type Hosts struct {
	// Scene is the current scene. An update replaces it.
	*Scene
	domain   string
	clusters []*cluster     // by number; nil for a number that is free
	remote   int            // number of clusters other than the own one
	kinds    map[string]int // number of objects that count, by kind
	sidecars sidecars
	mesh     mesh
	byHost   map[string][]claimOf       // the claims by hostKey
	hosts    map[string]*Host           // by hostKey
	aliases  map[string]map[string]bool // hosts that are aliases, by the hostKey of their target
	problems listed[object.Error]       // what is wrong with hosts
	usage    *usage                     // what namespaces take in the tables of other namespaces
	vipKey   string                     // of automatic VIPs, see [object.Cluster]; empty without an API server
	listed   int                        // number of hosts that are in the table of some client
}

// claimOf is a claim and the object that makes it.
type claimOf struct {
	*claim
	object object.Key
}

// New returns Hosts without hosts. sources is the number of sources of the own cluster.
func New(clusterDomain string, sources int) *Hosts {
	h := &Hosts{
		domain: strings.ToLower(clusterDomain), clusters: []*cluster{newCluster("", ownCluster, clusterDomain, sources)},
		kinds: map[string]int{}, sidecars: sidecars{map[string]map[object.Key]*sidecar{}, namespaceSidecars{}}, mesh: newMesh(object.Mesh{RootNamespace: object.DefaultRootNamespace}),
		byHost: map[string][]claimOf{}, hosts: map[string]*Host{}, aliases: map[string]map[string]bool{},
		usage: &usage{maxShown: MaxShown, maxOwn: MaxOwn, namespaces: map[string]*taken{}},
	}
	h.Scene = h.newScene()
	return h
}

// SetDefaults sets the settings of the mesh that are used unless an object sets them. Call it before the first Update.
func (h *Hosts) SetDefaults(defaults object.Mesh) {
	h.mesh = newMesh(defaults)
	h.Scene = h.newScene()
}

// An Update has the effects of changed objects.
type Update struct {
	Hosts []HostChange // sorted by key
	// Views is true if a setting of the mesh, the clusters or a cluster's network have changed,
	// so a client may have another view, and a view may show other hosts.
	Views bool
	// Sidecars are the namespaces of Sidecars that have changed. Clients in these namespaces may have
	// another view; if the root namespace is among them, all clients may have another view.
	Sidecars map[string]bool
	// Problems are hosts of objects that are left out now, with the reasons, sorted by host: hosts of ServiceEntries whose
	// names belong to Services, and aliases of themselves. It is the same slice as in the update before if they have not
	// changed.
	Problems []object.Error
	// Hidden are the namespaces whose hosts are hidden now because of [MaxShown] or [MaxOwn]; sorted. It is the same slice
	// as in the update before if they have not changed.
	Hidden []Hidden
}

// updating is an update that is being made.
type updating struct {
	Update
	owners map[objectID]bool // the objects whose claims may change
}

// Update applies changes of sources, all at once. The order of the changes does not matter for the
// result.
func (h *Hosts) Update(changes ...Change) Update {
	u := updating{Update{Sidecars: map[string]bool{}}, map[objectID]bool{}}
	settings, key := h.mesh.Mesh, h.vipKey
	var dropped []clusterID
	for _, c := range changes {
		id, added := h.clusterOf(c.Cluster)
		u.Views = u.Views || added
		dropped = slices.DeleteFunc(dropped, func(earlier clusterID) bool { return earlier == id })
		if c.Dropped {
			dropped = append(dropped, id)
			c.Removed = slices.Collect(maps.Keys(h.clusters[id].sources[0]))
		}
		for _, o := range c.Updated {
			old, current := h.clusters[id].put(c.Source, o.Key, &o)
			h.exchange(id, old, current, &u)
		}
		for _, key := range c.Removed {
			old, current := h.clusters[id].put(c.Source, key, nil)
			h.exchange(id, old, current, &u)
		}
	}
	changed := h.renewClaims(u.owners)
	// The old root namespace loses hosts, and other hosts may be shown to other namespaces. All hosts have other VIPs with
	// another key.
	if !h.mesh.Equal(settings) || h.vipKey != key {
		for key := range h.byHost {
			changed[key] = true
		}
	}
	for _, id := range dropped { // without objects now
		h.clusters[id] = nil
		h.remote--
		u.Views = true
	}
	u.Hosts = h.renewAll(changed)
	for _, c := range u.Hosts {
		h.listed += c.New.listed() - c.Old.listed()
	}
	h.sidecars.settle(u.Sidecars)
	if u.Views || len(u.Sidecars) > 0 {
		h.Scene = h.newScene()
	}
	u.Problems, u.Hidden = h.problems.all(), h.usage.hidden.all()
	return u.Update
}

// exchange replaces the old content of an object of a cluster by its current content. The zero Object stands for no
// object. exchange adds to u the objects whose claims may change, and sets u.Views and u.Sidecars if views may change.
func (h *Hosts) exchange(id clusterID, old, current object.Object, u *updating) {
	none := object.Object{}
	if old == current {
		return
	}
	c := h.clusters[id]
	if kind := old.Key.Kind; old != none {
		if h.kinds[kind]--; h.kinds[kind] == 0 {
			delete(h.kinds, kind)
		}
		c.note(old, none)
	}
	if current != none {
		h.kinds[current.Key.Kind]++
		c.note(current, current)
	}
	for _, changed := range []object.Object{old, current} {
		for _, owner := range c.owners(changed) {
			u.owners[objectID{id, owner}] = true
		}
	}
	if id == ownCluster && h.sidecars.put(old, current) {
		u.Sidecars[cmp.Or(current.Key.Namespace, old.Key.Namespace)] = true
	}
	if id == ownCluster && (old.Cluster != nil || current.Cluster != nil) {
		h.vipKey = ""
		if current.Cluster != nil {
			h.vipKey = current.Cluster.UID
		}
	}
	views := id == ownCluster && h.mesh.put(old, current)
	u.Views = c.setNetwork(old, current) || views || u.Views
}

// renewClaims makes the claims of objects again. It returns the hosts that have changed. A host loses all its old claims
// at once: there may be many objects with one host, and a namespace may lose all its objects at a time.
func (h *Hosts) renewClaims(owners map[objectID]bool) (changed map[string]bool) {
	changed = map[string]bool{}
	type made struct {
		object object.Key
		claims []claim
	}
	dropped := map[string]map[objectID]bool{} // by hostKey
	var before [][]claim
	var after []made
	for _, id := range slices.SortedFunc(maps.Keys(owners), objectID.compare) {
		c := h.clusters[id.cluster]
		old := c.byObject[id.key]
		var now []claim
		if o, ok := c.get(id.key); ok {
			now = c.claims(o)
		}
		if slices.EqualFunc(old, now, func(a, b claim) bool { return a.equal(&b) }) {
			continue
		}
		for i := range old {
			setInner(dropped, hostKey(old[i].host), id, true)
		}
		before, after = append(before, old), append(after, made{id.key, now})
		if c.byObject[id.key] = now; len(now) == 0 {
			delete(c.byObject, id.key)
		}
	}
	for key, objects := range dropped {
		changed[key] = true
		h.byHost[key] = slices.DeleteFunc(h.byHost[key], func(c claimOf) bool { return objects[objectID{c.cluster, c.object}] })
	}
	for _, old := range before {
		for i := range old {
			h.removeTarget(old[i].alias, hostKey(old[i].host))
		}
	}
	for _, m := range after {
		for i := range m.claims {
			key := hostKey(m.claims[i].host)
			changed[key] = true
			h.byHost[key] = append(h.byHost[key], claimOf{&m.claims[i], m.object})
			if alias := m.claims[i].alias; alias != "" {
				setInner(h.aliases, targetKey(alias), key, true)
			}
		}
	}
	return changed
}

// renewAll makes changed hosts and their aliases again, and then the hosts of each namespace that has passed a bound of
// usage. It returns all hosts that have changed.
func (h *Hosts) renewAll(changed map[string]bool) []HostChange {
	changes := h.renewEach(changed)
	if passed := h.usage.follow(changes); len(passed) > 0 {
		again := map[string]bool{}
		for key, host := range h.hosts {
			if slices.ContainsFunc(host.claims, func(c *claim) bool { return passed[c.namespace] }) {
				again[key] = true
			}
		}
		changes = chained(changes, h.renewEach(again))
	}
	return changes
}

// renewEach makes hosts and their aliases again. It adds the aliases to keys.
func (h *Hosts) renewEach(keys map[string]bool) (changes []HostChange) {
	h.addAliases(keys)
	for _, key := range sortedKeys(keys) {
		old := h.hosts[key]
		if now := h.renew(key); old != nil || now != nil {
			changes = append(changes, HostChange{Old: old, New: now})
		}
	}
	h.setAliases(changes)
	return changes
}

// renew makes a host again after its claims or a target of its aliases have changed. It
// returns nil if there is no claim to the host. renew does not set the aliases: setAliases does.
func (h *Hosts) renew(key string) *Host {
	claims := h.byHost[key]
	h.problems.set(key)
	if len(claims) == 0 {
		delete(h.byHost, key)
		delete(h.hosts, key)
		return nil
	}
	// Neither the order in which objects came nor the numbers of clusters may matter.
	slices.SortFunc(claims, func(a, b claimOf) int {
		return cmp.Or(-cmp.Compare(min(len(a.shortname), 1), min(len(b.shortname), 1)), cmp.Compare(a.created, b.created), cmp.Compare(a.namespace, b.namespace),
			a.object.Compare(b.object), cmp.Compare(h.clusters[a.cluster].name, h.clusters[b.cluster].name), cmp.Compare(a.host, b.host))
	})
	host := &Host{Key: key}
	host.shared, _, _ = h.mesh.Shows("")
	host.shared = host.shared || slices.ContainsFunc(h.mesh.ExportTo, object.IsLabel)
	for _, c := range claims {
		if admitted := h.admit(key, c); admitted != nil {
			host.claims = append(host.claims, h.usage.limit(host, admitted))
			host.contested = host.contested || admitted.namespace != host.claims[0].namespace
		}
	}
	_, host.reserved = servicesName(key, h.domain)
	host.reserved = host.reserved || !strings.Contains(key, ".")
	if slices.ContainsFunc(host.claims, func(c *claim) bool { return c.wantsVIP }) {
		host.vips = automaticVIPs(h.vipKey, key)
	}
	h.hosts[key] = host
	return host
}

// All yields all hosts, in no order.
func (h *Hosts) All() iter.Seq[*Host] { return maps.Values(h.hosts) }

// Counts are the numbers of hosts and objects.
type Counts struct {
	Objects map[string]int // by kind
	Hosts   int            // in the table of some client
}

// Counts returns the current numbers.
func (h *Hosts) Counts() Counts {
	return Counts{Objects: maps.Clone(h.kinds), Hosts: h.listed}
}

// newScene returns the current scene.
func (h *Hosts) newScene() *Scene {
	s := &Scene{sidecars: maps.Clone(h.sidecars.byNamespace), settings: h.mesh.Mesh, around: make([]place, len(h.clusters)), remote: h.remote > 0}
	for i, c := range h.clusters {
		if c != nil {
			s.around[i] = place{c.name, c.network, true}
		}
	}
	return s
}

// clusterOf returns the number of the cluster with a name, which it adds if there is none.
func (h *Hosts) clusterOf(name string) (id clusterID, added bool) {
	free := len(h.clusters)
	for i, c := range slices.Backward(h.clusters) {
		switch {
		case c == nil:
			free = i
		case c.name == name:
			return c.id, false
		}
	}
	if free == len(h.clusters) {
		h.clusters = append(h.clusters, nil)
	}
	id = clusterID(free) //nolint:gosec // there is no mesh of 65,536 clusters
	h.clusters[free] = newCluster(name, id, h.domain, 1)
	h.remote++
	return id, true
}

// targetKey returns the key of the host that an alias stands for.
func targetKey(alias string) string { return hostKey(strings.TrimSuffix(alias, ".")) }

// removeTarget notes that a claim with an alias, which may be empty, was removed. Another claim of the host may have the
// same target: Services of several clusters may have the same alias.
func (h *Hosts) removeTarget(alias, host string) {
	if alias == "" {
		return
	}
	target := targetKey(alias)
	if !slices.ContainsFunc(h.byHost[host], func(c claimOf) bool { return c.alias != "" && targetKey(c.alias) == target }) {
		setInner(h.aliases, target, host, false)
	}
}

// addAliases adds to changed the aliases of changed hosts, the aliases of these aliases, and so on.
func (h *Hosts) addAliases(changed map[string]bool) {
	if len(h.aliases) == 0 {
		return
	}
	todo := sortedKeys(changed)
	add := func(hosts map[string]bool) {
		for host := range hosts {
			if !changed[host] {
				changed[host] = true
				todo = append(todo, host)
			}
		}
	}
	// Only ServiceEntries claim wildcards, so no alias is one.
	if slices.ContainsFunc(todo, object.IsWildcard) {
		for target, hosts := range h.aliases {
			if isBelow(target, changed) {
				add(hosts)
			}
		}
	}
	for len(todo) > 0 {
		key := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		add(h.aliases[key])
	}
}

// isBelow reports whether one of hosts is a wildcard above a host.
func isBelow(host string, hosts map[string]bool) bool {
	for {
		_, parent, found := strings.Cut(host, ".")
		if !found {
			return false
		}
		if hosts["*."+parent] {
			return true
		}
		host = parent
	}
}

// setAliases sets what the changed hosts stand for. If the chain of aliases of a host has no end, or is longer than
// maxAliases, that is added to problems.
func (h *Hosts) setAliases(changes []HostChange) {
	for _, c := range changes {
		host := c.New
		if host == nil {
			continue
		}
		for _, claim := range host.claims {
			known := func(a alias) bool { return a.name == claim.alias }
			if claim.alias != "" && !slices.ContainsFunc(host.aliases, known) {
				host.aliases = append(host.aliases, alias{claim.alias, h.targets(targetKey(claim.alias))})
			}
		}
		if len(host.aliases) > 0 && h.isEndless(host.Key) {
			h.addProblem(host.Key, h.byHost[host.Key][0].object, "spec.externalName", fmt.Sprintf(
				"the host %q is left out: it stands for itself, or for the end of a chain of more than %d aliases", host.Key, maxAliases))
		}
	}
}

// isEndless reports whether the chain of aliases that begins at a host is longer than maxAliases, or has no end.
func (h *Hosts) isEndless(key string) bool {
	for range maxAliases + 1 {
		claims := h.byHost[key]
		i := slices.IndexFunc(claims, func(c claimOf) bool { return c.alias != "" })
		if i < 0 {
			return false
		}
		key = targetKey(claims[i].alias)
	}
	return true
}

// targets returns the hosts that may answer for a name: the host with the name, and the wildcards above it that objects
// claim, the closest first. A wildcard at or above the cluster domain does not answer for names below it.
func (h *Hosts) targets(key string) (all []*Host) {
	if host := h.hosts[key]; host != nil {
		all = append(all, host)
	}
	for rest := key; rest != h.domain; {
		_, parent, found := strings.Cut(rest, ".")
		if !found {
			break
		}
		if host := h.hosts["*."+parent]; host != nil && parent != h.domain {
			all = append(all, host)
		}
		rest = parent
	}
	return all
}

// A Change has the objects of a source that have changed. A source is, for example, the API server of a cluster, or a
// directory.
type Change struct {
	// Cluster is the name of the objects' cluster; empty for the control plane's own cluster. The
	// first change of a cluster adds it.
	Cluster string
	// Source is the number of the source, from 0. If two sources have the same object, the object of the source with
	// the lower number counts. Clusters other than the own one have only the source 0.
	Source  int
	Updated []object.Object // new, or with another content
	Removed []object.Key
	// Dropped is true if the cluster is removed with all its objects. The own cluster is never removed.
	Dropped bool
}

// mesh holds the settings of the mesh.
type mesh struct {
	object.Mesh
	defaults object.Mesh // used where no object sets a setting
}

func newMesh(defaults object.Mesh) mesh { return mesh{defaults, defaults} }

// put applies an object that has changed, and reports whether it has, or had, settings of
// the mesh.
func (m *mesh) put(old, current object.Object) bool {
	if old.Mesh == nil && current.Mesh == nil {
		return false
	}
	m.Mesh = m.defaults
	if current.Mesh != nil {
		m.Mesh = current.Mesh.Or(m.defaults)
	}
	return true
}
