package hosts

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
)

// A Host has all claims to one host that may count. It does not change, except that it remembers its entries.
type Host struct {
	Key    string   // the host in lower case
	claims []*claim // those of Services first, then the older ones
	// contested is true if objects of several namespaces claim the host, and reserved if its name belongs to Services.
	contested, reserved bool
	shared              bool         // other namespaces see claims without an exportTo
	vips                []netip.Addr // the automatic VIPs, of both families; none if no claim wants one
	aliases             []alias      // what the claims stand for, each once

	variants atomic.Pointer[[]variant] // the entries that the host remembers; the slice is replaced, not changed
}

// An alias is the external name of a Service. The targets are the hosts that may answer for it: the host with that name,
// and the wildcards above it, the closest first. A client gets the addresses of the first one that it sees.
type alias struct {
	name    string
	targets []*Host
}

// listed returns 1 if the host is in the table of some client, and 0 if it is not or is nil.
func (h *Host) listed() int {
	if h != nil && slices.ContainsFunc(h.claims, func(c *claim) bool {
		return !c.dropped && (c.kubernetes() || c.addressed() || c.wantsVIP)
	}) {
		return 1
	}
	return 0
}

// vipsOf returns the automatic VIPs that the host has because of claims, of both families. A host that is a Service, or
// that has an address from an object, has none.
func (h *Host) vipsOf(claims []*claim) (vips []netip.Addr) {
	wanted := false
	for _, c := range claims {
		if c.addressed() || c.kubernetes() {
			return nil
		}
		if wanted = wanted || c.wantsVIP; c.wantsVIP {
			vips = append(vips, c.vips...)
		}
	}
	if wanted && len(vips) == 0 {
		return h.vips
	}
	return vips
}

// aliasOf returns what the host stands for because of claims; nil if the host has addresses itself.
func (h *Host) aliasOf(claims []*claim) *alias {
	if len(h.aliases) == 0 || slices.ContainsFunc(claims, (*claim).addressed) {
		return nil
	}
	for _, c := range claims {
		if i := slices.IndexFunc(h.aliases, func(a alias) bool { return c.alias == a.name }); i >= 0 {
			return &h.aliases[i]
		}
	}
	return nil
}

// audiences calls named with each namespace that may see the host in another way than others: those in the exportTo of a
// claim, and the namespace of a claim that only that namespace sees, or that counts only there because other namespaces
// also claim the host. For a long exportTo it calls named with "", which stands for any namespace. It calls inside with
// the namespaces of all claims. It looks at the claims of all hosts that reached yields, so it may make a call twice.
func (h *Host) audiences(named, inside func(namespace string)) {
	for host := range h.reached {
		for _, c := range host.claims {
			list := c.exportTo.Namespaces
			if len(list) > maxIndexed {
				list = []string{""}
			}
			for _, namespace := range list {
				named(namespace)
			}
			if host.contested || c.private || c.hidden {
				named(c.namespace)
			}
			inside(c.namespace)
		}
	}
}

// reached yields the host, and the hosts that may answer for its aliases, at most maxAliases aliases away. h may be nil.
func (h *Host) reached(yield func(*Host) bool) {
	if h == nil || !yield(h) || len(h.aliases) == 0 {
		return
	}
	seen, last := map[*Host]bool{h: true}, []*Host{h}
	for range maxAliases {
		var next []*Host
		for _, host := range last {
			for t := range host.answering {
				if !seen[t] {
					seen[t], next = true, append(next, t)
				}
			}
		}
		for _, t := range next {
			if !yield(t) {
				return
			}
		}
		last = next
	}
}

// answering yields the hosts that may answer for an alias of the host. A host may come twice.
func (h *Host) answering(yield func(*Host) bool) {
	for _, a := range h.aliases {
		for _, t := range a.targets {
			if !yield(t) {
				return
			}
		}
	}
}

// maxVariants bounds the entries that a host remembers. There may be many: a Sidecar that is edited again and again may
// show other claims each time.
const maxVariants = 64

// variant returns the entry with a key, made of claims. It calls build if the host does not remember the entry.
func (h *Host) variant(key variantKey, claims []*claim, build func() *Entry) *Entry {
	for {
		known := h.variants.Load()
		if known != nil {
			for _, one := range *known {
				if one.key == key && slices.Equal(one.claims, claims) {
					return one.entry
				}
			}
		}
		entry, next := build(), []variant(nil)
		if known != nil {
			next = slices.Clip(*known)
			if i := slices.IndexFunc(next, func(v variant) bool { return !v.entry.Differs(entry) }); i >= 0 {
				entry = next[i].entry
			}
		}
		if len(next) >= maxVariants {
			next = nil
		}
		if next = append(next, variant{key, slices.Clone(claims), entry}); h.variants.CompareAndSwap(known, &next) {
			return entry
		}
	}
}

// A variant is an entry of a host, with all that determines it. Views for which this is the same share the entry.
type variant struct {
	key    variantKey
	claims []*claim // that count
	entry  *Entry
}

// variantKey is what determines the entry of a host besides the claims that count.
type variantKey struct {
	families Families
	vips     bool
	near     nearCluster
	alias    string // the name at the end of the chain of aliases
	target   *Entry // that answers for it; nil for none
}

// nearCluster is the cluster whose endpoints come first, if set.
type nearCluster struct {
	id  clusterID
	set bool
}

// A HostChange is a host before and after a change. Old is nil if the host is new; New is nil if the host was removed.
type HostChange struct {
	Old, New *Host
}

// chained returns the changes of first and those of second, which follow them, sorted by key.
func chained(first, second []HostChange) []HostChange {
	all := slices.Concat(first, second)
	slices.SortStableFunc(all, func(a, b HostChange) int { return strings.Compare(a.Key(), b.Key()) })
	var joined []HostChange
	for i, c := range all {
		if i > 0 && all[i-1].Key() == c.Key() {
			joined[len(joined)-1].New = c.New
		} else {
			joined = append(joined, c)
		}
	}
	return slices.DeleteFunc(joined, func(c HostChange) bool { return c == HostChange{} })
}

// Key returns the key of the host.
func (c HostChange) Key() string {
	if c.New != nil {
		return c.New.Key
	}
	return c.Old.Key
}

const (
	first4, last4 = 128, 255 // the second bytes of 240.128.0.0/9
	istiod4       = 240      // of istiod's VIPs, in 240.240.0.0/16
	vips4         = (last4 - first4) * 256 * 254
)

// automaticVIPs returns the automatic VIPs of a host. They depend on the name of the host and on the cluster only, so they
// never change, whatever other hosts there are, and all replicas agree. Nobody can compute them without the key of the
// cluster.
//
// Of 10,000 hosts, about 6 pairs share an IPv4 address. Connections to it lead by the name that the client says, as behind
// a wildcard. If one of the two moved instead, clients that had resolved it would reach the other one.
//
// The addresses are in the ranges of [object.IsVIP], without 240.240.0.0/16, from which istiod gives VIPs, and without
// addresses that end in .0 or .255, which some programs take for addresses of networks.
func automaticVIPs(clusterKey, hostKey string) []netip.Addr {
	mac := hmac.New(sha256.New, []byte(clusterKey))
	_, _ = mac.Write([]byte(hostKey)) // never fails
	sum := mac.Sum(nil)
	n := binary.BigEndian.Uint64(sum) % vips4
	four := [4]byte{240, byte(first4 + n/254/256), byte(n / 254), byte(n%254 + 1)}
	if four[1] >= istiod4 {
		four[1]++
	}
	six := [16]byte{0x20, 0x01, 0, 2}
	copy(six[8:], sum[8:16])
	return []netip.Addr{netip.AddrFrom4(four), netip.AddrFrom16(six)}
}
