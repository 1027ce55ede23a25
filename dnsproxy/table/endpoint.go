package table

import (
	"net/netip"
	"strings"
)

// maxDashed is the length in bytes of the longest label of an endpoint, an IPv6 address.
// minDashes is the number of dashes that every such label has.
const (
	maxDashed = 39
	minDashes = 2
)

// appendDashed appends the label of an endpoint with a packed address to dst, after its length:
// the address with dashes. As in CoreDNS, a label that would end in a dash ends in 0, which is
// the same address: 2001-db8--0.
func appendDashed(dst, packed []byte) []byte {
	start := len(dst)
	dst = append(dst, 0)
	addr, _ := netip.AddrFromSlice(packed)
	dst = addr.AppendTo(dst)
	label := dst[start+1:]
	for i, c := range label {
		if c == '.' || c == ':' {
			label[i] = '-'
		}
	}
	if label[len(label)-1] == '-' {
		dst = append(dst, '0')
	}
	dst[start] = byte(len(dst) - start - 1) //nolint:gosec // at most maxDashed
	return dst
}

// parseDashed returns the address of an endpoint's label. It reports false for a label that
// appendDashed does not write.
func parseDashed(label string, s *Scratch) (netip.Addr, bool) {
	dashes := strings.Count(label, "-")
	separator := byte(':')
	const in4, in6 = 3, 7 // separators in an address without ::
	switch shortened := strings.Contains(label, "--"); {
	case len(label) > maxDashed:
		return netip.Addr{}, false
	case dashes == in4 && !shortened:
		separator = '.'
	case dashes != in6 && !shortened:
		return netip.Addr{}, false
	}
	text := s.name[:len(label)] // a local array would be allocated on the heap, because of ParseAddr
	for i, c := range []byte(label) {
		switch {
		case c == '-':
			c = separator
		case (c < '0' || c > '9') && (c < 'a' || c > 'f'):
			return netip.Addr{}, false
		}
		text[i] = c
	}
	addr, err := netip.ParseAddr(viewString(text))
	if err != nil {
		return netip.Addr{}, false
	}
	var buf [1 + maxDashed + 1]byte
	packed := addr.As16()
	written := appendDashed(buf[:0], packed[16-addr.BitLen()/8:])
	return addr, string(written[1:]) == label
}
