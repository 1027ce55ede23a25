package dnsproxy

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/miekg/dns"
)

// A wireName is a domain name in the wire form of RFC 1035, section 3.1, folded
// to lower case and without the root label at its end, so that a head or a tail of
// a name is a slice of it. Tables are keyed by it: escapes, case and trailing dots
// are dealt with once, at the edge.
type wireName string

// rootName is the name of the DNS root.
const rootName wireName = ""

// The names below which RFC 3596 and RFC 1035 keep addresses.
const (
	inAddrArpa wireName = "\x07in-addr\x04arpa"
	ip6Arpa    wireName = "\x03ip6\x04arpa"
)

// maxNameLen is the longest name in wire form, RFC 1035, section 2.3.4, without
// the root label.
const maxNameLen = 254

// maxLabelLen is the longest label, RFC 1035, section 2.3.4.
const maxLabelLen = 63

var (
	errEmptyName   = errors.New("the name is empty")
	errLongName    = fmt.Errorf("the name is longer than %d bytes on the wire", maxNameLen+1)
	errEmptyLabel  = errors.New("a label is empty")
	errLongLabel   = fmt.Errorf("a label is longer than %d bytes", maxLabelLen)
	errInnerStar   = errors.New("a wildcard is *.suffix, with the * as its whole first label")
	errNameTooWide = errors.New("a wildcard needs a suffix")
)

// parseHostname reads a host as control planes and configurations write it: any
// case, with or without the trailing dot, letters, digits, hyphens and
// underscores. Internationalised names come as A-labels (RFC 5890).
func parseHostname(s string) (wireName, error) {
	wire, err := appendHostname(make([]byte, 0, len(s)+1), s)
	return wireName(wire), err
}

// appendHostname appends the name that s is to dst, which is not changed by an
// error.
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
		for _, c := range []byte(label) {
			if c == '*' {
				return dst, errInnerStar
			}
			if !isHostByte(c) {
				return dst, fmt.Errorf("%q is no letter, digit, hyphen or underscore", rune(c))
			}
			wire = append(wire, foldByte(c))
		}
	}
	if len(wire)-len(dst) > maxNameLen {
		return dst, errLongName
	}
	return wire, nil
}

// appendHost appends the name of a key of a NameTable to dst: a hostname, or a
// wildcard, whose name begins with wildcardLabel.
func appendHost(dst []byte, s string) (name []byte, wildcard bool, err error) {
	suffix, wildcard := strings.CutPrefix(s, "*.")
	if !wildcard && s != "*" {
		name, err = appendHostname(dst, s)
		return name, false, err
	}
	if strings.Trim(suffix, ".") == "" || s == "*" {
		return dst, true, errNameTooWide
	}
	name, err = appendHostname(append(dst, wildcardLabel...), suffix)
	switch {
	case err != nil:
		return dst, true, err
	case len(name)-len(dst) > maxNameLen:
		return dst, true, errLongName
	}
	return name, true, nil
}

func isHostByte(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_'
}

// foldByte folds ASCII only, as RFC 4343 asks.
func foldByte(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + ('a' - 'A')
	}
	return c
}

// packName returns the wire form of a name in presentation form, in its case.
// It fails for a name that no packet can hold.
func packName(presentation string) ([]byte, error) {
	var buf [maxNameLen + 1]byte
	n, err := dns.PackDomainName(dns.Fqdn(presentation), buf[:], 0, nil, false)
	if err != nil {
		return nil, err
	}
	return buf[: n-1 : n-1], nil
}

// fold returns the wireName of a name in wire form.
func fold(wire []byte) wireName {
	folded := make([]byte, len(wire))
	// Length bytes are at most 63, below 'A', so folding all bytes is safe.
	for i, c := range wire {
		folded[i] = foldByte(c)
	}
	return wireName(folded)
}

// presentation returns the presentation form of a name in wire form without the
// root label, with the trailing dot.
func presentation(wire string) string {
	s, _, err := dns.UnpackDomainName(append([]byte(wire), 0), 0)
	if err != nil {
		return "." // not reached: every caller's name was packed or parsed before
	}
	return s
}

// String returns the presentation form, with the trailing dot.
func (n wireName) String() string { return presentation(string(n)) }

// parent returns the name without its first label; n must not be the root.
func (n wireName) parent() wireName { return n[1+int(n[0]):] }

// below reports whether n is suffix itself or a name below it.
func (n wireName) below(suffix wireName) bool {
	if !strings.HasSuffix(string(n), string(suffix)) {
		return false
	}
	// The same bytes may be the end of a label.
	for len(n) > len(suffix) {
		n = n.parent()
	}
	return n == suffix
}

// dots returns the number of dots between the labels of n's text.
func (n wireName) dots() int {
	dots := -1
	for ; n != rootName; n = n.parent() {
		dots++
	}
	return max(dots, 0)
}

// cutSuffix returns what stands before suffix in n, if n is below it and not
// suffix itself; suffix is not the root.
func (n wireName) cutSuffix(suffix wireName) (wireName, bool) {
	if suffix == rootName || n == suffix || !n.below(suffix) {
		return "", false
	}
	return n[:len(n)-len(suffix)], true
}

// join returns n followed by suffix; ok is false if the result is too long.
func (n wireName) join(suffix wireName) (joined wireName, ok bool) {
	if len(n)+len(suffix) > maxNameLen {
		return "", false
	}
	return n + suffix, true
}

// firstLabel returns the first label without its length, nothing for the root.
func (n wireName) firstLabel() string {
	if n == rootName {
		return ""
	}
	return string(n[1 : 1+int(n[0])])
}

// compareText orders names as their text: 0 for equal ones, else below or above.
func (n wireName) compareText(other wireName) int {
	for n != rootName && other != rootName {
		// A label ends in a dot, so the shorter of two that begin alike may sort
		// after the longer: "a.b" and "a-c.b".
		x, y := n.firstLabel(), other.firstLabel()
		for i := 0; ; i++ {
			a, b := textByte(x, i), textByte(y, i)
			if a != b {
				return int(a) - int(b)
			}
			if i >= len(x) {
				break // with the dot of both
			}
		}
		n, other = n.parent(), other.parent()
	}
	return len(n) - len(other)
}

// textByte returns a byte of a label's text, which ends in a dot.
func textByte(label string, i int) byte {
	if i < len(label) {
		return label[i]
	}
	return '.'
}

// reverseAddr returns the address that n is the PTR name of.
func reverseAddr(n wireName) (netip.Addr, bool) {
	if rest, ok := n.cutSuffix(inAddrArpa); ok {
		return reverse4(rest)
	}
	if rest, ok := n.cutSuffix(ip6Arpa); ok {
		return reverse6(rest)
	}
	return netip.Addr{}, false
}

// reverse4 reads four decimal labels, last byte first (RFC 1035, section 3.5).
func reverse4(n wireName) (netip.Addr, bool) {
	var addr [4]byte
	for i := 3; i >= 0; i-- {
		label := n.firstLabel()
		b, err := strconv.ParseUint(label, 10, 8)
		if err != nil || len(label) > 1 && label[0] == '0' {
			return netip.Addr{}, false
		}
		addr[i] = byte(b)
		n = n.parent()
	}
	return netip.AddrFrom4(addr), n == rootName
}

// reverse6 reads 32 labels of one nibble, lowest first (RFC 3596, section 2.5).
func reverse6(n wireName) (netip.Addr, bool) {
	var addr [16]byte
	for i := 31; i >= 0; i-- {
		label := n.firstLabel()
		nibble, err := strconv.ParseUint(label, 16, 4)
		if err != nil || len(label) != 1 {
			return netip.Addr{}, false
		}
		addr[i/2] |= byte(nibble) << (4 * (1 - i%2))
		n = n.parent()
	}
	return netip.AddrFrom16(addr), n == rootName
}
