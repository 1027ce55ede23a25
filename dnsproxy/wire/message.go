package wire

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"unsafe"

	"github.com/miekg/dns"
)

// HeaderLen is the length of a DNS message's header (RFC 1035, section 4.1.1).
const HeaderLen = 12

// Offsets of a header's fields, and the bits of its two flags bytes (RFC 1035,
// section 4.1.1; AD and CD: RFC 4035, section 3).
const (
	FlagsOffset  = 2
	countsOffset = 4 // of four counts of two bytes each: see Count

	QR = 0x80 // in the byte at FlagsOffset: this is a response
	AA = 0x04 // authoritative answer
	TC = 0x02 // truncated
	RD = 0x01 // recursion desired
	RA = 0x80 // in the byte after that: recursion available
	AD = 0x20 // authentic data
	CD = 0x10 // checking disabled

	OpcodeMask = 0x78 // in the byte at FlagsOffset
	RcodeMask  = 0x0F // in the byte after that
)

// A type that has no name is called numberedType followed by its number, such as TYPE65 (RFC 3597, section 5).
const numberedType = "TYPE"

// TypeName returns the name of a record type. It does not use the texts that the DNS library has for two types that
// have no name.
func TypeName(code uint16) string {
	if name, named := dns.TypeToString[code]; named && code != dns.TypeNone && code != dns.TypeReserved {
		return name
	}
	return numberedType + strconv.Itoa(int(code))
}

// ParseType parses the name of a record type, in any case, or its number.
func ParseType(text string) (uint16, error) {
	upper := strings.ToUpper(text)
	if code, known := dns.StringToType[upper]; known {
		return code, nil
	}
	if code, err := strconv.ParseUint(strings.TrimPrefix(upper, numberedType), 10, 16); err == nil {
		return uint16(code), nil
	}
	return 0, fmt.Errorf("type %q: want a record type such as A, or TYPE65", text)
}

// NumberedRcode comes before the number of a response code that has no name, as in RCODE3841.
const NumberedRcode = "RCODE"

// RcodeName returns the name of a response code in a message. The DNS library calls code 16 BADSIG, which is its name
// in TSIG records only; in a message it is BADVERS (RFC 6895, section 2.3).
func RcodeName(rcode int) string {
	name, named := dns.RcodeToString[rcode]
	switch {
	case rcode == dns.RcodeBadVers:
		return "BADVERS"
	case !named:
		return NumberedRcode + strconv.Itoa(rcode)
	}
	return name
}

// AppendQuestion appends a question to dst (RFC 1035, section 4.1.2).
func AppendQuestion(dst []byte, name Name, qtype, class uint16) []byte {
	dst = append(append(dst, name...), 0)
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(dst, qtype), class)
}

// NewQuery returns a query for a question in wire form. The query has the RD bit and no ID yet. Its capacity suffices
// to append an OPT record.
func NewQuery(question []byte) []byte {
	query := make([]byte, HeaderLen, HeaderLen+len(question)+OPTLen)
	query[FlagsOffset] = RD
	PutCount(query, QuestionSection, 1)
	return append(query, question...)
}

// PointerBits are the two high bits of a compression pointer, and MaxPointer is the largest offset that it can have
// (RFC 1035, section 4.1.4).
const (
	PointerBits = 0xC000
	MaxPointer  = 1<<14 - 1
)

// AddressLen returns the length in bytes of the data of an A or AAAA record.
func AddressLen(rrtype uint16) int {
	const v4, v6 = 4, 16
	if rrtype == dns.TypeA {
		return v4
	}
	return v6
}

// OPTLen is the length in bytes of an OPT record without options (RFC 6891, section
// 6.1.2). OPTDO is the DNSSEC OK bit in the TTL field of an OPT record (RFC 3225).
const (
	OPTLen = 11
	OPTDO  = 0x8000
)

// optionLen is the length in bytes of an option without its value.
const optionLen = 4

// ExtendedErrorLen is the length in bytes of an Extended DNS Error option without text (RFC
// 8914, section 2).
const ExtendedErrorLen = optionLen + 2

// AppendOPT appends an OPT record without options to dst. udpSize is the payload size in bytes. ttl has the extended
// response code, the version and the flags (RFC 6891, section 6.1.3).
func AppendOPT(dst []byte, udpSize uint16, ttl uint32) []byte {
	return append(dst, 0, 0, byte(dns.TypeOPT), byte(udpSize>>8), byte(udpSize), //nolint:gosec // bytes
		byte(ttl>>24), byte(ttl>>16), byte(ttl>>8), byte(ttl), 0, 0) //nolint:gosec // bytes
}

// AppendExtendedError appends an Extended DNS Error as an option of an OPT record (RFC 8914,
// section 2). The option must not become longer than 65,535 bytes.
func AppendExtendedError[T string | []byte](dst []byte, code uint16, text T) []byte {
	dst = binary.BigEndian.AppendUint16(dst, dns.EDNS0EDE)
	dst = binary.BigEndian.AppendUint16(dst, uint16(ExtendedErrorLen-optionLen+len(text))) //nolint:gosec // see above
	dst = binary.BigEndian.AppendUint16(dst, code)
	return append(dst, text...)
}

// EndsInOPT reports whether a query ends in an OPT record without options. It looks only at the last bytes, which
// could also be the end of another record's data; but nametap makes no queries with such records.
func EndsInOPT(query []byte) bool {
	if len(query) < HeaderLen+OPTLen || Count(query, AdditionalSection) == 0 {
		return false
	}
	opt := query[len(query)-OPTLen:]
	return opt[0] == 0 && binary.BigEndian.Uint16(opt[1:]) == dns.TypeOPT && binary.BigEndian.Uint16(opt[9:]) == 0
}

// CutOPT removes the OPT record from a query that ends in one. It changes the memory of the query.
func CutOPT(query []byte) []byte {
	PutCount(query, AdditionalSection, uint16(Count(query, AdditionalSection)-1)) //nolint:gosec // it was not 0
	return query[:len(query)-OPTLen]
}

// WantsDNSSEC reports whether a query that ends in an OPT record has its DO bit set (RFC
// 3225).
func WantsDNSSEC(query []byte) bool {
	return binary.BigEndian.Uint16(query[len(query)-OPTLen+1+TTLOffset+2:])&OPTDO != 0
}

// CutOption returns the first option of b, its code, and the rest of b. b is the data of an OPT
// record. If b ends within the option, CutOption reports false and returns all of b as the option.
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

// HopByHop reports whether an EDNS option is only for the neighbour that it is sent to, and must not be forwarded.
// Such options are cookies (RFC 7873), keepalive (RFC 7828), padding (RFC 7830) and Provenance.
func HopByHop(code uint16, option []byte) bool {
	switch code {
	case dns.EDNS0COOKIE, dns.EDNS0TCPKEEPALIVE, dns.EDNS0PADDING:
		return true
	}
	return isProvenance(code, option)
}

// An EDNS option with the code Provenance asks this agent where its answer comes from. In the response, the option
// says where. The code is for local use (RFC 6891, section 9), so other programs may use it for something else; the
// data of this option begin with ProvenanceMark. If the data equal TraceMark, the option also asks what was sent to
// nameservers.
const (
	Provenance     uint16 = 65353
	ProvenanceMark        = "nametap"
	TraceMark             = ProvenanceMark + "+trace"
)

func isProvenance(code uint16, option []byte) bool {
	return code == Provenance && len(option) >= optionLen && strings.HasPrefix(string(option[optionLen:]), ProvenanceMark)
}

// AppendProvenance appends the option that says where an answer comes from. The option must not become longer than
// 65,535 bytes.
func AppendProvenance(dst, text []byte) []byte {
	dst = binary.BigEndian.AppendUint16(dst, Provenance)
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(ProvenanceMark)+len(text))) //nolint:gosec // see above
	return append(append(dst, ProvenanceMark...), text...)
}

// A Query is a request of the usual shape: opcode QUERY, one question, and no records except perhaps an
// OPT record of version 0. It points into the packet from which it was parsed, and is
// valid only as long as that packet is. A Query must not be copied, because its Name points to memory of the Query.
type Query struct {
	Question
	Packet      []byte // from the header to the end of the OPT record
	Sent        []byte // the message as the client sent it, if Packet was derived from it
	QuestionEnd int    // offset of the end of the question section in Packet
	RD, CD      bool
	EDNS        bool   // there is an OPT record
	DO          bool   // the OPT record has the DO bit
	Provenance  bool   // the client asks where the answer comes from
	Trace       bool   // the client also asks what was sent to nameservers
	UDPSize     uint16 // the UDP payload size that the client offers, in bytes; 0 without EDNS
	options     bool   // there are EDNS options that mean something to a nameserver
	folded      [MaxNameLen]byte
}

// Cacheable reports whether a nameserver's reply may be given to every client that asks the same question. It is
// false for these queries:
//   - without the RD bit, because they ask for the content of a server's cache;
//   - with EDNS options, because the reply may depend on them;
//   - for a zone transfer;
//   - with more than a question and an OPT record (see Sent), such as signed queries.
func (q *Query) Cacheable() bool {
	switch q.Type {
	case dns.TypeIXFR, dns.TypeAXFR, dns.TypeTKEY, dns.TypeTSIG:
		return false
	}
	return q.RD && !q.options && q.Sent == nil
}

// AsSent returns the message as the client sent it.
func (q *Query) AsSent() []byte {
	if q.Sent != nil {
		return q.Sent
	}
	return q.Packet
}

// A Question is the question of a query.
type Question struct {
	Name        Name
	Type, Class uint16
}

// Parse parses packet. It reports false if packet has another shape than the type
// describes.
func (q *Query) Parse(packet []byte) bool {
	if len(packet) < HeaderLen || packet[FlagsOffset]&(QR|OpcodeMask) != 0 {
		return false
	}
	counts := binary.BigEndian.Uint64(packet[countsOffset:])
	const oneQuestion, oneAdditional = 1 << 48, 1
	if counts&^oneAdditional != oneQuestion {
		return false
	}
	end := q.parseName(packet)
	if end < 0 || len(packet) < end+4 {
		return false
	}
	q.Packet, q.Sent = packet, nil
	q.Type = binary.BigEndian.Uint16(packet[end:])
	q.Class = binary.BigEndian.Uint16(packet[end+2:])
	q.QuestionEnd = end + 4
	q.RD = packet[FlagsOffset]&RD != 0
	q.CD = packet[FlagsOffset+1]&CD != 0
	q.EDNS = counts&oneAdditional != 0
	if !q.EDNS {
		q.DO, q.UDPSize, q.options, q.Provenance, q.Trace = false, 0, false, false, false
		return len(packet) == q.QuestionEnd
	}
	return q.parseOPT(packet[q.QuestionEnd:])
}

// parseName parses the question's name, and returns the offset of its end in packet. It returns -1 if the name is
// malformed or compressed.
func (q *Query) parseName(packet []byte) int {
	i := HeaderLen
	for i < len(packet) && packet[i] != 0 {
		next := i + 1 + int(packet[i])
		if packet[i] > maxLabelLen || next >= len(packet) || next-HeaderLen > MaxNameLen {
			return -1
		}
		i = next
	}
	if i >= len(packet) {
		return -1
	}
	n := i - HeaderLen
	for j, c := range packet[HeaderLen:i] {
		q.folded[j] = FoldByte(c)
	}
	// The name shares the query's buffer: see the type's comment.
	q.Name = Name(unsafe.String(&q.folded[0], n))
	return i + 1
}

// parseOPT parses the OPT record that b consists of (RFC 6891, section 6.1.2).
func (q *Query) parseOPT(b []byte) bool {
	if len(b) < OPTLen || b[0] != 0 || binary.BigEndian.Uint16(b[1:]) != dns.TypeOPT {
		return false
	}
	q.UDPSize = binary.BigEndian.Uint16(b[3:])
	q.DO = binary.BigEndian.Uint16(b[7:])&OPTDO != 0
	const version = 6
	return b[version] == 0 && len(b) == OPTLen+int(binary.BigEndian.Uint16(b[9:])) && q.parseOptions(b[OPTLen:])
}

// parseOptions parses the EDNS options that b consists of.
func (q *Query) parseOptions(b []byte) bool {
	q.options, q.Provenance, q.Trace = false, false, false
	for len(b) > 0 {
		code, option, rest, ok := CutOption(b)
		if !ok {
			return false
		}
		q.options = q.options || !HopByHop(code, option)
		if isProvenance(code, option) {
			q.Provenance, q.Trace = true, string(option[optionLen:]) == TraceMark
		}
		b = rest
	}
	return true
}
