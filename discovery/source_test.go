package discovery

import (
	"fmt"
	"testing"
)

// A new server has no last good form, so the broken object is left out.
func TestBrokenAtStartIsLeftOut(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "sub/a.yaml", svc("web", "clusterIP: x")+svc("cart", "clusterIP: 10.0.0.1"))
	write(t, dir, "b.yaml", svc("cart", "clusterIP: 10.0.0.2"))
	table, errs, err := Table(t.Context(), Config{ConfigDir: dir}, Client{Namespace: "shop"})
	if err != nil {
		t.Fatal(err)
	}
	// If two objects have the same name, the first file's is used, and the other one is
	// an error.
	if got := fmt.Sprint(show(table)); got != "map[cart.shop.svc.cluster.local:Kubernetes cart.shop 10.0.0.2]" {
		t.Errorf("got %s", got)
	}
	want := []string{
		`sub/a.yaml, document 1, Service shop/web: spec.clusterIP: want an IP address, got "x"`,
		"sub/a.yaml, document 2, Service shop/cart: metadata.name: is already in b.yaml, document 1; this one is ignored",
	}
	if fmt.Sprint(errs) != fmt.Sprint(want) {
		t.Errorf("got  %q\nwant %q", errs, want)
	}
}
