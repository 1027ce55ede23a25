package hosts

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/discovery/object"
)

// The entries of an alias need memory once for each view, however many claims its target has.
func TestAliasOfManyClaims(t *testing.T) {
	h := New(domain, 1, NewVIPs())
	objects := []object.Object{external("alias", "many.example.com")}
	for i := range maxBits + 1 {
		objects = append(objects, entry(fmt.Sprintf("e%d", i), "many.example.com", fmt.Sprintf("192.0.2.%d", i)))
	}
	h.Update(Change{Updated: objects})
	viewer := h.Viewer(View{Namespace: "shop", Families: Families{V4: true}})
	host := h.host("alias.shop.svc." + domain)
	for range 10 {
		if e := viewer.Entry(host); e == nil || !strings.Contains(string(e.Encoded), "192.0.2.64") {
			t.Fatalf("the alias has the entry %v", e)
		}
	}
	if len(*host.variants.Load()) != 1 {
		t.Errorf("the host keeps %d entries of one view, want 1", len(*host.variants.Load()))
	}
}

// D9: a row of aliases costs as much as the same number of aliases of one host.
func TestRowOfAliases(t *testing.T) {
	const n = 8000
	edit := func(target func(i int) int) time.Duration {
		h := New(domain, 1, NewVIPs())
		objects := []object.Object{clusterIP("s0", "10.0.0.1")}
		for i := 1; i < n; i++ {
			objects = append(objects, external(fmt.Sprint("s", i), fmt.Sprintf("s%d.shop.svc.%s", target(i), domain)))
		}
		h.Update(Change{Updated: objects})
		began := time.Now()
		u := h.Update(Change{Updated: []object.Object{clusterIP("s0", "10.0.0.2")}})
		took := time.Since(began)
		if len(u.Hosts) != n || len(u.Loops) > 0 {
			t.Fatalf("%d hosts have changed, and %d are loops", len(u.Hosts), len(u.Loops))
		}
		viewer := h.Viewer(View{Namespace: "shop", Families: Families{V4: true}})
		if e := viewer.Entry(h.host(fmt.Sprintf("s%d.shop.svc.%s", n-1, domain))); e == nil || !strings.Contains(string(e.Encoded), "10.0.0.2") {
			t.Fatalf("the last alias has the entry %v", e)
		}
		return took
	}
	one := edit(func(int) int { return 0 })
	if row := edit(func(i int) int { return i - 1 }); row > 20*one {
		t.Errorf("an edit takes %v with a row, and %v with one target", row, one)
	}
}
