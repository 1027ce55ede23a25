package reply

import (
	"bytes"
	"encoding/binary"

	"github.com/miekg/dns"
)

// maxSplitSearch is how many records that do not fit are looked at for RRsets that they
// share with others: each is compared with all that fit, and a reply may have thousands.
const maxSplitSearch = 100

// A place is where a record is in a message: its owner, and its type behind that.
type place struct{ owner, fixed int }

// wholeSets returns how many of the first kept of n additional records may stay, so that
// no RRset is there in part (RFC 2181, section 9); at says where each is. It is fewer than
// need be if very many do not fit.
func wholeSets(msg []byte, at func(i int) place, kept, n int) int {
	if n-kept > maxSplitSearch {
		return 0
	}
	for left := n - 1; left >= kept; left-- {
		for i := range kept {
			if sameSet(msg, at(i), at(left)) {
				kept = i
				left = n // what no longer stays may be of the set of another
				break
			}
		}
	}
	return kept
}

// sameSet reports whether two records belong to one RRset.
func sameSet(msg []byte, a, b place) bool {
	const typeAndClass = 4
	if !bytes.Equal(msg[a.fixed:a.fixed+typeAndClass], msg[b.fixed:b.fixed+typeAndClass]) {
		return false
	}
	var x, y [maxNameLen]byte
	return bytes.Equal(appendName(x[:0], msg, a.owner), appendName(y[:0], msg, b.owner))
}

// appendName appends the name at off, which walkName has walked, in lower case and
// without pointers.
func appendName(dst, msg []byte, off int) []byte {
	for {
		switch n := int(msg[off]); {
		case n&labelType == labelType:
			off = int(binary.BigEndian.Uint16(msg[off:]) &^ pointerBits)
		case n == 0:
			return dst
		default:
			for _, c := range msg[off : off+1+n] {
				dst = append(dst, foldByte(c))
			}
			off += 1 + n
		}
	}
}

// isReferral reports whether a message with these sections sends the resolver on to other
// nameservers, whose addresses in the additional section it needs (RFC 9471).
func isReferral(rcode, answers int, ns, soa bool) bool {
	return rcode == dns.RcodeSuccess && answers == 0 && ns && !soa
}
