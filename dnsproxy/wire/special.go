package wire

import (
	"errors"
	"strings"
)

// ErrSpecial says why a special-use name is not looked up in a table and not forwarded.
var ErrSpecial = errors.New("special-use domain name: nametap answers it itself, never from the table")

// The special-use zones that nametap answers itself: those of RFC 6761 (localhost,
// invalid), RFC 7686 (onion) and RFC 9462 (resolver.arpa, which would direct clients to the
// resolver behind the agent), and the reverse zones of RFC 6303 for addresses that mean
// this host or nothing.
//
// The other zones of RFC 6303 are for private addresses such as 10.0.0.0/8. Queries for
// them are forwarded: the nameservers of resolv.conf know the site's names, and that RFC
// requires them to keep such queries from the root. The same holds for test, local and
// home.arpa, which some networks do serve.
const (
	Localhost    Name = "\x09localhost"
	Invalid      Name = "\x07invalid"
	Onion        Name = "\x05onion"
	arpa         Name = "\x04arpa"
	ResolverArpa      = "\x08resolver" + arpa

	thisNetwork      = "\x010" + inAddrArpa
	Loopback4        = "\x03127" + inAddrArpa
	Localhost4       = "\x011\x010\x010" + Loopback4
	broadcast        = "\x03255\x03255\x03255\x03255" + inAddrArpa
	zeros8      Name = "\x010\x010\x010\x010\x010\x010\x010\x010"
	zeros31          = zeros8 + zeros8 + zeros8 + "\x010\x010\x010\x010\x010\x010\x010" + ip6Arpa
	Localhost6       = "\x011" + zeros31
	unspecified      = "\x010" + zeros31
)

// SpecialZone returns the special-use zone that n is in, if it is in one.
func (n Name) SpecialZone() (zone Name, found bool) {
	switch {
	case n.Below(Localhost):
		return Localhost, true
	case n.Below(Invalid):
		return Invalid, true
	case n.Below(Onion):
		return Onion, true
	case !strings.HasSuffix(string(n), string(arpa)):
		return Root, false
	case n.Below(ResolverArpa):
		return ResolverArpa, true
	case n.Below(Loopback4):
		return Loopback4, true
	case n.Below(thisNetwork):
		return thisNetwork, true
	case n.Below(broadcast):
		return broadcast, true
	case n.Below(Localhost6):
		return Localhost6, true
	case n.Below(unspecified):
		return unspecified, true
	}
	return Root, false
}

// Special reports whether n is in a special-use zone.
func (n Name) Special() bool {
	_, found := n.SpecialZone()
	return found
}
