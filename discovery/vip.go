package discovery

import (
	"cmp"
	"hash/fnv"
	"net/netip"
	"slices"
)

// Automatic addresses come from 240.240.0.0/16 and 2001:2::/48, Istio's
// ranges, which are routed nowhere. A slot is the low 16 bits of both: slot
// 0x0105 is 240.240.1.5 and 2001:2::105.
const (
	vipSlots  = 1 << 16
	vipUsable = 256 * 254 // without the addresses that end in .0 and .255
)

// vips remembers which host has which slot. A host keeps its slot for as long
// as there is room, also while it is away: who resolved it before a delete
// and an add goes on reaching it. The zero value is empty.
type vips struct {
	byHost map[string]vipHost // by hostKey
	// clock counts the rounds in which a host went away.
	clock uint64
}

type vipHost struct {
	Slot uint16 `json:"slot"`
	// Gone is 0 while the host is wanted, else the round in which it went:
	// those that went first lose their slot first.
	Gone uint64 `json:"gone,omitempty"`
}

// usableSlot leaves out what looks like a network or a broadcast address.
func usableSlot(slot uint16) bool { return slot&0xff != 0 && slot&0xff != 0xff }

// slotAddr4 and slotAddr6 are the addresses of a slot.
func slotAddr4(slot uint16) netip.Addr {
	return netip.AddrFrom4([4]byte{240, 240, byte(slot >> 8), byte(slot)})
}

func slotAddr6(slot uint16) netip.Addr {
	return netip.AddrFrom16([16]byte{0x20, 0x01, 0, 2, 14: byte(slot >> 8), 15: byte(slot)})
}

// addrSlot is the slot whose address a is, if it is one's.
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

// preferredSlot is where a host goes if nobody is there: the same on every
// server that starts with the same hosts.
func preferredSlot(host string) uint16 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(host)) // never fails
	sum := h.Sum64()
	sum ^= sum >> 32 // FNV's low bits alone differ little between similar names
	return nthSlot(int(sum % vipUsable))
}

func nthSlot(n int) uint16 { return uint16(n/254)<<8 | uint16(n%254+1) }

// allocation is the outcome of one round.
type allocation struct {
	slots   map[string]uint16 // by hostKey
	changed bool              // the state is not what it was
	moved   []string          // hosts that had to leave their slot, sorted
	without []string          // hosts for which there was no room, sorted
}

// allocate gives every wanted host a slot. Slots in claimed are somebody's own
// addresses and are never given out; a host that sits on one moves.
func (v *vips) allocate(wanted map[string]bool, claimed map[uint16]bool) allocation {
	a := allocation{slots: make(map[string]uint16, len(wanted))}
	if v.byHost == nil {
		v.byHost = map[string]vipHost{}
	}
	used := make(map[uint16]bool, len(v.byHost)+len(claimed))
	for slot := range claimed {
		used[slot] = true
	}
	a.changed = v.settle(wanted, claimed, &a)
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

// settle marks who came back and who went, and turns out who sits on a claimed
// slot. It reports whether anything changed.
func (v *vips) settle(wanted map[string]bool, claimed map[uint16]bool, a *allocation) bool {
	changed, gone := false, false
	for host, h := range v.byHost {
		switch {
		case claimed[h.Slot]:
			delete(v.byHost, host)
			if wanted[host] {
				a.moved = append(a.moved, host)
			}
			changed = true
		case wanted[host] && h.Gone != 0:
			v.byHost[host] = vipHost{Slot: h.Slot}
			changed = true
		case !wanted[host] && h.Gone == 0:
			v.byHost[host] = vipHost{Slot: h.Slot, Gone: v.clock + 1}
			gone = true
		}
	}
	if gone {
		v.clock++
	}
	slices.Sort(a.moved)
	return changed || gone
}

// freeSlot probes from the host's preferred slot on; when all are used it
// takes that of the host that went away first.
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
		if h.Gone == 0 {
			continue
		}
		if oldest == "" || cmp.Or(cmp.Compare(h.Gone, v.byHost[oldest].Gone), cmp.Compare(name, oldest)) < 0 {
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

// hasFree is asked only when nearly all slots are used.
func hasFree(used map[uint16]bool) bool {
	for n := range vipUsable {
		if !used[nthSlot(n)] {
			return true
		}
	}
	return false
}

// claimedSlots are the slots that objects claim by an address of their own.
func claimedSlots(claims []claim) map[uint16]bool {
	claimed := map[uint16]bool{}
	for _, c := range claims {
		for _, a := range slices.Concat(c.addrs, c.literal) {
			if slot, ok := addrSlot(a); ok {
				claimed[slot] = true
			}
		}
	}
	return claimed
}

// wantedVIPs are the hosts that shall have an automatic address.
func wantedVIPs(claims []claim) map[string]bool {
	wanted := map[string]bool{}
	for _, c := range claims {
		if c.wantsVIP {
			wanted[hostKey(c.host)] = true
		}
	}
	return wanted
}
