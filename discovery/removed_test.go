package discovery

import (
	"os"
	"path/filepath"
	"testing"
)

// TestFileIsRemoved checks that a file that was removed is removed soon, even while a link has no target.
func TestFileIsRemoved(t *testing.T) { // D43
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "b/web.yaml", svc("web", "clusterIP: 10.0.0.1"))
	write(t, dir, "b/cart.yaml", svc("cart", "clusterIP: 10.0.0.2"))
	r := start(t, Config{ConfigDir: dir})
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	if err := os.Symlink("nowhere", filepath.Join(dir, "link.yaml")); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, "b/cart.yaml")); err != nil {
		t.Fatal(err)
	}
	c.next()
	if got := hostsOf(t, c); got != "map[web.shop.svc.cluster.local:10.0.0.1]" {
		t.Errorf("got %s", got)
	}
}
