package reply

import (
	"bytes"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// maxSplitSearch bounds how many records that do not fit are compared with all those that
// do, and how many these may be, to find RRsets that would be split; a reply may have
// thousands.
const maxSplitSearch = 100

// A place is where a record is in a message: its owner, and its fixed part.
type place struct{ owner, fixed int }

// wholeSets returns how many of the first kept of n additional records may stay, so that
// no RRset is there in part (RFC 2181, section 9); at returns where each is. It keeps fewer
// than necessary if very many fit, or do not fit.
//
// It compares each record that is left out once: the first record of its set that was kept
// becomes the first one that is left out, so none of those before it is in the set.
func wholeSets(msg []byte, at func(i int) place, kept, n int) int {
	if kept > maxSplitSearch || n-kept > maxSplitSearch {
		return 0
	}
	for left := n - 1; left >= kept; left-- {
		for i := range kept {
			if sameSet(msg, at(i), at(left)) {
				kept = i
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
	return wire.SameName(msg, a.owner, b.owner)
}

// isReferral reports whether a message with these sections refers a resolver to other
// nameservers, whose addresses in the additional section it needs (RFC 9471).
func isReferral(rcode, answers int, ns, soa bool) bool {
	return rcode == dns.RcodeSuccess && answers == 0 && ns && !soa
}
