package forward

import (
	"net/netip"
	"slices"
	"time"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A routing says which nameservers are asked for a name, according to resolv.conf and the settings. It
// never changes. When resolv.conf or the settings change, a new routing replaces it.
type routing struct {
	self []upstream.Spec // nameservers that are this agent, and left out

	conf            *resolvconf.Config
	search          []wire.Name  // the search list of conf, without the root
	routes          []route      // the longest suffix first
	fallback        route        // for names without a route
	resolvedDomains []wire.Name  // the domains that systemd-resolved asks the agent for (SetReturned), the longest first
	local           []netip.Addr // addresses of this host
	ownDomains      []wire.Name  // Config.OwnDomains and Config.OwnTTL
	ownTTL          time.Duration
}

// A route is a [Route] in use. The route of resolv.conf has no suffix.
type route struct {
	suffix  wire.Name
	group   *upstream.Group
	servers []upstream.Spec // of group
	// others are the servers without systemd-resolved's stub; nil if the stub is not among the servers.
	others *upstream.Group
}

// group returns the nameservers to ask for a name.
func (r *routing) group(name wire.Name) *upstream.Group {
	found := &r.fallback
	for i := range r.routes { // the longest suffix first
		if name.Below(r.routes[i].suffix) {
			found = &r.routes[i]
			break
		}
	}
	if found.others != nil {
		if _, returned := name.BelowAny(r.resolvedDomains); returned {
			return found.others
		}
	}
	return found.group
}

// maxProvisional is how long a provisional reply ([upstream.Answer]) is kept at most. So when the other nameserver
// replies again, its answers are used after this time at the latest.
const maxProvisional = 30 * time.Second

// maxTTL returns the bound of the TTLs in a reply about name, 0 if there is none.
func (r *routing) maxTTL(name wire.Name, provisional bool) (ttl time.Duration) {
	if _, own := name.BelowAny(r.ownDomains); own {
		ttl = r.ownTTL
	}
	if provisional && (ttl == 0 || ttl > maxProvisional) {
		ttl = maxProvisional
	}
	return ttl
}

// ednsUDPSize is the UDP payload size in bytes that queries to nameservers offer. It fits
// an IPv6 packet everywhere (DNS flag day 2020).
const ednsUDPSize = 1232

// query returns a query for a question, in wire form. The query has an OPT record of the agent, because a client's
// OPT record is only for the hop between client and agent (RFC 6891, section 6.2.1).
func (r *routing) query(key cache.Key) []byte {
	var room [wire.MaxNameLen + 1 + 4]byte // keeps the question off the heap
	packet := wire.NewQuery(wire.AppendQuestion(room[:0], wire.Name(key.Name), key.Type, key.Class))
	if r.conf.TrustAD {
		packet[wire.FlagsOffset+1] |= wire.AD // this asks for the AD bit in the answer (RFC 6840, section 5.7)
	}
	var ttl uint32
	if key.DO {
		ttl = wire.OPTDO
	}
	if key.CD {
		packet[wire.FlagsOffset+1] |= wire.CD
	}
	wire.PutCount(packet, wire.AdditionalSection, 1)
	return wire.AppendOPT(packet, ednsUDPSize, ttl)
}

// standsFor reports whether resolv.conf's nameservers are asked instead of server, the original destination of a
// captured query. This is so if server is one of these nameservers, is systemd-resolved's stub in front of them, or
// cannot be asked.
//
// There is one exception. If resolv.conf names a forwarder on this host, a query to another nameserver of resolv.conf
// goes to that nameserver. The query comes either from the forwarder, or from a client to which the forwarder has not
// replied. If the agent sent it to the forwarder, the forwarder would send it back.
func (r *routing) standsFor(server netip.AddrPort) bool {
	if r.conf.Uplink != "" && server.Addr().IsLoopback() {
		return true // systemd-resolved's stub: the nameservers behind it are asked
	}
	if a := server.Addr(); a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "" {
		return true // the kernel does not say on which interface the query was sent
	}
	if v4, v6 := testAddrs(); server.Addr() == v4 || server.Addr() == v6 {
		return true
	}
	onHost := func(server netip.AddrPort) bool {
		return server.Addr().IsLoopback() || slices.Contains(r.local, server.Addr())
	}
	return slices.Contains(r.conf.Servers, server) && (onHost(server) || !slices.ContainsFunc(r.conf.Servers, onHost))
}

// testAddrs returns the addresses with which the capture rules are tested (iptables.TestAddr). If a query is sent to
// one of these addresses, the rules redirect it to the agent, whichever user has sent it. So if the agent forwarded a
// query there, the query would come back.
func testAddrs() (v4, v6 netip.Addr) {
	return netip.AddrFrom4([4]byte{127, 15, 0, 53}), netip.AddrFrom16([16]byte{0: 1, 15: 53})
}

// answersLike reports whether both routings ask the same nameservers in the same way.
func (r *routing) answersLike(other *routing) bool {
	same := func(x, y route) bool { return x.suffix == y.suffix && slices.Equal(x.servers, y.servers) }
	return same(r.fallback, other.fallback) && slices.EqualFunc(r.routes, other.routes, same) &&
		r.conf.TrustAD == other.conf.TrustAD
}
