package discovery

import (
	"bytes"
	"cmp"
	"slices"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
)

// viewKey is everything that determines what a client is sent. Clients with the same key
// share a view.
type viewKey struct {
	hosts.View
	merge bool // the client merges several tables
}

// subscriber is what is known of a client. Which Sidecar limits its hosts, and which clusters there
// are, depends on the objects, so the view does not have it yet.
type subscriber struct {
	view             viewKey
	labels           map[string]string
	cluster, network string // that the client claims to be in; may be empty
}

// view says which tables the clients with one key have: a single one without a name, or one per
// namespace for a client that merges. A host is in one table only, that of the first namespace, in
// alphabetical order, that gives it an address. It is guarded by cache.mu.
type view struct {
	viewer hosts.Viewer
	merge  bool
	tables map[string]table // by resource name
	// watches holds the requests that wait for a change.
	watches map[*watch]struct{}
	used    uint64 // cache.uses at the last use
}

// table is what is known of a table that may not be encoded yet.
type table struct {
	sum     digest.Sum
	entries int
	version string // the sum as text
}

// newView returns the view of a key.
func newView(all *hosts.Hosts, key viewKey) *view {
	v := &view{
		viewer: all.Viewer(key.View), merge: key.merge, tables: map[string]table{}, watches: map[*watch]struct{}{},
	}
	changed := map[string]bool{}
	for host := range all.All() {
		v.apply(hosts.HostChange{New: host}, changed)
	}
	v.settle(changed)
	if !key.merge {
		changed[""] = true
		v.settle(changed)
	}
	return v
}

// update takes over changed hosts. It returns the tables that the view had and has not any more.
func (v *view) update(changes []hosts.HostChange) (replaced []resourceID) {
	changed := map[string]bool{}
	for _, c := range changes {
		v.apply(c, changed)
	}
	for name := range changed {
		replaced = append(replaced, resourceID{name, v.tables[name].version})
	}
	v.settle(changed)
	return replaced
}

// apply takes over a changed host, and notes which tables have changed.
func (v *view) apply(c hosts.HostChange, changed map[string]bool) {
	old, now := v.viewer.Entry(c.Old), v.viewer.Entry(c.New)
	if old != nil && now != nil && old.Sum == now.Sum && old.Namespace == now.Namespace {
		return
	}
	if old != nil {
		name := v.tableOf(old)
		t := v.tables[name]
		t.sum, t.entries = t.sum.Sub(old.Sum), t.entries-1
		v.tables[name], changed[name] = t, true
	}
	if now != nil {
		name := v.tableOf(now)
		t := v.tables[name]
		t.sum, t.entries = t.sum.Add(now.Sum), t.entries+1
		v.tables[name], changed[name] = t, true
	}
}

// settle gives changed tables their version, and removes those without an entry. The unnamed one
// stays, because a client that has hosts would keep them.
func (v *view) settle(changed map[string]bool) {
	for name := range changed {
		t := v.tables[name]
		if t.entries == 0 && v.merge {
			delete(v.tables, name)
			continue
		}
		t.version = t.sum.String()
		v.tables[name] = t
	}
}

// has reports whether the view has a table with this content.
func (v *view) has(id resourceID) bool {
	t, ok := v.tables[id.name]
	return ok && t.version == id.version
}

// tableOf returns the name of the table with an entry.
func (v *view) tableOf(e *hosts.Entry) string {
	if v.merge {
		return e.Namespace
	}
	return ""
}

// version returns the version of all tables together.
func (v *view) version() string {
	var all digest.Sum
	for _, t := range v.tables {
		all = all.Add(t.sum)
	}
	return all.String()
}

// encode returns the encoded tables with the given names.
func (v *view) encode(all *hosts.Hosts, names map[string]bool) map[string]*resource {
	encoded := make(map[string]*resource, len(names))
	for name := range names {
		some := all.All()
		if v.merge {
			some = all.Of(name)
		}
		entries := make([]*hosts.Entry, 0, v.tables[name].entries)
		for host := range some {
			if e := v.viewer.Entry(host); e != nil && v.tableOf(e) == name {
				entries = append(entries, e)
			}
		}
		encoded[name] = newResource(name, v.tables[name].version, entries)
	}
	return encoded
}

// resource is an encoded table. All responses share the bytes.
type resource struct {
	name    string
	body    *anypb.Any
	version string
	wrapped *anypb.Any // body for state-of-the-world, made when first needed
}

// newResource encodes a table. The version is a checksum of its entries, so it is the same
// on every server with the same objects, and a client that reconnects with this version
// is not sent the table again.
func newResource(name, version string, entries []*hosts.Entry) *resource {
	slices.SortFunc(entries, func(a, b *hosts.Entry) int { return cmp.Compare(a.Host, b.Host) })
	size := 0
	for _, e := range entries {
		size += len(e.Encoded)
	}
	data := bytes.NewBuffer(make([]byte, 0, size))
	for _, e := range entries {
		data.Write(e.Encoded)
	}
	return &resource{name: name, body: &anypb.Any{TypeUrl: typeURL, Value: data.Bytes()}, version: version}
}

func (r *resource) named() *discoveryv3.Resource {
	return &discoveryv3.Resource{Name: r.name, Version: r.version, Resource: r.body}
}
