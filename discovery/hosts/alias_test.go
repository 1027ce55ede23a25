package hosts

import (
	"fmt"
	"strings"
	"testing"

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
