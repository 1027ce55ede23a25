package wire

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/miekg/dns"
)

// A Name is a domain name in the wire form of RFC 1035, section 3.1, but in lower case and without the root label at
// its end. For example, the Name of www.Example. is "\x03www\x07example". To remove the first or the last labels of a
// Name, it is enough to slice it. Names are the keys of tables and caches, so escapes, case and trailing dots are
// handled only once: where a name comes in.
type Name string

// WildcardLabel is the first label of the name of a wildcard.
const WildcardLabel Name = "\x01*"

// Root is the name of the root.
const Root Name = ""

// The zones of PTR names (RFC 1035, section 3.5; RFC 3596, section 2.5).
const (
	inAddrArpa Name = "\x07in-addr\x04arpa"
	ip6Arpa    Name = "\x03ip6\x04arpa"
)

// MaxNameLen is the length in bytes of the longest name, without the root label (RFC
// 1035, section 2.3.4).
const MaxNameLen = 254

// maxLabelLen is the length in bytes of the longest label (RFC 1035, section 2.3.4).
const maxLabelLen = 63

var (
	errEmptyName = errors.New("the name is empty")
	// ErrLongName is the error for a name of more than 255 bytes with the root label.
	ErrLongName    = fmt.Errorf("the name is longer than %d bytes on the wire", MaxNameLen+1)
	errEmptyLabel  = errors.New("a label is empty")
	errLongLabel   = fmt.Errorf("a label is longer than %d bytes", maxLabelLen)
	errInnerStar   = errors.New("a wildcard is *.suffix, with the * as its whole first label")
	errNameTooWide = errors.New("a wildcard needs a suffix")
)

// ParseHostname parses a hostname as control planes and configuration files write it:
// letters, digits, hyphens and underscores in any case, with or without the trailing dot.
// Internationalised names must be A-labels (RFC 5890).
func ParseHostname(s string) (Name, error) {
	wire, err := appendHostname(make([]byte, 0, len(s)+1), s)
	return Name(wire), err
}

// appendHostname appends the wire form of s to dst. On an error it returns dst unchanged.
func appendHostname(dst []byte, s string) ([]byte, error) {
	s = strings.TrimSuffix(s, ".")
	if s == "" {
		return dst, errEmptyName
	}
	wire := dst
	for label := range strings.SplitSeq(s, ".") {
		switch {
		case label == "":
			return dst, errEmptyLabel
		case len(label) > maxLabelLen:
			return dst, errLongLabel
		}
		wire = append(wire, byte(len(label)))
		for i, c := range []byte(label) {
			if c == '*' {
				return dst, errInnerStar
			}
			if !isHostByte(c) {
				character := rune(c)
				if r, _ := utf8.DecodeRuneInString(label[i:]); r != utf8.RuneError {
					character = r
				}
				return dst, fmt.Errorf("%q is not a letter, digit, hyphen or underscore", character)
			}
			wire = append(wire, FoldByte(c))
		}
	}
	if len(wire)-len(dst) > MaxNameLen {
		return dst, ErrLongName
	}
	return wire, nil
}

// AppendHost appends the wire form of a NameTable's key to dst. The key is a hostname, or a wildcard such as
// *.example.com; the name of a wildcard begins with [WildcardLabel].
func AppendHost(dst []byte, s string) (name []byte, wildcard bool, err error) {
	suffix, wildcard := strings.CutPrefix(s, "*.")
	if !wildcard && s != "*" {
		name, err = appendHostname(dst, s)
		return name, false, err
	}
	if strings.Trim(suffix, ".") == "" || s == "*" {
		return dst, true, errNameTooWide
	}
	name, err = appendHostname(append(dst, WildcardLabel...), suffix)
	switch {
	case err != nil:
		return dst, true, err
	case len(name)-len(dst) > MaxNameLen:
		return dst, true, ErrLongName
	}
	return name, true, nil
}

func isHostByte(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_'
}

// FoldByte returns the lower case of an ASCII letter, and any other byte unchanged (RFC
// 4343).
func FoldByte(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + ('a' - 'A')
	}
	return c
}

// PackName returns the wire form of a name in presentation form. The result has no root label, and keeps the case of
// the name. PackName fails if the name is too long for a packet, or has a label that is too long.
func PackName(presentation string) ([]byte, error) {
	var buf [MaxNameLen + 1]byte
	n, err := dns.PackDomainName(dns.Fqdn(presentation), buf[:], 0, nil, false)
	if err != nil {
		return nil, err
	}
	return buf[: n-1 : n-1], nil
}

// ParseName parses a name that a person has written, in presentation form, with or without the trailing dot. The text
// "." means the root.
func ParseName(text string) (Name, error) {
	if strings.ContainsFunc(text, func(r rune) bool { return r > unicode.MaxASCII }) {
		return "", fmt.Errorf("name %q: want it as programs ask for it, such as xn--bcher-kva.example", text)
	}
	packed, err := PackName(text)
	if err != nil || text == "" {
		return "", fmt.Errorf("name %q: want a domain name", text)
	}
	return Fold(packed), nil
}

// Fold returns the Name for a name in wire form without the root label.
func Fold(wire []byte) Name {
	folded := make([]byte, len(wire))
	// Length bytes are at most 63, below 'A', so folding all bytes is safe.
	for i, c := range wire {
		folded[i] = FoldByte(c)
	}
	return Name(folded)
}

// String returns the presentation form, with the trailing dot.
func (n Name) String() string {
	s, _, err := dns.UnpackDomainName(append([]byte(n), 0), 0)
	if err != nil {
		return "." // not reached: names are well-formed
	}
	return s
}

// Parent returns the name without its first label; n must not be the root.
func (n Name) Parent() Name { return n[1+int(n[0]):] }

// Owner returns the name that n is an attribute of: n without the labels at its beginning that begin with an underscore
// (RFC 8552).
func (n Name) Owner() Name {
	for n != Root && n[1] == '_' {
		n = n.Parent()
	}
	return n
}

// Below reports whether n is suffix itself or a name below it.
func (n Name) Below(suffix Name) bool {
	if !strings.HasSuffix(string(n), string(suffix)) {
		return false
	}
	// The bytes of suffix may stand within a label of n.
	for len(n) > len(suffix) {
		n = n.Parent()
	}
	return n == suffix
}

// BelowAny returns the first element of suffixes that n equals or is below.
func (n Name) BelowAny(suffixes []Name) (suffix Name, found bool) {
	for _, suffix := range suffixes {
		if n.Below(suffix) {
			return suffix, true
		}
	}
	return Root, false
}

// CutSuffix returns the labels of n before suffix. It reports false if n is not below suffix, if n is suffix itself,
// or if suffix is the root.
func (n Name) CutSuffix(suffix Name) (Name, bool) {
	if suffix == Root || n == suffix || !n.Below(suffix) {
		return "", false
	}
	return n[:len(n)-len(suffix)], true
}

// Join returns n followed by suffix; ok is false if the result is too long.
func (n Name) Join(suffix Name) (joined Name, ok bool) {
	if len(n)+len(suffix) > MaxNameLen {
		return "", false
	}
	return n + suffix, true
}

// FirstLabel returns the first label without its length byte; empty for the root.
func (n Name) FirstLabel() string {
	if n == Root {
		return ""
	}
	return string(n[1 : 1+int(n[0])])
}

// ReverseAddr returns the address that n is the PTR name of.
func ReverseAddr(n Name) (netip.Addr, bool) {
	if rest, ok := n.CutSuffix(inAddrArpa); ok {
		return reverse4(rest)
	}
	if rest, ok := n.CutSuffix(ip6Arpa); ok {
		return reverse6(rest)
	}
	return netip.Addr{}, false
}

// reverse4 reads an address from four decimal labels. The first label has the last byte of the address (RFC 1035,
// section 3.5).
func reverse4(n Name) (netip.Addr, bool) {
	var addr [4]byte
	for i := 3; i >= 0; i-- {
		label := n.FirstLabel()
		b, err := strconv.ParseUint(label, 10, 8)
		if err != nil || len(label) > 1 && label[0] == '0' {
			return netip.Addr{}, false
		}
		addr[i] = byte(b)
		n = n.Parent()
	}
	return netip.AddrFrom4(addr), n == Root
}

// reverse6 reads an address from 32 labels of one hex digit. The first label has the last digit of the address (RFC
// 3596, section 2.5).
func reverse6(n Name) (netip.Addr, bool) {
	var addr [16]byte
	for i := 31; i >= 0; i-- {
		label := n.FirstLabel()
		nibble, err := strconv.ParseUint(label, 16, 4)
		if err != nil || len(label) != 1 {
			return netip.Addr{}, false
		}
		addr[i/2] |= byte(nibble) << (4 * (1 - i%2))
		n = n.Parent()
	}
	return netip.AddrFrom16(addr), n == Root
}

// ErrSpecial says why a special-use name is not looked up in a table and not forwarded.
var ErrSpecial = errors.New("special-use domain name: nametap answers it itself, never from the table")

// The special-use zones that nametap answers itself: localhost and invalid (RFC 6761), onion (RFC 7686),
// resolver.arpa (RFC 9462), and the reverse zones of addresses that mean this host or nothing (RFC 6303). If
// resolver.arpa were forwarded, the answer would direct clients to the resolver behind the agent.
//
// The other zones of RFC 6303 are for private addresses such as 10.0.0.0/8. Queries for
// them are forwarded, because the nameservers of resolv.conf may know the names of these addresses. RFC 6303
// requires these nameservers not to pass such queries on to the root. Names below test, local and
// home.arpa are forwarded, too, because some networks serve them.
const (
	Localhost    Name = "\x09localhost"
	Invalid      Name = "\x07invalid"
	Onion        Name = "\x05onion"
	arpa         Name = "\x04arpa"
	ResolverArpa      = "\x08resolver" + arpa

	thisNetwork      = "\x010" + inAddrArpa
	loopback4        = "\x03127" + inAddrArpa
	Localhost4       = "\x011\x010\x010" + loopback4
	broadcast        = "\x03255\x03255\x03255\x03255" + inAddrArpa
	zeros8      Name = "\x010\x010\x010\x010\x010\x010\x010\x010"
	zeros31          = zeros8 + zeros8 + zeros8 + "\x010\x010\x010\x010\x010\x010\x010" + ip6Arpa
	Localhost6       = "\x011" + zeros31
	unspecified      = "\x010" + zeros31
)

// SpecialZone returns the special-use zone that n belongs to, if there is one.
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
	case n.Below(loopback4):
		return loopback4, true
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
