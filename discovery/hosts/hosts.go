package hosts

import (
	"cmp"
	"maps"
	"reflect"
	"slices"

	"github.com/nametap/nametap/discovery/object"
)

// Hosts holds all hosts of the mesh. Make one with [New].
type Hosts struct {
	index
	sources  []map[object.Key]object.Object // those first whose objects count
	kinds    map[string]int                 // objects that count, by kind
	sidecars sidecars
	claims   map[object.Key][]claim     // by the object that makes them
	byHost   map[string][]claimOf       // the claims by hostKey
	hosts    map[string]*Host           // by hostKey
	aliases  map[string]map[string]bool // hosts that are aliases, by the hostKey of their target
	loops    map[string]bool            // hosts that are aliases of themselves
	vips     *VIPs
	settled  bool // an update has compared the VIPs with all hosts
	resolved int  // hosts that have an address for some client
}

// claimOf is a claim and the object that makes it.
type claimOf struct {
	*claim
	by object.Key
}

// New returns no hosts, for a number of sources. The automatic VIPs are allocated in vips, which
// must not be used elsewhere.
func New(clusterDomain string, sources int, vips *VIPs) *Hosts {
	h := &Hosts{
		index: *newIndex(clusterDomain), kinds: map[string]int{}, sidecars: sidecars{}, claims: map[object.Key][]claim{},
		byHost: map[string][]claimOf{}, hosts: map[string]*Host{}, aliases: map[string]map[string]bool{},
		loops: map[string]bool{}, vips: vips,
	}
	for range sources {
		h.sources = append(h.sources, map[object.Key]object.Object{})
	}
	return h
}

// A Change is what has changed in a source of objects.
type Change struct {
	// Source is the number of the source, from 0. An object counts instead of the same one of a
	// source with a higher number.
	Source  int
	Updated []object.Object // new, or with another content
	Removed []object.Key
}

// Diff returns the change that makes objects all those of a source.
func (h *Hosts) Diff(source int, objects []object.Object) Change {
	c := Change{Source: source}
	all := make(map[object.Key]bool, len(objects))
	for _, o := range objects {
		all[o.Key] = true
		if old, ok := h.sources[source][o.Key]; !ok || !reflect.DeepEqual(old, o) {
			c.Updated = append(c.Updated, o)
		}
	}
	for key := range h.sources[source] {
		if !all[key] {
			c.Removed = append(c.Removed, key)
		}
	}
	return c
}

// An Update is what a change of objects has changed.
type Update struct {
	Hosts []HostChange // sorted by key
	// Sidecars says that a Sidecar has changed, so a client may have another view, and a view may
	// show other hosts.
	Sidecars bool
	// VIPs says that the automatic VIPs have to be saved.
	VIPs bool
	// Moved are hosts that had to leave their automatic VIP, because an object claims it; sorted.
	Moved []string
	// WithoutVIP are all hosts of now for which no automatic VIP is left; sorted.
	WithoutVIP []string
	// Loops are all hosts of now that are left out because they are aliases of themselves; sorted.
	Loops []string
}

// A HostChange is a host before and after a change; nil if there is none.
type HostChange struct {
	Old, New *Host
}

// Update puts changes of sources to use, all at once. The order of the changes does not matter for
// the result.
func (h *Hosts) Update(changes ...Change) Update {
	var u Update
	owners := map[object.Key]bool{}
	for _, c := range changes {
		for _, o := range c.Updated {
			u.Sidecars = h.put(c.Source, o.Key, &o, owners) || u.Sidecars
		}
		for _, key := range c.Removed {
			u.Sidecars = h.put(c.Source, key, nil, owners) || u.Sidecars
		}
	}
	changed := map[string]bool{}
	var vips vipChange
	for _, key := range slices.SortedFunc(maps.Keys(owners), object.Key.Compare) {
		h.claim(key, changed, &vips)
	}
	vips.wanted = h.wanted(changed)
	result := h.vips.update(vips)
	maps.Copy(changed, result.changed)
	u.VIPs, u.Moved = result.unsaved, result.moved
	h.addAliases(changed)
	for _, key := range sortedKeys(changed) {
		old := h.hosts[key]
		if now := h.renew(key); old != nil || now != nil {
			u.Hosts = append(u.Hosts, HostChange{Old: old, New: now})
		}
	}
	for _, c := range u.Hosts {
		h.setTarget(c.New)
		h.resolved += c.New.resolves() - c.Old.resolves()
	}
	u.WithoutVIP, u.Loops = sortedKeys(h.vips.without), sortedKeys(h.loops)
	return u
}

// get returns the object that counts.
func (h *Hosts) get(key object.Key) (object.Object, bool) {
	for _, objects := range h.sources {
		if o, ok := objects[key]; ok {
			return o, true
		}
	}
	return object.Object{}, false
}

// put puts an object of a source to use, or removes it if it is nil. It adds the objects whose
// claims may change to owners, and reports whether the object that counts is a Sidecar and has
// changed.
func (h *Hosts) put(source int, key object.Key, o *object.Object, owners map[object.Key]bool) (sidecar bool) {
	old, had := h.get(key)
	if o != nil {
		h.sources[source][key] = *o
	} else {
		delete(h.sources[source], key)
	}
	now, has := h.get(key)
	if had == has && old == now {
		return false
	}
	if had {
		if h.kinds[key.Kind]--; h.kinds[key.Kind] == 0 {
			delete(h.kinds, key.Kind)
		}
		h.forget(old, owners)
	}
	if has {
		h.kinds[key.Kind]++
		h.remember(now, owners)
	}
	return old.Sidecar != nil || now.Sidecar != nil
}

func (h *Hosts) forget(o object.Object, owners map[object.Key]bool) {
	for _, owner := range h.owners(o) {
		owners[owner] = true
	}
	h.remove(o)
	if o.Sidecar != nil {
		h.sidecars.remove(o)
	}
}

func (h *Hosts) remember(o object.Object, owners map[object.Key]bool) {
	h.add(o)
	for _, owner := range h.owners(o) {
		owners[owner] = true
	}
	if o.Sidecar != nil {
		h.sidecars.add(o)
	}
}

// claim makes the claims of an object anew, and notes which hosts have changed.
func (h *Hosts) claim(key object.Key, changed map[string]bool, vips *vipChange) {
	old := h.claims[key]
	var now []claim
	if o, ok := h.get(key); ok {
		now = h.index.claims(o)
	}
	if slices.EqualFunc(old, now, func(a, b claim) bool { return a.equal(&b) }) {
		return
	}
	vips.released = append(vips.released, slotsOf(old)...)
	vips.claimed = append(vips.claimed, slotsOf(now)...)
	for i := range old {
		k := hostKey(old[i].host)
		changed[k] = true
		h.byHost[k] = slices.DeleteFunc(h.byHost[k], func(c claimOf) bool { return c.by == key })
		if old[i].alias != "" {
			removeTarget(h.aliases, targetKey(old[i].alias), k)
		}
	}
	for i := range now {
		k := hostKey(now[i].host)
		changed[k] = true
		h.byHost[k] = append(h.byHost[k], claimOf{&now[i], key})
		if now[i].alias != "" {
			addTarget(h.aliases, targetKey(now[i].alias), k)
		}
	}
	if h.claims[key] = now; len(now) == 0 {
		delete(h.claims, key)
	}
}

// wanted says which of the changed hosts want an automatic VIP. The first time, all hosts that have
// a VIP count as changed: they may be of an earlier process.
func (h *Hosts) wanted(changed map[string]bool) map[string]bool {
	wanted := make(map[string]bool, len(changed))
	for key := range changed {
		wanted[key] = wantsSlot(h.byHost[key])
	}
	if !h.settled {
		h.settled = true
		for key := range h.vips.byHost {
			wanted[key] = wantsSlot(h.byHost[key])
		}
	}
	return wanted
}

// wantsSlot reports whether a host with these claims needs a slot: one of them wants an automatic
// VIP, none gives an address or a VIP, and the host is no Service.
func wantsSlot(claims []claimOf) bool {
	wants := false
	for _, c := range claims {
		if c.addressed() || len(c.vips) > 0 || c.kubernetes() {
			return false
		}
		wants = wants || c.wantsVIP
	}
	return wants
}

// renew makes a host anew after its claims, its VIP or the target of its alias have changed. It
// returns nil if there is none. The target of an alias is set later.
func (h *Hosts) renew(key string) *Host {
	claims := h.byHost[key]
	if len(claims) == 0 {
		delete(h.byHost, key)
		delete(h.hosts, key)
		delete(h.loops, key)
		return nil
	}
	// The order in which objects came must not matter.
	slices.SortFunc(claims, func(a, b claimOf) int {
		return cmp.Or(a.by.Compare(b.by), cmp.Compare(a.host, b.host))
	})
	host := &Host{Key: key, claims: make([]*claim, len(claims))}
	for i, c := range claims {
		host.claims[i] = c.claim
	}
	host.slot, host.hasSlot = h.vips.slot(key)
	h.hosts[key] = host
	return host
}

// All returns all hosts, in no order.
func (h *Hosts) All() map[string]*Host { return h.hosts }

// Counts are numbers of what there is.
type Counts struct {
	Objects map[string]int // by kind
	Hosts   int            // with an address for some client
	VIPs    int            // hosts with an automatic VIP that is allocated here
	NoVIP   int            // hosts for which none is left
}

// Counts returns the numbers of now.
func (h *Hosts) Counts() Counts {
	return Counts{Objects: maps.Clone(h.kinds), Hosts: h.resolved, VIPs: h.vips.inUse, NoVIP: len(h.vips.without)}
}
