package hosts

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/nametap/nametap/discovery/object"
)

// takenSlots returns all usable slots but as many as are free, which are spread over the range.
func takenSlots(free int) map[uint16]bool {
	taken := map[uint16]bool{}
	for n := range vipUsable {
		if n*free/vipUsable == (n+1)*free/vipUsable {
			taken[nthSlot(n)] = true
		}
	}
	return taken
}

// allocated returns how many bytes were allocated so far.
func allocated() uint64 {
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.TotalAlloc
}

// D64: a change costs little while no VIP is left, whatever the number of hosts without one. When some are free again, the
// hosts without one look for them once, together.
func TestChangeWithoutFreeVIPs(t *testing.T) {
	const free, more = 1000, 50_000
	h := New(domain, 1, NewVIPs())
	var taken []string // by an object that has these addresses itself
	for slot := range takenSlots(free) {
		taken = append(taken, slotAddr4(slot).String())
	}
	all := []object.Object{}
	for i := range free + more {
		name := fmt.Sprintf("h%d", i)
		all = append(all, entry(name, name+".example.com"))
	}
	h.Update(Change{Updated: []object.Object{entry("taken", "taken.example.com", taken...)}})
	h.Update(Change{Updated: all})
	const changes = 10
	before := allocated()
	for i := range changes {
		if u := h.Update(Change{Updated: []object.Object{clusterIP("web", fmt.Sprintf("10.0.0.%d", i+1))}}); len(u.WithoutVIP) != more {
			t.Fatalf("%d hosts have no VIP, want %d", len(u.WithoutVIP), more)
		}
	}
	if each := (allocated() - before) / changes; each > 256<<10 {
		t.Errorf("a change allocated %d KiB", each>>10)
	}
	u := h.Update(Change{Removed: []object.Key{all[0].Key, all[1].Key}})
	if len(u.WithoutVIP) != more-2 {
		t.Errorf("after two hosts were removed, %d have no VIP, want %d", len(u.WithoutVIP), more-2)
	}
}
