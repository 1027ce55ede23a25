package dnsproxy

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/miekg/dns"
)

// limit returns the longest length of a response in bytes (A9).
func (r *reference) limit(q *refQuery, over transport) int {
	switch {
	case over == overTCP:
		return 65535
	case !q.edns:
		return 512
	default:
		return max(512, min(int(q.size), int(r.ednsUDPSize)))
	}
}

// refMessageLen returns the length of a response with its question and some of its records,
// in this server's layout: owners are compressed to a pointer, names in data are not
// compressed.
func refMessageLen(q *refQuery, records ...dns.RR) int {
	n := 12 + len(q.question)
	for _, rr := range records {
		n += refRecordLen(rr)
	}
	if q.edns {
		n += 11
	}
	return n
}

func refRecordLen(rr dns.RR) int {
	const upToData = 12
	switch rr := rr.(type) {
	case *dns.A:
		return upToData + 4
	case *dns.AAAA:
		return upToData + 16
	case *dns.CNAME:
		return upToData + len(refPackedName(rr.Target))
	case *dns.SRV:
		return upToData + 6 + len(refPackedName(rr.Target))
	case *dns.PTR:
		return upToData + len(refPackedName(rr.Ptr))
	case *dns.SOA:
		return upToData + len(refPackedName(rr.Ns)) + len(refPackedName(rr.Mbox)) + 20
	}
	panic(rr.String())
}

func refPackedName(name string) []byte {
	buf := make([]byte, 256)
	n, err := dns.PackDomainName(name, buf, 0, nil, false)
	if err != nil {
		panic(name + ": " + err.Error())
	}
	return buf[:n]
}

// refCut returns how many answers and authority records of a response fit in limit, in
// their order; none after one that does not fit.
func refCut(q *refQuery, resp *dns.Msg, limit int) (answers, authority int) {
	size := refMessageLen(q)
	for i, rr := range slices.Concat(resp.Answer, resp.Ns) {
		size += refRecordLen(rr)
		switch {
		case size > limit:
			return answers, authority
		case i < len(resp.Answer):
			answers++
		default:
			authority++
		}
	}
	return answers, authority
}

// A refQuery is a query as the reference parses it.
type refQuery struct {
	demand   demand
	id       uint16
	flags    uint16
	question []byte // as the client sent it
	name     string // in the client's case
	qtype    uint16
	edns, do bool
	size     uint16
	end      int // of the message
}

// A demand says what the fast path must do with a query that the table answers.
type demand int

// The demands. The fast path must pass on a packet with another answer or none: a response,
// another opcode (A11), not exactly one question (A10), a class other than IN (A10),
// another EDNS version (A8), two OPT records, anything malformed, EDNS options included. It
// may answer, correctly, an unusual one: with a compressed question name, records other
// than OPT, an OPT record with an owner name, or bytes after the message.
const (
	mustHandOn demand = iota
	mayAnswer
	mustAnswer
)

// parseRef parses a packet; with the demand mustHandOn the other fields may be unset.
func parseRef(packet []byte) (q refQuery) {
	if len(packet) < 12 {
		return q
	}
	q.id, q.flags = binary.BigEndian.Uint16(packet), binary.BigEndian.Uint16(packet[2:])
	if q.flags&0xF800 != 0 || binary.BigEndian.Uint16(packet[4:]) != 1 {
		return q
	}
	name, off, err := dns.UnpackDomainName(packet, 12)
	if err != nil || off+4 > len(packet) || binary.BigEndian.Uint16(packet[off+2:]) != dns.ClassINET {
		return q
	}
	q.name, q.qtype, q.question = name, binary.BigEndian.Uint16(packet[off:]), packet[12:off+4]
	usual := bytes.Equal(packet[12:off], refPackedName(name))
	first := binary.BigEndian.Uint32(packet[6:])
	additional := int(binary.BigEndian.Uint16(packet[10:]))
	records := int(first>>16) + int(first&0xFFFF) + additional
	q.end = off + 4
	for i := range records {
		rrtype, start, ok := q.skipRecord(packet)
		if !ok {
			return q
		}
		if i < records-additional || rrtype != dns.TypeOPT {
			usual = false
			continue
		}
		if q.edns || !q.readOPT(packet[start:q.end]) {
			return q
		}
		usual = usual && packet[start-11] == 0 && (start == 12+len(q.question)+11)
	}
	q.demand = mayAnswer
	if usual && q.end == len(packet) {
		q.demand = mustAnswer
	}
	return q
}

// skipRecord moves end past a record, and returns its type and the offset of its data.
func (q *refQuery) skipRecord(packet []byte) (rrtype uint16, data int, ok bool) {
	_, off, err := dns.UnpackDomainName(packet, q.end)
	if err != nil || off+10 > len(packet) {
		return 0, 0, false
	}
	data = off + 10
	q.end = data + int(binary.BigEndian.Uint16(packet[off+8:]))
	if q.end > len(packet) {
		return 0, 0, false
	}
	rrtype = binary.BigEndian.Uint16(packet[off:])
	if rrtype == dns.TypeOPT {
		q.size = binary.BigEndian.Uint16(packet[off+2:])
		q.do = packet[off+6]&0x80 != 0
		return rrtype, data, packet[off+5] == 0
	}
	return rrtype, data, true
}

// readOPT parses the options of an OPT record, which are ignored but must be well formed.
func (q *refQuery) readOPT(options []byte) bool {
	q.edns = true
	for len(options) > 0 {
		if len(options) < 4 || len(options)-4 < int(binary.BigEndian.Uint16(options[2:])) {
			return false
		}
		options = options[4+int(binary.BigEndian.Uint16(options[2:])):]
	}
	return true
}
