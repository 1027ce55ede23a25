package interop

import (
	_ "embed"
	"testing"
)

// meshConfig is the mesh configuration of every istiod.
//
//go:embed testdata/mesh.yaml
var meshConfig string

// objects are the objects at the API server when a test begins.
//
//go:embed testdata/objects.yaml
var objects string

// start starts a cluster with the objects, and an istiod.
func start(tb testing.TB, o options) *istiod {
	tb.Helper()
	c := newCluster(tb)
	c.write("mesh.yaml", meshConfig)
	c.apply(objects)
	return c.istiod(o)
}

// C1, C2: in both variants, the agent's table has the entries that istiod has for it.
func TestTable(t *testing.T) {
	d := start(t, options{})
	m := d.machine(dual)
	for _, variant := range []string{"incremental", "sotw"} {
		t.Run(variant, func(t *testing.T) {
			a := m.agent(pod{"table-" + variant, "shop"}, append(m.plain(d), "--xds", variant)...)
			defer a.end(terminate)
			t.Logf("%d hosts", len(d.wantTable(a)))
		})
	}
}
