package hosts

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/object"
)

// D9: all aliases of a row follow their target, with at most 32 addresses. Those at the end of a row of more than 16 are
// left out.
func TestRowOfAliases(t *testing.T) {
	h := New(domain, 1)
	h.Update(Change{Updated: row(maxAliases + 3)})
	target := service("s0", object.Service{ClusterIPs: make([]netip.Addr, maxLent+1)})
	for i := range target.Service.ClusterIPs {
		target.Service.ClusterIPs[i] = netip.AddrFrom4([4]byte{10, 0, 1, byte(i)})
	}
	u := h.Update(Change{Updated: []object.Object{target}})
	if len(u.Hosts) != maxAliases+3 || len(u.Problems) != 2 {
		t.Fatalf("%d hosts have changed, and these are left out: %v", len(u.Hosts), u.Problems)
	}
	got := ips(t, h)
	if _, listed := got["s17"]; listed || strings.Count(got["s16"], "10.0.1.") != maxLent || strings.Count(got["s0"], "10.0.1.") != maxLent+1 {
		t.Errorf("the last aliases have the addresses %v", got)
	}
}

// row returns a Service, and aliases of which each stands for the one before.
func row(n int) []object.Object {
	objects := []object.Object{clusterIP("s0", "10.0.0.1")}
	for i := range n - 1 {
		objects = append(objects, external(fmt.Sprint("s", i+1), fmt.Sprintf("s%d.shop.svc.%s", i, domain)))
	}
	return objects
}
