package guard

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// VIPs returns the ranges of the VIPs of a [Guard]. They are apart from those of the mesh's automatic VIPs: a part of the
// reserved IPv4 addresses (RFC 1112, section 4), and a part of the IPv6 addresses for benchmarks (RFC 5180).
func VIPs() []netip.Prefix {
	first := firstVIP.pair()
	return []netip.Prefix{netip.PrefixFrom(first.V4, 10), netip.PrefixFrom(first.V6, 64).Masked()}
}

// IsVIP reports whether an address is in one of [VIPs].
func IsVIP(a netip.Addr) bool {
	return slices.ContainsFunc(VIPs(), func(r netip.Prefix) bool { return r.Contains(a.Unmap()) })
}

// IsPrivate reports whether an address is private: of RFC 1918, RFC 6598 or RFC 4193 (see [Policy].Private).
func IsPrivate(a netip.Addr) bool {
	return a.Unmap().IsPrivate() || netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64}), 10).Contains(a.Unmap())
}

const (
	// maxRecent is how many names below wildcards keep their VIPs. The least recently used gives way.
	maxRecent = 4096
	// maxTries is how many VIPs a name may have: of names that meet, the later takes its next VIP.
	maxTries = 8
)

// A Guard has the policy in use, the VIPs of the names that it allows, and records. It is safe for concurrent use. A nil *Guard
// has no policy.
type Guard struct {
	key   [sha256.Size]byte
	inUse atomic.Pointer[inUse]

	mu     sync.Mutex
	recent *simplelru.LRU[vip, wire.Name] // names below wildcards
	recorder
}

// inUse is a policy with the names that its rules of allow name themselves, by VIP. It is immutable.
type inUse struct {
	policy *Policy
	names  map[vip]wire.Name
}

// A vip stands for the VIPs of a name. It is the IPv4 address, and the end of the IPv6 address.
type vip uint32

const firstVIP vip = 240<<24 | 64<<16

// A Pair has the VIPs of a name.
type Pair struct{ V4, V6 netip.Addr }

func (v vip) pair() Pair {
	var four [4]byte
	binary.BigEndian.PutUint32(four[:], uint32(v))
	six := [16]byte{0x20, 0x01, 0, 2, 0, 0, 0x67, 0x75} // 2001:2:0:6775::
	copy(six[12:], four[:])
	return Pair{netip.AddrFrom4(four), netip.AddrFrom16(six)}
}

// vipAt returns the vip of an address that is one of a Guard.
func vipAt(a netip.Addr) vip {
	text := a.Unmap().AsSlice()
	return vip(binary.BigEndian.Uint32(text[len(text)-4:]))
}

// New returns a Guard without a policy. The VIPs of a name depend on the key and on the name only, unless names meet.
func New(key string) *Guard {
	g := &Guard{key: sha256.Sum256([]byte(key)), recorder: newRecorder()}
	g.recent, _ = simplelru.NewLRU[vip, wire.Name](maxRecent, nil) // fails only for a size below 1
	return g
}

// Use makes p the policy in use; nil for none. Names that p allows keep their VIPs.
func (g *Guard) Use(p *Policy) {
	next := &inUse{p, map[vip]wire.Name{}}
	if p != nil {
		for _, name := range p.exact() {
			if at, free := g.place(name, func(v vip) wire.Name { return next.names[v] }); free {
				next.names[at] = name
			}
		}
	}
	g.inUse.Store(next)
}

// Policy returns the policy in use, or nil.
func (g *Guard) Policy() *Policy {
	if g == nil {
		return nil
	}
	if u := g.inUse.Load(); u != nil {
		return u.policy
	}
	return nil
}

// VIPs returns the VIPs of a name that the policy allows.
func (g *Guard) VIPs(name wire.Name) Pair {
	g.mu.Lock()
	defer g.mu.Unlock()
	at, free := g.place(name, g.nameLocked)
	if free {
		g.recent.Add(at, wire.Name(strings.Clone(string(name))))
	}
	return at.pair()
}

// place returns the vip that a name has or, if it has none, the first of its own that is free. The function nameOf returns the
// name that has a vip, or the root. If other names have all, the name has to do with one of theirs.
func (g *Guard) place(name wire.Name, nameOf func(vip) wire.Name) (at vip, free bool) {
	for try := range maxTries {
		at = g.hash(name, try)
		if owner := nameOf(at); owner == name || owner == wire.Root {
			return at, owner == wire.Root
		}
	}
	return at, false
}

// hash returns the vip of a name at a try.
func (g *Guard) hash(name wire.Name, try int) vip {
	var memory [sha256.Size + 1 + wire.MaxNameLen]byte
	sum := sha256.Sum256(append(append(append(memory[:0], g.key[:]...), byte(try)), name...))
	const hosts = 254 // without addresses that end in .0 or .255, which some programs take for those of networks
	n := vip(binary.BigEndian.Uint64(sum[:]) % (1 << 22 / 256 * hosts))
	return firstVIP + n/hosts<<8 + n%hosts + 1
}

// nameLocked returns the name that has a vip, or the root.
func (g *Guard) nameLocked(at vip) wire.Name {
	if u := g.inUse.Load(); u != nil {
		if name := u.names[at]; name != wire.Root {
			return name
		}
	}
	name, _ := g.recent.Get(at)
	return name
}

// Name returns the name that has a VIP. It returns the root for other addresses, and for a VIP of no name that the policy
// allows, or of a name below a wildcard that has given way; see [Guard.Owns].
func (g *Guard) Name(addr netip.Addr) wire.Name {
	if !IsVIP(addr) {
		return wire.Root
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.nameLocked(vipAt(addr))
}

// Owns reports whether a VIP is one of a name, for a VIP that [Guard.Name] does not know: after a restart, or if the name has
// given way. It does not say whether the policy allows the name.
func (g *Guard) Owns(name wire.Name, addr netip.Addr) bool {
	for try := range maxTries {
		if g.hash(name, try) == vipAt(addr) {
			return true
		}
	}
	return false
}
