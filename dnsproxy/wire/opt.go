package wire

import (
	"encoding/binary"

	"github.com/miekg/dns"
)

// OPTLen is the length in bytes of an OPT record without options (RFC 6891, section
// 6.1.2). OPTDO is the DNSSEC OK bit of its TTL field (RFC 3225).
const (
	OPTLen = 11
	OPTDO  = 0x8000
)

// optionLen is the length in bytes of an option without its value.
const optionLen = 4

// ExtendedErrorLen is the length in bytes of an Extended DNS Error option without text (RFC
// 8914, section 2).
const ExtendedErrorLen = optionLen + 2

// AppendOPT appends an OPT record without options to dst. udpSize is the payload size in
// bytes, ttl the extended response code, version and flags (RFC 6891, section 6.1.3).
func AppendOPT(dst []byte, udpSize uint16, ttl uint32) []byte {
	return append(dst, 0, 0, byte(dns.TypeOPT), byte(udpSize>>8), byte(udpSize), //nolint:gosec // bytes
		byte(ttl>>24), byte(ttl>>16), byte(ttl>>8), byte(ttl), 0, 0) //nolint:gosec // bytes
}

// AppendExtendedError appends an Extended DNS Error as an option of an OPT record (RFC 8914,
// section 2). The text must be short enough for it.
func AppendExtendedError(dst []byte, code uint16, text string) []byte {
	dst = binary.BigEndian.AppendUint16(dst, dns.EDNS0EDE)
	dst = binary.BigEndian.AppendUint16(dst, uint16(ExtendedErrorLen-optionLen+len(text))) //nolint:gosec // see above
	dst = binary.BigEndian.AppendUint16(dst, code)
	return append(dst, text...)
}

// EndsInOPT reports whether the last record of a query is an OPT record without options. The
// bytes could also be the end of another record's data; nametap makes no queries with such
// records.
func EndsInOPT(query []byte) bool {
	if len(query) < HeaderLen+OPTLen || Count(query, AdditionalSection) == 0 {
		return false
	}
	opt := query[len(query)-OPTLen:]
	return opt[0] == 0 && binary.BigEndian.Uint16(opt[1:]) == dns.TypeOPT && binary.BigEndian.Uint16(opt[9:]) == 0
}

// CutOPT removes the OPT record from a query that ends in one, and changes the query.
func CutOPT(query []byte) []byte {
	PutCount(query, AdditionalSection, uint16(Count(query, AdditionalSection)-1)) //nolint:gosec // it was not 0
	return query[:len(query)-OPTLen]
}

// WantsDNSSEC reports whether a query that ends in an OPT record has its DO bit set (RFC
// 3225).
func WantsDNSSEC(query []byte) bool {
	return binary.BigEndian.Uint16(query[len(query)-OPTLen+1+TTLOffset+2:])&OPTDO != 0
}

// CutOption returns the code of the first option of b, the data of an OPT record, the option
// itself, and the rest. It reports false if the option is malformed because b is shorter; then
// the option is all of b.
func CutOption(b []byte) (code uint16, option, rest []byte, ok bool) {
	if len(b) < optionLen {
		return 0, b, nil, false
	}
	code = binary.BigEndian.Uint16(b)
	n := optionLen + int(binary.BigEndian.Uint16(b[2:]))
	if n > len(b) {
		return code, b, nil, false
	}
	return code, b[:n], b[n:], true
}

// HopByHop reports whether an option is between neighbours alone: a cookie (RFC 7873),
// keepalive (RFC 7828) or padding (RFC 7830). It means nothing to the servers behind.
func HopByHop(option uint16) bool {
	switch option {
	case dns.EDNS0COOKIE, dns.EDNS0TCPKEEPALIVE, dns.EDNS0PADDING:
		return true
	}
	return false
}
