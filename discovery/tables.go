package discovery

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/object"
)

const (
	registryKubernetes = "Kubernetes"
	registryExternal   = "External"
)

// families are the address families of a client.
type families struct{ v4, v6 bool }

func (f families) has(a netip.Addr) bool {
	if a.Is4() {
		return f.v4
	}
	return f.v6
}

// viewKey is everything that determines what a client sees. Clients with the same key
// share a view.
type viewKey struct {
	namespace string
	families  families
	vips      bool       // the client has a proxy for connections to automatic VIPs
	merge     bool       // the client merges several tables
	sidecar   object.Key // the Sidecar that limits the hosts; zero if none does
}

// subscriber is what is known of a client. Which Sidecar limits its hosts depends on the snapshot,
// so the view does not have it yet.
type subscriber struct {
	view   viewKey
	labels map[string]string
}

// snapshot is what the objects say, for all clients. It does not change after it is made.
type snapshot struct {
	claims []claim
	slots  map[string]uint16 // automatic VIPs, by hostKey

	sidecars sidecars
}

// view returns the key of the view of a client.
func (s *snapshot) view(c subscriber) viewKey {
	key := c.view
	key.sidecar = s.sidecars.of(key.namespace, c.labels)
	return key
}

// newSnapshot builds a snapshot from objects. It allocates VIPs in v.
func newSnapshot(objects []object.Object, domain string, v *vips) (*snapshot, allocation) {
	claims := buildClaims(objects, domain)
	a := v.allocate(wantedVIPs(claims), claimedSlots(claims))
	return &snapshot{claims: claims, slots: a.slots, sidecars: collectSidecars(objects)}, a
}

// tables returns the name tables of a view by resource name: a single one without a name,
// or one per namespace for a client that merges. A host is in one table only, that of the
// first namespace, in alphabetical order, that gives it an address.
func (s *snapshot) tables(v viewKey) map[string]*api.NameTable {
	byHost := make(map[string][]visibleClaim, len(s.claims))
	limit := s.sidecars.get(v.sidecar)
	for i := range s.claims {
		c := &s.claims[i]
		if !c.exportTo.VisibleIn(v.namespace) || limit != nil && !limit.Shows(c.namespace, hostKey(c.owner())) {
			continue
		}
		// A claim without an address is ignored.
		if addrs := s.addrs(c, v); len(addrs) > 0 {
			k := hostKey(c.host)
			byHost[k] = append(byHost[k], visibleClaim{c, addrs})
		}
	}
	out := map[string]*api.NameTable{}
	if !v.merge {
		out[""] = &api.NameTable{}
	}
	for _, claims := range byHost {
		host, namespace, info := mergeClaims(claims)
		if !v.merge {
			namespace = ""
		}
		t := out[namespace]
		if t == nil {
			t = &api.NameTable{}
			out[namespace] = t
		}
		if t.Table == nil {
			t.Table = map[string]*api.NameTable_NameInfo{}
		}
		t.Table[host] = info
	}
	return out
}

// visibleClaim is a claim with the addresses that a client gets.
type visibleClaim struct {
	*claim
	addrs []netip.Addr
}

// addrs returns the addresses of a claim for a client. Like istiod, it returns the
// addresses in a ServiceEntry to every client, whatever its families: their author wants
// them used, and without them a client would resolve the name outside the mesh.
func (s *snapshot) addrs(c *claim, v viewKey) []netip.Addr {
	addrs := slices.Clone(c.literal)
	for _, a := range c.addrs {
		if v.families.has(a) {
			addrs = append(addrs, a)
		}
	}
	if c.wantsVIP && v.vips {
		for _, a := range s.automatic(c) {
			if v.families.has(a) {
				addrs = append(addrs, a)
			}
		}
	}
	return addrs
}

// automatic returns the automatic VIPs of a claim that wants them, of both families.
func (s *snapshot) automatic(c *claim) []netip.Addr {
	if len(c.vips) > 0 {
		return c.vips
	}
	if slot, ok := s.slots[hostKey(c.host)]; ok {
		return []netip.Addr{slotAddr4(slot), slotAddr6(slot)}
	}
	return nil
}

// hostCount returns the number of hosts for which some client gets an address.
func (s *snapshot) hostCount() int {
	hosts := map[string]bool{}
	for _, c := range s.claims {
		k := hostKey(c.host)
		if _, vip := s.slots[k]; vip || len(c.addrs)+len(c.literal) > 0 || c.wantsVIP && len(c.vips) > 0 {
			hosts[k] = true
		}
	}
	return len(hosts)
}

func isKubernetes(c visibleClaim) bool { return c.kubernetes() }

// mergeClaims makes one table entry of all claims to a host. Kubernetes Services take
// precedence over ServiceEntries of the same host; among equals, the addresses add up.
func mergeClaims(claims []visibleClaim) (host, namespace string, info *api.NameTable_NameInfo) {
	if slices.ContainsFunc(claims, isKubernetes) {
		claims = slices.DeleteFunc(claims, func(c visibleClaim) bool { return !isKubernetes(c) })
	}
	owner, host := claims[0], claims[0].host
	var addrs []netip.Addr
	for _, c := range claims {
		addrs = append(addrs, c.addrs...)
		// Claims to the same host may differ in case. The spelling and the owner must not
		// depend on the order of files.
		host = min(host, c.host)
		if c.namespace < owner.namespace {
			owner = c
		}
	}
	return host, owner.namespace, owner.info(addrs)
}

func (c visibleClaim) info(addrs []netip.Addr) *api.NameTable_NameInfo {
	slices.SortFunc(addrs, netip.Addr.Compare)
	addrs = slices.Compact(addrs)
	info := &api.NameTable_NameInfo{Registry: registryExternal, Ips: make([]string, len(addrs))}
	for i, a := range addrs {
		info.Ips[i] = a.String()
	}
	if c.kubernetes() {
		info.Registry, info.Shortname, info.Namespace = registryKubernetes, c.shortname, c.namespace
	}
	return info
}

// Client selects the client whose table [Table] returns.
type Client struct {
	// Namespace is the client's namespace.
	Namespace string
	// AutoAllocate says that the client asks for automatic VIPs.
	AutoAllocate bool
	// Labels are those of the client's workload, by which Sidecars select it.
	Labels map[string]string
}

// Table reads the objects once and returns the table of a client with both address families, and
// the errors in objects. It writes nothing: it uses the saved VIPs and does not save new ones.
func Table(ctx context.Context, cfg Config, client Client) (*api.NameTable, []object.Error, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, nil, err
	}
	if err := cfg.checkDir(); err != nil {
		return nil, nil, err
	}
	v := &vips{}
	if cfg.StateDir != "" {
		var err error
		if v, err = readVIPs(cfg.StateDir); err != nil && !errors.Is(err, errDamaged) {
			return nil, nil, err
		}
	}
	inputs := map[string]input{}
	if cfg.ConfigDir != "" {
		r, err := newSource(cfg.ConfigDir, cfg.AllowEmpty, nil).read()
		if err != nil {
			return nil, nil, err
		}
		inputs[fromDir] = input{reading: r}
	}
	if cfg.Kubernetes != nil {
		r, err := readKubernetes(ctx, cfg)
		if err != nil {
			return nil, nil, err
		}
		inputs[fromKubernetes] = input{reading: r}
	}
	r, _ := combine(cfg.sources(), inputs)
	snap, _ := newSnapshot(r.objects, cfg.ClusterDomain, v)
	key := snap.view(subscriber{
		view:   viewKey{namespace: client.Namespace, families: families{v4: true, v6: true}, vips: client.AutoAllocate},
		labels: client.Labels,
	})
	return snap.tables(key)[""], r.errs, nil
}
