package discovery

import (
	"cmp"
	"hash/fnv"
	"net/netip"
	"slices"
)

// Automatic VIPs are from 240.240.0.0/16 and 2001:2::/48, Istio's ranges, which are not
// routed anywhere. A slot is the low 16 bits of both: slot 0x0105 is 240.240.1.5 and
// 2001:2::105.
const (
	vipSlots  = 1 << 16
	vipUsable = 256 * 254 // without the addresses that end in .0 and .255
)

// vips maps hosts to slots. A host keeps its slot as long as there are free ones, even
// after it was removed: a client that resolved it before it is removed and added again
// still reaches it. The zero value is empty.
type vips struct {
	byHost map[string]vipHost // by hostKey
	// rounds counts the calls of allocate in which hosts were removed.
	rounds uint64
}

type vipHost struct {
	Slot uint16 `json:"slot"`
	// Removed is 0 while the host is wanted, else the round in which it was removed. The
	// host that was removed first loses its slot first.
	Removed uint64 `json:"gone,omitempty"`
}

// usableSlot excludes the slots that look like a network or a broadcast address.
func usableSlot(slot uint16) bool { return slot&0xff != 0 && slot&0xff != 0xff }

// slotAddr4 returns the IPv4 address of a slot.
func slotAddr4(slot uint16) netip.Addr {
	return netip.AddrFrom4([4]byte{240, 240, byte(slot >> 8), byte(slot)})
}

// slotAddr6 returns the IPv6 address of a slot.
func slotAddr6(slot uint16) netip.Addr {
	return netip.AddrFrom16([16]byte{0x20, 0x01, 0, 2, 14: byte(slot >> 8), 15: byte(slot)})
}

// addrSlot returns the slot of an address, and false if the address is in neither range.
func addrSlot(a netip.Addr) (uint16, bool) {
	var slot uint16
	if a.Is4() {
		b := a.As4()
		slot = uint16(b[2])<<8 | uint16(b[3])
		return slot, slotAddr4(slot) == a
	}
	b := a.As16()
	slot = uint16(b[14])<<8 | uint16(b[15])
	return slot, slotAddr6(slot) == a
}

// preferredSlot returns the slot that a host gets if it is free. It depends on the name
// only, so servers that start with the same hosts agree.
func preferredSlot(host string) uint16 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(host)) // never fails
	sum := h.Sum64()
	sum ^= sum >> 32 // FNV's low bits alone differ little between similar names
	return nthSlot(int(sum % vipUsable))
}

// nthSlot returns the n-th usable slot, from 0.
func nthSlot(n int) uint16 { return uint16(n/254)<<8 | uint16(n%254+1) }

// allocation is the result of [vips.allocate].
type allocation struct {
	slots   map[string]uint16 // by hostKey
	changed bool              // the VIPs have to be saved
	moved   []string          // hosts that had to leave their slot, sorted
	without []string          // hosts that found no free slot, sorted
}

// allocate gives a slot to every wanted host. A slot in claimed is the address of another
// object, so no host may have it: a host that has it gets another one.
func (v *vips) allocate(wanted map[string]bool, claimed map[uint16]bool) allocation {
	a := allocation{slots: make(map[string]uint16, len(wanted))}
	if v.byHost == nil {
		v.byHost = map[string]vipHost{}
	}
	used := make(map[uint16]bool, len(v.byHost)+len(claimed))
	for slot := range claimed {
		used[slot] = true
	}
	a.changed = v.markRemoved(wanted, claimed, &a)
	for _, h := range v.byHost {
		used[h.Slot] = true
	}
	for _, host := range sortedKeys(wanted) {
		if h, ok := v.byHost[host]; ok {
			a.slots[host] = h.Slot
			continue
		}
		slot, ok := v.freeSlot(host, used)
		if !ok {
			a.without = append(a.without, host)
			continue
		}
		used[slot], a.slots[host], a.changed = true, slot, true
		v.byHost[host] = vipHost{Slot: slot}
	}
	return a
}

// markRemoved marks the hosts that are no longer wanted, clears the mark of those that are
// wanted again, and deletes the hosts of claimed slots. It reports whether anything
// changed.
func (v *vips) markRemoved(wanted map[string]bool, claimed map[uint16]bool, a *allocation) bool {
	changed, removed := false, false
	for host, h := range v.byHost {
		switch {
		case claimed[h.Slot]:
			delete(v.byHost, host)
			if wanted[host] {
				a.moved = append(a.moved, host)
			}
			changed = true
		case wanted[host] && h.Removed != 0:
			v.byHost[host] = vipHost{Slot: h.Slot}
			changed = true
		case !wanted[host] && h.Removed == 0:
			v.byHost[host] = vipHost{Slot: h.Slot, Removed: v.rounds + 1}
			removed = true
		}
	}
	if removed {
		v.rounds++
	}
	slices.Sort(a.moved)
	return changed || removed
}

// freeSlot returns the first free slot from the host's preferred one on. If all are used,
// it returns the slot of the host that was removed first, and deletes that host.
func (v *vips) freeSlot(host string, used map[uint16]bool) (uint16, bool) {
	if len(used) < vipUsable || hasFree(used) {
		slot := preferredSlot(host)
		for range vipSlots {
			if usableSlot(slot) && !used[slot] {
				return slot, true
			}
			slot++
		}
	}
	oldest := ""
	for name, h := range v.byHost {
		if h.Removed == 0 {
			continue
		}
		if oldest == "" || cmp.Or(cmp.Compare(h.Removed, v.byHost[oldest].Removed), cmp.Compare(name, oldest)) < 0 {
			oldest = name
		}
	}
	if oldest == "" {
		return 0, false
	}
	slot := v.byHost[oldest].Slot
	delete(v.byHost, oldest)
	return slot, true
}

// hasFree reports whether a usable slot is free. It is slow; call it only when nearly all
// slots are used.
func hasFree(used map[uint16]bool) bool {
	for n := range vipUsable {
		if !used[nthSlot(n)] {
			return true
		}
	}
	return false
}

// claimedSlots returns the slots that are addresses of objects.
func claimedSlots(claims []claim) map[uint16]bool {
	claimed := map[uint16]bool{}
	for _, c := range claims {
		for _, a := range slices.Concat(c.addrs, c.literal, c.vips) {
			if slot, ok := addrSlot(a); ok {
				claimed[slot] = true
			}
		}
	}
	return claimed
}

// wantedVIPs returns the hosts that need a slot.
func wantedVIPs(claims []claim) map[string]bool {
	wanted := map[string]bool{}
	for _, c := range claims {
		if c.wantsVIP {
			wanted[hostKey(c.host)] = true
		}
	}
	for _, c := range claims {
		if len(c.vips) > 0 {
			delete(wanted, hostKey(c.host)) // a controller has given it one
		}
	}
	return wanted
}
