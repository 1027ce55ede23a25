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
