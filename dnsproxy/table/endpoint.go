package table

import (
	"net/netip"
	"strings"
)

// maxDashed is the length in bytes of the longest label that is made of an endpoint's address: the label of an IPv6
// address with eight groups of four digits. minDashes is the least number of dashes in the label of any endpoint.
const (
	maxDashed = 39
	minDashes = 2
)

// appendDashed appends the label of an endpoint with a packed address to dst, in wire form. The label is the address
// with dashes in place of dots or colons. As in CoreDNS, a 0 is added to a label that would end in a dash:
// 2001:db8:: becomes 2001-db8--0.
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

// parseDashed returns the address in an endpoint's label. It reports false if appendDashed would write another label
// for this address, or if the label has no address.
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
	text := s.name[:len(label)] // a local array would be allocated on the heap, because it is passed to ParseAddr
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
