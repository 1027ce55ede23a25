package dnsproxy

import (
	"errors"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// The special-use names that are answered here, by RFC 6761 (localhost, invalid), RFC 7686
// (onion) and RFC 9462 (resolver.arpa, which would lead clients to the resolver behind this
// agent), and of the zones of RFC 6303 those whose addresses mean this host or nothing.
//
// The other zones of RFC 6303 are for addresses of sites, 10.0.0.0/8 for example: they go
// to resolv.conf's nameservers, which know the site's names and keep such queries from
// the root, as that RFC asks of them. The same holds for test, local and home.arpa: the
// RFCs want them kept from the root, and networks do serve them.
const (
	localhostName wireName = "\x09localhost"
	invalidName   wireName = "\x07invalid"
	onionName     wireName = "\x05onion"
	arpaName      wireName = "\x04arpa"
	resolverArpa           = "\x08resolver" + arpaName

	thisNetwork          = "\x010" + inAddrArpa
	loopback4            = "\x03127" + inAddrArpa
	localhost4           = "\x011\x010\x010" + loopback4
	broadcast            = "\x03255\x03255\x03255\x03255" + inAddrArpa
	zeros8      wireName = "\x010\x010\x010\x010\x010\x010\x010\x010"
	zeros31              = zeros8 + zeros8 + zeros8 + "\x010\x010\x010\x010\x010\x010\x010" + ip6Arpa
	localhost6           = "\x011" + zeros31
	unspecified          = "\x010" + zeros31
)

var (
	errSpecial  = errors.New("a special-use domain name is answered here, never from a table")
	errTransfer = errors.New("no zone transfers are given of names that are answered here")
)

// specialZone returns the special-use zone that n is in, which no table takes over.
func (n wireName) specialZone() (zone wireName, found bool) {
	switch {
	case n.below(localhostName):
		return localhostName, true
	case n.below(invalidName):
		return invalidName, true
	case n.below(onionName):
		return onionName, true
	case !strings.HasSuffix(string(n), string(arpaName)):
		return rootName, false
	case n.below(resolverArpa):
		return resolverArpa, true
	case n.below(loopback4):
		return loopback4, true
	case n.below(thisNetwork):
		return thisNetwork, true
	case n.below(broadcast):
		return broadcast, true
	case n.below(localhost6):
		return localhost6, true
	case n.below(unspecified):
		return unspecified, true
	}
	return rootName, false
}

// special reports whether n is in a special-use zone.
func (n wireName) special() bool {
	_, found := n.specialZone()
	return found
}

// meantSpecial returns those of suffixes that are in a special-use zone: settings that
// name one say that it has another meaning here, as onion has for a host with Tor.
func meantSpecial(suffixes []wireName) []wireName {
	return slices.DeleteFunc(slices.Clone(suffixes), func(s wireName) bool { return !s.special() })
}

// isTransfer reports whether a type asks for a zone and not for records.
func isTransfer(qtype uint16) bool { return qtype == dns.TypeAXFR || qtype == dns.TypeIXFR }

// special writes the response for a name in a special-use zone.
func (w *writer) special(zone wireName) {
	name, qtype := w.query.name, w.query.qtype
	switch zone {
	case localhostName:
		w.localhost()
		return
	case invalidName, onionName:
		w.negative(negative{dns.RcodeNameError, rootName}) // as the root says
		return
	case loopback4, localhost6:
		if (name == localhost4 || name == localhost6) && (qtype == dns.TypePTR || qtype == dns.TypeANY) {
			w.pointers([]wireName{localhostName})
			return
		}
	}
	n := negative{dns.RcodeNameError, zone}
	if name == zone || zone == resolverArpa || localhost4.below(name) {
		n.rcode = dns.RcodeSuccess
	}
	w.negative(n)
}

// localhost writes the response for localhost or a name below it (RFC 6761, section 6.3).
func (w *writer) localhost() {
	const v4, v6 = "\x7f\x00\x00\x01", "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"
	qtype := w.query.qtype
	wants4, wants6 := qtype == dns.TypeA || qtype == dns.TypeANY, qtype == dns.TypeAAAA || qtype == dns.TypeANY
	if !wants4 && !wants6 {
		w.negative(negative{dns.RcodeSuccess, localhostName})
		return
	}
	w.begin()
	if wants4 && w.record(questionName, dns.TypeA, len(v4)) {
		w.buf = append(w.buf, v4...)
		w.answers++
	}
	if wants6 && w.record(questionName, dns.TypeAAAA, len(v6)) {
		w.buf = append(w.buf, v6...)
		w.answers++
	}
	w.end(bitAA, dns.RcodeSuccess, nil)
}
