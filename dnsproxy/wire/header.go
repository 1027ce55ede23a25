package wire

import "github.com/miekg/dns"

// HeaderLen is the length of a DNS message's header (RFC 1035, section 4.1.1).
const HeaderLen = 12

// Offsets of a header's fields, and the bits of its two flags bytes (RFC 1035,
// section 4.1.1; AD and CD: RFC 4035, section 3).
const (
	FlagsOffset   = 2
	QDCountOffset = 4
	ANCountOffset = 6
	NSCountOffset = 8
	ARCountOffset = 10

	QR = 0x80 // in the byte at FlagsOffset: this is a response
	AA = 0x04 // authoritative answer
	TC = 0x02 // truncated
	RD = 0x01 // recursion desired
	RA = 0x80 // in the byte after it: recursion available
	AD = 0x20 // authentic data
	CD = 0x10 // checking disabled

	OpcodeMask = 0x78 // in the first of these bytes
	RcodeMask  = 0x0F // in the second
)

// PointerBits are the two high bits of a compression pointer (RFC 1035, section 4.1.4).
const PointerBits = 0xC000

// AddressLen returns the length in bytes of the data of an A or AAAA record.
func AddressLen(rrtype uint16) int {
	const v4, v6 = 4, 16
	if rrtype == dns.TypeA {
		return v4
	}
	return v6
}
