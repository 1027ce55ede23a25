package hosts

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
)

// Automatic VIPs are from 240.240.0.0/16 and 2001:2::/48, Istio's ranges, which are not routed anywhere. A host has a
// VIP in each range, with the same low 16 bits. These bits are the host's slot: slot 0x0105 is 240.240.1.5 and
// 2001:2::105.
const (
	vipUsable = 256 * 254 // number of slots, without the addresses that end in .0 and .255
)

// VIPs holds the automatic VIPs of hosts. A host that is removed keeps its VIP as long as there are
// free VIPs: if the host is added again, clients that resolved it before still reach it. Make VIPs
// with [NewVIPs] or [DecodeVIPs].
type VIPs struct {
	byHost map[string]vipHost // by hostKey
	bySlot map[uint16]string  // hosts, by their slot
	// rounds counts the updates in which hosts were removed, see markRemoved.
	rounds      uint64
	withoutSlot listed[string] // hosts that found no free slot
	inUse       int            // hosts that want a VIP and have a slot
	// claimed counts, by usable slot, the addresses in objects that are VIPs of the slot. No host may have one of these
	// slots.
	claimed map[uint16]int
}

type vipHost struct {
	Slot uint16 `json:"slot"`
	// Removed is 0 while the host wants a VIP, otherwise the round in which it was removed.
	// The host that was removed first loses its slot first.
	Removed uint64 `json:"gone,omitempty"`
}

// NewVIPs returns VIPs without any host.
func NewVIPs() *VIPs {
	return &VIPs{
		byHost: map[string]vipHost{}, bySlot: map[uint16]string{}, claimed: map[uint16]int{},
	}
}

// DecodeVIPs returns the VIPs that [VIPs.Encode] has encoded.
func DecodeVIPs(data []byte) (*VIPs, error) {
	v := NewVIPs()
	if err := json.Unmarshal(data, &v.byHost); err != nil {
		return nil, fmt.Errorf("hosts: %w", err)
	}
	if v.byHost == nil { // "null"
		v.byHost = map[string]vipHost{}
	}
	for host, h := range v.byHost {
		if other, taken := v.bySlot[h.Slot]; taken || !usableSlot(h.Slot) {
			return nil, fmt.Errorf("slot %d of %q is out of range, or already belongs to %q", h.Slot, host, other)
		}
		v.bySlot[h.Slot] = host
		v.rounds = max(v.rounds, h.Removed)
		if h.Removed == 0 {
			v.inUse++
		}
	}
	return v, nil
}

// usableSlot reports whether a slot looks like neither a network address nor a broadcast address.
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

// preferredSlot returns the slot that a host gets if that slot is free. It depends on the name only, so servers
// that start with the same hosts agree.
func preferredSlot(host string) uint16 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(host)) // never fails
	sum := h.Sum64()
	sum ^= sum >> 32 // FNV's low bits alone differ little between similar names
	return nthSlot(int(sum % vipUsable))
}

// nthSlot returns the n-th usable slot, from 0.
func nthSlot(n int) uint16 { return uint16(n/254)<<8 | uint16(n%254+1) }

// A vipChange says which hosts want a VIP from now on. It also says which slots objects have as addresses now, and
// which they had before.
type vipChange struct {
	wanted   map[string]bool // by hostKey: true if the host wants a VIP, false if it does not
	claimed  []uint16        // slots of addresses that objects have now, once for each address
	released []uint16        // slots of addresses that objects had before, once for each address
}

// vipResult is the result of [VIPs.update].
type vipResult struct {
	changed map[string]bool // hosts that have another VIP than before, or none
	unsaved bool            // the result of Encode has changed
	moved   []string        // hosts that have lost their slot, sorted
}

// slotsOf returns the usable slots of the VIPs that controllers have given to claims, once for each address. Addresses
// that authors of objects choose take no slot: otherwise they could take the VIP of another namespace's host.
func slotsOf(claims []claim) []uint16 {
	var all []uint16
	for i := range claims {
		for _, a := range claims[i].vips {
			if slot, ok := addrSlot(a); ok && usableSlot(slot) {
				all = append(all, slot)
			}
		}
	}
	return all
}

// Encode returns the VIPs as JSON.
func (v *VIPs) Encode() ([]byte, error) { return json.Marshal(v.byHost) }

// Len returns the number of hosts that have a VIP, or had one before they were removed.
func (v *VIPs) Len() int { return len(v.byHost) }

// update gives a slot to every host that wants a VIP. A host whose slot has become the address of an object gets
// another slot.
func (v *VIPs) update(c vipChange) vipResult {
	r := vipResult{changed: map[string]bool{}}
	v.release(c.released)
	slotless := map[string]bool{} // hosts that need a slot, besides withoutSlot
	for _, slot := range c.claimed {
		if v.claimed[slot]++; v.claimed[slot] > 1 {
			continue
		}
		host, taken := v.bySlot[slot]
		if !taken {
			continue
		}
		if h := v.remove(host); h.Removed == 0 {
			r.moved = append(r.moved, host)
			r.changed[host], slotless[host] = true, true
		}
		r.unsaved = true
	}
	v.markRemoved(c.wanted, slotless, &r)
	v.allocate(slotless, &r)
	r.moved = slices.DeleteFunc(r.moved, func(host string) bool { return !slotless[host] })
	slices.Sort(r.moved)
	return r
}

// allocate gives a slot to each host in slotless and withoutSlot: a free slot or, if all are used, the slot of the host
// that was removed first. The removed hosts are listed once for all hosts. If there is no slot to give, allocate does
// not look at the hosts in withoutSlot, because there may be many more of them than slots.
func (v *VIPs) allocate(slotless map[string]bool, r *vipResult) {
	free, reusable := vipUsable-len(v.bySlot)-len(v.claimed), len(v.byHost)-v.inUse
	if free+reusable == 0 {
		for host := range slotless {
			v.withoutSlot.set(host, host)
		}
		return
	}
	all := maps.Clone(slotless)
	for host := range v.withoutSlot.byKey {
		all[host] = true
	}
	var removed []string
	if free < len(all) {
		removed = v.removed()
	}
	for _, host := range sortedKeys(all) {
		var slot uint16
		switch {
		case free > 0:
			free--
			slot = v.freeSlot(host)
		case len(removed) > 0:
			slot = v.remove(removed[0]).Slot
			removed = removed[1:]
		default:
			v.withoutSlot.set(host, host)
			continue
		}
		v.withoutSlot.set(host)
		v.byHost[host], v.bySlot[slot] = vipHost{Slot: slot}, host
		v.inUse++
		r.changed[host], r.unsaved = true, true
	}
}

// release notes that objects no longer have the addresses of slots.
func (v *VIPs) release(slots []uint16) {
	for _, slot := range slots {
		if v.claimed[slot]--; v.claimed[slot] == 0 {
			delete(v.claimed, slot)
		}
	}
}

// remove takes the slot of a host away.
func (v *VIPs) remove(host string) vipHost {
	h := v.byHost[host]
	delete(v.byHost, host)
	delete(v.bySlot, h.Slot)
	if h.Removed == 0 {
		v.inUse--
	}
	return h
}

// markRemoved marks the hosts that no longer want a VIP as removed, unmarks removed hosts that want one
// again, and adds the hosts that need a slot to slotless.
func (v *VIPs) markRemoved(wanted, slotless map[string]bool, r *vipResult) {
	removed := false
	for host, want := range wanted {
		h, has := v.byHost[host]
		switch {
		case want && !has:
			slotless[host] = true
		case want && h.Removed != 0:
			v.byHost[host] = vipHost{Slot: h.Slot}
			v.inUse++
			r.changed[host], r.unsaved = true, true
		case !want && has && h.Removed == 0:
			v.byHost[host] = vipHost{Slot: h.Slot, Removed: v.rounds + 1}
			v.inUse--
			r.changed[host], removed = true, true
		case !want:
			delete(slotless, host)
			v.withoutSlot.set(host)
		}
	}
	if removed {
		v.rounds++
		r.unsaved = true
	}
}

// slot returns the slot of a host that wants a VIP.
func (v *VIPs) slot(host string) (uint16, bool) {
	h, ok := v.byHost[host]
	return h.Slot, ok && h.Removed == 0
}

// freeSlot returns the first free slot, starting with the host's preferred slot. There must be a free slot.
func (v *VIPs) freeSlot(host string) uint16 {
	slot := preferredSlot(host)
	for !usableSlot(slot) || !v.isFree(slot) {
		slot++
	}
	return slot
}

// removed returns the hosts that were removed, in the order of their removal.
func (v *VIPs) removed() []string {
	var hosts []string
	for host, h := range v.byHost {
		if h.Removed != 0 {
			hosts = append(hosts, host)
		}
	}
	slices.SortFunc(hosts, func(a, b string) int {
		return cmp.Or(cmp.Compare(v.byHost[a].Removed, v.byHost[b].Removed), cmp.Compare(a, b))
	})
	return hosts
}

func (v *VIPs) isFree(slot uint16) bool { return v.bySlot[slot] == "" && v.claimed[slot] == 0 }
