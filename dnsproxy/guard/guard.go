package guard

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// VIPs returns the ranges of the VIPs of a [Guard]. They are apart from those of the mesh's automatic VIPs: a part of the
// reserved IPv4 addresses (RFC 1112, section 4), and a part of the IPv6 addresses for benchmarks (RFC 5180).
func VIPs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("240.64.0.0/10"), netip.MustParsePrefix("2001:2:0:6775::/64")}
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
	// maxRecent is how many names below wildcards keep their VIPs. The least recently asked gives way.
	maxRecent = 4096
	// maxTries is how many VIPs a name may have: of names that meet, the later takes its next VIP.
	maxTries = 8
)

// A Guard has the policy in use and the VIPs of the names that it allows. It is safe for concurrent use. A nil *Guard has no
// policy.
type Guard struct {
	recorder

	key   []byte
	inUse atomic.Pointer[inUse]

	mu     sync.Mutex
	recent *simplelru.LRU[wire.Name, Pair] // of names below wildcards
	names  map[netip.Addr]wire.Name        // of the VIPs in recent
}

// inUse is a policy with the VIPs of the names that its rules name themselves. It is immutable.
type inUse struct {
	policy *Policy
	since  time.Time
	vips   map[wire.Name]Pair
	names  map[netip.Addr]wire.Name
}

// A Pair has the VIPs of a name.
type Pair struct{ V4, V6 netip.Addr }

// New returns a Guard without a policy. The VIPs of a name depend on the key and on the name only, unless names meet.
func New(key string) *Guard {
	g := &Guard{key: []byte(key), names: map[netip.Addr]wire.Name{}}
	g.init()
	g.recent, _ = simplelru.NewLRU(maxRecent, func(_ wire.Name, gone Pair) { // fails only for a size below 1
		delete(g.names, gone.V4)
		delete(g.names, gone.V6)
	})
	return g
}

// Use makes p the policy in use; nil for none. Names that p allows keep their VIPs.
func (g *Guard) Use(p *Policy) {
	if p == nil {
		g.inUse.Store(nil)
		return
	}
	next := &inUse{p, time.Now(), map[wire.Name]Pair{}, map[netip.Addr]wire.Name{}}
	for _, name := range p.exact() {
		next.vips[name] = g.place(name, next.names, nil)
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

// InUse returns since when the policy is in use.
func (g *Guard) InUse() time.Time {
	if u := g.inUse.Load(); u != nil {
		return u.since
	}
	return time.Time{}
}

// VIPs returns the VIPs of a name that the policy allows.
func (g *Guard) VIPs(name wire.Name) Pair {
	var exact map[netip.Addr]wire.Name
	if u := g.inUse.Load(); u != nil {
		if pair, found := u.vips[name]; found {
			return pair
		}
		exact = u.names
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if pair, found := g.recent.Get(name); found {
		return pair
	}
	name = wire.Name(strings.Clone(string(name)))
	pair := g.place(name, g.names, exact)
	g.recent.Add(name, pair)
	return pair
}

// place returns the VIPs of a name, and enters them in names. VIPs that another name has in names or in others are passed
// over. With some thousand names, it is hardly possible that all tries meet.
func (g *Guard) place(name wire.Name, names, others map[netip.Addr]wire.Name) (pair Pair) {
	free := func(vip netip.Addr) bool { return names[vip] == "" && others[vip] == "" }
	for try := range maxTries {
		if pair = g.hash(name, try); free(pair.V4) && free(pair.V6) {
			break
		}
	}
	names[pair.V4], names[pair.V6] = name, name
	return pair
}

// hash returns the VIPs that a name has at a try.
func (g *Guard) hash(name wire.Name, try int) Pair {
	mac := hmac.New(sha256.New, g.key)
	_, _ = mac.Write([]byte{byte(try)}) // never fails
	_, _ = mac.Write([]byte(name))
	sum := mac.Sum(nil)
	ranges := VIPs()
	const hosts = 1 << 22 / 256 * 254 // without addresses that end in .0 or .255, which some programs take for those of networks
	n := binary.BigEndian.Uint64(sum) % hosts
	four := ranges[0].Addr().As4()
	four[1], four[2], four[3] = four[1]+byte(n/254>>8), byte(n/254), byte(n%254+1)
	six := ranges[1].Addr().As16()
	copy(six[8:], sum[8:16])
	return Pair{netip.AddrFrom4(four), netip.AddrFrom16(six)}
}

// Name returns the name that has a VIP. It reports false if the VIP is of no name that the policy allows, or of a name
// below a wildcard that has given way; see [Guard.Owns].
func (g *Guard) Name(vip netip.Addr) (name wire.Name, found bool) {
	vip = vip.Unmap()
	if u := g.inUse.Load(); u != nil {
		if name, found = u.names[vip]; found {
			return name, true
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	name, found = g.names[vip]
	return name, found
}

// Owns reports whether a VIP is one of a name, for a VIP that [Guard.Name] does not know: after a restart, or if the name has
// given way. It does not say whether the policy allows the name.
func (g *Guard) Owns(name wire.Name, vip netip.Addr) bool {
	vip = vip.Unmap()
	for try := range maxTries {
		if pair := g.hash(name, try); pair.V4 == vip || pair.V6 == vip {
			return true
		}
	}
	return false
}
