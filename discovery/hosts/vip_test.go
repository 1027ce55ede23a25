package hosts

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/discovery/object"
)

func wantHosts(hosts ...string) map[string]bool {
	out := map[string]bool{}
	for _, h := range hosts {
		out[h] = true
	}
	return out
}

// allocator updates VIPs with all wanted hosts and all claimed slots.
type allocator struct {
	*VIPs
	wanted  map[string]bool
	claimed map[uint16]bool
}

func newAllocator() *allocator { return &allocator{VIPs: NewVIPs()} }

// allocate returns the slots of the wanted hosts, and the hosts that had to leave theirs.
func (a *allocator) allocate(wanted map[string]bool, claimed map[uint16]bool) (slots map[string]uint16, moved []string) {
	change := vipChange{wanted: maps.Clone(wanted)}
	for host := range a.wanted {
		if !wanted[host] {
			change.wanted[host] = false
		}
	}
	for slot := range a.claimed {
		change.released = append(change.released, slot)
	}
	change.claimed = slices.Collect(maps.Keys(claimed))
	a.wanted, a.claimed = maps.Clone(wanted), claimed
	moved = a.update(change).moved
	slots = map[string]uint16{}
	for host := range wanted {
		if slot, ok := a.slot(host); ok {
			slots[host] = slot
		}
	}
	return slots, moved
}

// colliding returns n hosts that prefer the same slot.
func colliding(n int) []string {
	bySlot := map[uint16][]string{}
	for i := 0; ; i++ {
		h := fmt.Sprintf("h%d.example.com", i)
		slot := preferredSlot(h)
		if bySlot[slot] = append(bySlot[slot], h); len(bySlot[slot]) == n {
			return bySlot[slot]
		}
	}
}

func TestSlots(t *testing.T) {
	for n := range vipUsable {
		slot := nthSlot(n)
		if !usableSlot(slot) {
			t.Fatalf("slot %d is not usable", slot)
		}
		for _, a := range []netip.Addr{slotAddr4(slot), slotAddr6(slot)} {
			if got, ok := addrSlot(a); !ok || got != slot {
				t.Fatalf("%s is slot %d, %t; want %d", a, got, ok, slot)
			}
		}
	}
	if a4, a6 := slotAddr4(0x105), slotAddr6(0x105); a4.String() != "240.240.1.5" || a6.String() != "2001:2::105" {
		t.Errorf("slot 0x105 is %s and %s", a4, a6)
	}
	for _, s := range []string{"240.241.0.5", "10.0.0.1", "2001:3::5", "2001:2::1:0:5"} {
		if slot, ok := addrSlot(netip.MustParseAddr(s)); ok {
			t.Errorf("%s is said to be slot %d", s, slot)
		}
	}
}

func TestVIPCollisions(t *testing.T) {
	hosts := colliding(3)
	v := newAllocator()
	first, _ := v.allocate(wantHosts(hosts[2]), nil)
	if first[hosts[2]] != preferredSlot(hosts[2]) {
		t.Error("alone, a host is not on its preferred slot")
	}
	all, _ := v.allocate(wantHosts(hosts...), nil)
	if all[hosts[2]] != first[hosts[2]] {
		t.Error("a newcomer moved an older host")
	}
	seen := map[uint16]bool{}
	for _, slot := range all {
		seen[slot] = true
	}
	if len(seen) != 3 {
		t.Errorf("3 hosts share %d slots", len(seen))
	}

	// A host is removed and added again. Meanwhile another one wants its slot.
	v.allocate(wantHosts(hosts[0], hosts[1]), nil)
	v.allocate(wantHosts(hosts[0], hosts[1], "new.example.com"), nil)
	again, _ := v.allocate(wantHosts(hosts...), nil)
	if again[hosts[2]] != first[hosts[2]] {
		t.Error("a host that came back has another slot")
	}

	// Without saved VIPs, the slots depend on the hosts only.
	fresh, _ := newAllocator().allocate(wantHosts(hosts...), nil)
	other, _ := newAllocator().allocate(wantHosts(hosts...), nil)
	if diff := cmp.Diff(fresh, other); diff != "" {
		t.Error(diff)
	}
}

func TestClaimedSlots(t *testing.T) {
	host := "a.example.com"
	slot := preferredSlot(host)
	v := newAllocator()
	slots, _ := v.allocate(wantHosts(host), map[uint16]bool{slot: true})
	if slots[host] == slot {
		t.Error("a claimed slot was given out")
	}
	later, moved := v.allocate(wantHosts(host), map[uint16]bool{slots[host]: true})
	if later[host] == slots[host] || fmt.Sprint(moved) != "["+host+"]" {
		t.Errorf("an address that was claimed later stays with the host; moved %v", moved)
	}
	var addrs []netip.Addr
	for _, text := range []string{"240.240.1.5", "2001:2::207", "192.0.2.1"} {
		addrs = append(addrs, netip.MustParseAddr(text))
	}
	claims := entryClaims(object.Key{}, &object.ServiceEntry{Hosts: []string{"x.y"}, Addrs: addrs, HasAddresses: true})
	if diff := cmp.Diff([]uint16{0x105, 0x207}, slotsOf(claims)); diff != "" {
		t.Error(diff)
	}
}

// When all slots are used, a new host gets the slot of the host that was removed first.
func TestVIPsExhausted(t *testing.T) {
	const free = 500
	claimed, hosts := takenSlots(free), map[string]bool{}
	for i := range free {
		hosts[fmt.Sprintf("h%d", i)] = true
	}
	v := newAllocator()
	slots, _ := v.allocate(hosts, claimed)
	if len(slots) != free || len(v.withoutSlot.keys) != 0 {
		t.Fatalf("%d of %d hosts got a slot", len(slots), free)
	}
	hosts["newcomer"] = true
	v.allocate(hosts, claimed)
	if got := v.withoutSlot.sorted(); fmt.Sprint(got) != "[newcomer]" {
		t.Fatalf("without a slot: %v", got)
	}
	before := maps.Clone(v.byHost)
	delete(hosts, "newcomer")
	delete(hosts, "h7")
	v.allocate(hosts, claimed)
	delete(hosts, "h3")
	v.allocate(hosts, claimed)
	hosts["newcomer"] = true
	if slots, _ = v.allocate(hosts, claimed); slots["newcomer"] != before["h7"].Slot {
		t.Errorf("newcomer got slot %d, want h7's, %d", slots["newcomer"], before["h7"].Slot)
	}
}
