package reply

import (
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// Rcode returns the response code of a message of any opcode, with the bits in its OPT
// record (RFC 6891, section 6.1.3). For a message that cannot be walked it returns the bits
// in the header.
func Rcode(msg []byte) int {
	if len(msg) < wire.HeaderLen {
		return dns.RcodeSuccess
	}
	rcode := int(msg[wire.FlagsOffset+1] & wire.RcodeMask)
	if wire.Count(msg, wire.AdditionalSection) == 0 {
		return rcode
	}
	questionEnd, err := wire.WalkQuestions(msg)
	if err != nil {
		return rcode
	}
	for w := wire.Walk(msg, questionEnd); w.Next(); {
		if w.Type() == dns.TypeOPT {
			return int(msg[w.Fixed+wire.TTLOffset])<<4 | rcode
		}
	}
	return rcode
}
