package wire

import (
	"encoding/binary"
	"unsafe"

	"github.com/miekg/dns"
)

// A Query is a request of the usual shape: opcode QUERY, one question, and at most an
// OPT record of version 0 besides. It points into the packet it was parsed from and is
// valid as long as that packet is. A Query must not be copied: its Name points into it.
type Query struct {
	Question
	Packet      []byte // from the header to the end of the OPT record
	Sent        []byte // the message as the client sent it, if Packet was derived from it
	QuestionEnd int    // offset of the end of the question section in Packet
	RD, CD      bool
	EDNS, DO    bool
	UDPSize     uint16 // the UDP payload size that the client offers, in bytes; 0 without EDNS
	options     bool   // there are EDNS options that mean something to a nameserver
	folded      [MaxNameLen]byte
}

// Cacheable reports whether a nameserver's reply may be given to every client that asks
// the question. It may not without RD, which asks for what the server has in its cache;
// with EDNS options, which are between this client and the server; for zone transfers;
// and for signed messages.
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
	counts := binary.BigEndian.Uint64(packet[4:])
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
		q.DO, q.UDPSize, q.options = false, 0, false
		return len(packet) == q.QuestionEnd
	}
	return q.parseOPT(packet[q.QuestionEnd:])
}

// parseName parses the question's name, which must not be compressed, and returns the
// offset of its end in packet, or -1.
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
	q.options = false
	for len(b) > 0 {
		code, _, rest, ok := CutOption(b)
		if !ok {
			return false
		}
		q.options = q.options || !HopByHop(code)
		b = rest
	}
	return true
}
