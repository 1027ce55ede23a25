package upstream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
)

// What is needed of a message in wire form (RFC 1035, section 4.1).
const (
	headerLen  = 12
	maxMessage = 65535
	maxLabel   = 63
	maxName    = 255

	flagResponse  = 0x80 // in byte 2
	flagTruncated = 0x02 // in byte 2
	opcodeMask    = 0x78 // in byte 2
	rcodeMask     = 0x0f // in byte 3

	rcodeSuccess  = 0
	rcodeFormat   = 1
	rcodeServFail = 2
	rcodeName     = 3
	rcodeNotImp   = 4
	rcodeRefused  = 5
	rcodeVersion  = 16 // BADVERS (RFC 6891, section 9)

	// optLen is the length of an OPT record without options (RFC 6891, section 6.1.2).
	optLen  = 11
	typeOPT = 41
)

var errMalformedQuery = errors.New("the query is malformed: want a header and at most one question")

// questionEnd returns where the question section of a message with a whole header
// ends, and whether it has at most one question, without compression.
func questionEnd(msg []byte) (end int, ok bool) {
	switch binary.BigEndian.Uint16(msg[4:]) {
	case 0:
		return headerLen, true
	case 1:
	default:
		return 0, false
	}
	for end = headerLen; end < len(msg) && end < headerLen+maxName; {
		label := int(msg[end])
		if label == 0 {
			end += 1 + 4 // type and class
			return end, end <= len(msg)
		}
		if label > maxLabel {
			return 0, false
		}
		end += 1 + label
	}
	return 0, false
}

// isQuery reports whether a message's opcode is QUERY.
func isQuery(msg []byte) bool { return msg[2]&opcodeMask == 0 }

func rcode(msg []byte) int { return int(msg[3] & rcodeMask) }

func truncated(msg []byte) bool { return msg[2]&flagTruncated != 0 }

// usable reports whether a reply is an answer and not a server's failure to give
// one. To opcodes other than QUERY every response code is an answer.
func usable(reply []byte) bool {
	return !isQuery(reply) || rcode(reply) == rcodeSuccess || rcode(reply) == rcodeName
}

// betterFailure reports whether a failure's response code says more to a client than
// another.
func betterFailure(code, than int) bool {
	weight := [rcodeMask + 1]int{rcodeServFail: 4, rcodeRefused: 3, rcodeNotImp: 2, rcodeFormat: 1}
	return code < len(weight) && (than >= len(weight) || weight[code] > weight[than])
}

// A verdict is what a message is to a query with a certain ID and question.
type verdict int

const (
	other     verdict = iota // not the reply
	matching                 // the reply
	otherCase                // the reply, but for the case of its question's letters
)

// judge compares a response, whose ID was compared already, with the opcode and the
// question that were sent, in wire form. Nameservers return the question as it came;
// only a failure, and the reply to an UPDATE (RFC 2136, section 3.8), may come as a
// bare header.
func judge(reply []byte, opcode byte, question []byte) verdict {
	if reply[2]&opcodeMask != opcode {
		return other
	}
	if binary.BigEndian.Uint16(reply[4:]) == 0 {
		if len(question) == 0 || !usable(reply) || !isQuery(reply) {
			return matching
		}
		return other
	}
	end, ok := questionEnd(reply)
	switch {
	case !ok || end-headerLen != len(question):
		return other
	case bytes.Equal(reply[headerLen:end], question):
		return matching
	case equalFold(reply[headerLen:end], question):
		return otherCase
	}
	return other
}

// equalFold reports whether two questions of one length differ at most in the case
// of the name's letters.
func equalFold(a, b []byte) bool {
	name := len(a) - 4
	for i := range name {
		if fold(a[i]) != fold(b[i]) {
			return false
		}
	}
	return bytes.Equal(a[name:], b[name:])
}

// fold also takes the length of a label, which is below that of any letter.
func fold(b byte) byte {
	if 'A' <= b && b <= 'Z' {
		return b | 0x20
	}
	return b
}

// mixCase gives a question's letters random case.
func mixCase(question []byte) {
	if len(question) == 0 {
		return
	}
	var random uint64
	for i := range question[:len(question)-4] {
		if i%64 == 0 {
			random = rand.Uint64()
		}
		if b := question[i] | 0x20; 'a' <= b && b <= 'z' {
			question[i] = b &^ byte(random&1<<5)
		}
		random >>= 1
	}
}

// endsInOPT reports whether a query's last record is an OPT record without options.
// The bytes could also be the end of another record's data; we make queries
// without such records.
func endsInOPT(query []byte) bool {
	if len(query) < headerLen+optLen || binary.BigEndian.Uint16(query[10:]) == 0 {
		return false
	}
	opt := query[len(query)-optLen:]
	return opt[0] == 0 && binary.BigEndian.Uint16(opt[1:]) == typeOPT && binary.BigEndian.Uint16(opt[9:]) == 0
}

// wantsDNSSEC reports whether a query that ends in an OPT record has its DO bit set
// (RFC 3225).
func wantsDNSSEC(query []byte) bool { return query[len(query)-optLen+7]&0x80 != 0 }

// cutOPT takes the OPT record off a query that ends in one.
func cutOPT(query []byte) []byte {
	binary.BigEndian.PutUint16(query[10:], binary.BigEndian.Uint16(query[10:])-1)
	return query[:len(query)-optLen]
}

// restore makes a reply the reply to the query: with its ID and its question. A
// failure that came as a bare header gets the question, too.
func restore(reply, query, question []byte) []byte {
	if len(question) > 0 && binary.BigEndian.Uint16(reply[4:]) == 0 && isQuery(reply) {
		reply = append(reply[:headerLen:headerLen], question...)
		clear(reply[4:headerLen])
		reply[5] = 1
	} else if binary.BigEndian.Uint16(reply[4:]) != 0 {
		copy(reply[headerLen:], question)
	}
	copy(reply, query[:2])
	return reply
}
