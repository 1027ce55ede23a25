package nds_test

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

// A meshTable is the table of the query path.
type meshTable struct {
	empty   *table.Table
	current atomic.Pointer[table.Table]
}

func newMeshTable(tb testing.TB) *meshTable {
	tb.Helper()
	cluster, err := table.NewCluster("shop", "cluster.local")
	if err != nil {
		tb.Fatal(err)
	}
	m := &meshTable{empty: table.Empty(cluster)}
	m.empty = m.empty.WithAncestors()
	m.current.Store(m.empty)
	return m
}

func (m *meshTable) apply(shards map[int][]byte) error {
	next, err := m.current.Load().With(shards)
	if err == nil {
		m.current.Store(next)
	}
	return err
}

// wantAnew checks that the table equals one built from all hosts of p.
func (m *meshTable) wantAnew(t *testing.T, p *plane) {
	t.Helper()
	p.mu.Lock()
	var whole []byte
	for _, raw := range p.entries {
		whole = append(whole, raw...)
	}
	p.mu.Unlock()
	want, err := table.New("shop", "cluster.local", must(digest.Split(whole)))
	if err != nil {
		t.Fatal(err)
	}
	want = want.WithAncestors()
	got := m.current.Load()
	if w, g := want.NameTable(), got.NameTable(); !proto.Equal(w, g) {
		t.Fatalf("the table differs (-want +got):\n%s", cmp.Diff(w, g, protocmp.Transform()))
	}
	wantSame(t, "collisions", want.Collisions(), got.Collisions())
	wantSame(t, "skipped entries", want.Skipped(), got.Skipped())
	for _, host := range randomHosts {
		host, _ = strings.CutPrefix(host, "*.")
		name, err := wire.ParseHostname(host)
		for ; err == nil && name != wire.Root; name = name.Parent() {
			if want, got := want.HasBelow(name), got.HasBelow(name); want != got {
				t.Fatalf("HasBelow(%s) is %v, want %v", name, got, want)
			}
		}
	}
	for i := range 8 {
		name := must(wire.ParseHostname(fmt.Sprintf("%d.2.0.192.in-addr.arpa", i)))
		var s, other table.Scratch
		wantSame(t, "hosts of "+name.String(), want.Pointer(name, &table.Suffixes{}, &s).Pointers, got.Pointer(name, &table.Suffixes{}, &other).Pointers)
	}
}

// wantSame is cmp.Diff for values that are equal a thousand times.
func wantSame[T any](t *testing.T, what string, want, got T) {
	t.Helper()
	if reflect.DeepEqual(want, got) {
		return
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("%s differ (-want +got):\n%s", what, diff)
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// randomHosts are the hosts of the random changes: with names below each other, and names that several
// of them claim.
var randomHosts = func() (hosts []string) {
	for i := range 12 {
		hosts = append(hosts, fmt.Sprintf("web-%d.shop.svc.cluster.local", i), fmt.Sprintf("web-%d.bank.svc.cluster.local", i),
			fmt.Sprintf("web-%d.elsewhere.cluster.local", i), fmt.Sprintf("api-%d.example.com", i), fmt.Sprintf("v1.api-%d.example.com", i))
	}
	return append(hosts, "*.example.com", "*.api-1.example.com", "*.shop.svc.cluster.local", "*.", "web-1.shop.svc.cluster.local.",
		"api-1.example.com.", "", ".", "a b.example", "b\u00fccher.example", "\u212aelvin.example", strings.Repeat("x.", 126)+"x",
		strings.Repeat("x.", 127)+"x", strings.Repeat("long.", 200)+"example", strings.Repeat("y", 5000))
}()

// randomInfo returns a host's info: a Service below the cluster domain, which has short names, if it
// can be one.
func randomInfo(r *rand.Rand, host string) *api.NameTable_NameInfo {
	info := &api.NameTable_NameInfo{Ips: []string{fmt.Sprintf("192.0.2.%d", r.IntN(8))}, Registry: "External"}
	if labels := strings.Split(host, "."); r.IntN(4) > 0 && strings.HasPrefix(host, "w") {
		info.Registry, info.Shortname, info.Namespace = "Kubernetes", labels[0], labels[1]
	}
	if r.IntN(6) == 0 {
		//nolint:staticcheck // deprecated, and still read
		info.AltHosts = []string{fmt.Sprintf("alt-%d.test", r.IntN(3)), fmt.Sprintf("web-%d", r.IntN(3))}
	}
	if r.IntN(12) == 0 {
		info.Ips = append(info.Ips, "not an address")
	}
	info.Headless = r.IntN(8) == 0
	return info
}

// randomCase returns host with some letters in upper case.
func randomCase(r *rand.Rand, host string) string {
	b := []byte(host)
	for i, c := range b {
		if 'a' <= c && c <= 'z' && r.IntN(4) == 0 {
			b[i] = c - 'a' + 'A'
		}
	}
	return string(b)
}

// C11, C12, D41: after each of a thousand random changes, the table equals one built from scratch.
// Among them are damaged ones, lost streams with changes meanwhile, and restarts from the snapshot.
func TestRandomChanges(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		t.Parallel()
		const steps = 500 // of each variant
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 0))
		p := startPlaneWith(t, plane)
		for _, host := range randomHosts[:20] {
			p.setInfo(host, randomInfo(r, host))
		}
		dir := t.TempDir()
		begin := func() (*harness, *meshTable) {
			mesh := newMeshTable(t)
			return start(t, options{server: p.server, apply: mesh.apply, many: true, config: stateDir(dir)}), mesh
		}
		h, mesh := begin()
		h.wantStatus(func(s nds.Status) bool { return s.Connected }) // so that no push is lost
		differences := uint64(0)
		for step := range steps {
			var changed []string
			for range r.IntN(4) {
				host := randomHosts[r.IntN(len(randomHosts))]
				if slices.Contains(changed, host) {
					continue
				}
				if changed = append(changed, host); r.IntN(3) == 0 {
					p.remove(host)
				} else {
					p.setSpelled(host, randomCase(r, host), randomInfo(r, host))
				}
			}
			event := r.IntN(40)
			if event < 3 && h.client.Status().Reconnects > 1 {
				event = 0 // the next pauses would be long
			}
			switch event {
			case 0:
				h.stop()
				h, mesh = begin()
				differences = 0
			case 1:
				streams := len(p.requests())
				p.server.CutStreams(nil)
				wait.Until(t, "another stream", func() bool { return len(p.requests()) > streams })
			case 2:
				if !p.has(changed) {
					p.push(changed...)
					break
				}
				streams := len(p.requests())
				p.damageNext()
				p.push(changed...)
				differences++
				wait.Until(t, "another stream", func() bool { return len(p.requests()) > streams })
			default:
				p.push(changed...)
			}
			wait.Until(t, fmt.Sprintf("step %d of seed %d is in use", step, seed), func() bool {
				s := h.client.Status()
				// A damaged push may be of a host that is unchanged.
				return s.Digest == p.digest() && s.Connected && !s.Stale && s.ChecksumDifferences == differences
			})
			mesh.wantAnew(t, p)
			if t.Failed() {
				t.Fatalf("seed %d, step %d", seed, step)
			}
		}
	})
}
