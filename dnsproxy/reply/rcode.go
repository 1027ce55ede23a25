package reply

import (
	"encoding/binary"

	"github.com/miekg/dns"
)

// Rcode returns the response code of a message of any opcode, with the bits that its OPT
// record has (RFC 6891, section 6.1.3). Of one that cannot be walked it returns those of
// the header.
func Rcode(wire []byte) int {
	if len(wire) < headerLen {
		return dns.RcodeSuccess
	}
	rcode := int(wire[flagsOffset+1] & maskRcode)
	count := func(section int) int { return int(binary.BigEndian.Uint16(wire[countsOffset+2*section:])) }
	if count(1+additional) == 0 {
		return rcode
	}
	off := headerLen
	for range count(0) {
		end, err := walkQuestion(wire, off)
		if err != nil {
			return rcode
		}
		off = end
	}
	for range count(1+answer) + count(1+authority) + count(1+additional) {
		fixed, end, _, err := walkRecord(wire, off)
		if err != nil {
			return rcode
		}
		if binary.BigEndian.Uint16(wire[fixed:]) == dns.TypeOPT {
			return int(wire[fixed+ttlOffset])<<4 | rcode
		}
		off = end
	}
	return rcode
}
