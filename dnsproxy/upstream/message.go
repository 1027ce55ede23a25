package upstream

import (
	"errors"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

var errMalformedQuery = errors.New("the query is malformed: want a header and at most one question")

// questionEnd returns where the question section of a message ends. The message must have a whole header. questionEnd
// reports false if the section is malformed, has more than one question, or has a name that is compressed.
func questionEnd(msg []byte) (end int, ok bool) {
	if wire.Count(msg, wire.QuestionSection) > 1 {
		return 0, false
	}
	end, err := wire.WalkQuestions(msg)
	return end, err == nil
}

// hasQuestion reports whether a message has a question according to its header.
func hasQuestion(msg []byte) bool { return wire.Count(msg, wire.QuestionSection) > 0 }

// opcode returns a message's opcode, not shifted: its bits in the header's first byte of flags.
func opcode(msg []byte) byte { return msg[wire.FlagsOffset] & wire.OpcodeMask }

// isQuery reports whether a message's opcode is QUERY.
func isQuery(msg []byte) bool { return opcode(msg) == 0 }

func rcode(msg []byte) int { return int(msg[wire.FlagsOffset+1] & wire.RcodeMask) }

func truncated(msg []byte) bool { return msg[wire.FlagsOffset]&wire.TC != 0 }

// betterFailure reports whether the response code of a failure tells a client more than the code other.
func betterFailure(code, other int) bool {
	weight := [wire.RcodeMask + 1]int{
		dns.RcodeServerFailure: 4, dns.RcodeRefused: 3, dns.RcodeNotImplemented: 2, dns.RcodeFormatError: 1,
	}
	return code < len(weight) && (other >= len(weight) || weight[code] > weight[other])
}

// replies reports whether a response whose ID matches is the reply to a query. op is the query's opcode, and question
// is its question in wire form. The case of letters may differ, because some nameservers fold it. If the query has a
// question, a response without one can only be a failure, or the reply to an opcode other than QUERY (for UPDATE:
// RFC 2136, section 3.8).
func replies(response []byte, op byte, question []byte) bool {
	if opcode(response) != op {
		return false
	}
	if !hasQuestion(response) {
		return len(question) == 0 || !isQuery(response) || rcode(response) != dns.RcodeSuccess && rcode(response) != dns.RcodeNameError
	}
	end, ok := questionEnd(response)
	return ok && wire.EqualQuestions(response[wire.HeaderLen:end], question)
}

// restore gives a reply the ID and the question of the query. A failure that has no question gets the question, too.
func restore(reply, query, question []byte) []byte {
	switch {
	case hasQuestion(reply):
		copy(reply[wire.HeaderLen:], question)
	case len(question) > 0 && isQuery(reply):
		reply = append(reply[:wire.HeaderLen:wire.HeaderLen], question...)
		wire.PutCounts(reply, &[wire.Sections]uint16{wire.QuestionSection: 1})
	}
	copy(reply, query[:2])
	return reply
}

// A reading is what a question needs to know about a reply.
type reading struct {
	code      int   // the response code, including its bits in the OPT record
	negative  bool  // NXDOMAIN, or NOERROR without an answer
	truncated bool  // the TC bit; a truncated reply is not negative
	other     bool  // the opcode is not QUERY; then any response code is an answer
	edns      bool  // the server knows EDNS: there is an OPT record, and code is not BADVERS
	err       error // why the reply cannot be used
}

// usable reports whether the reply is an answer and not a server's failure to give one.
func (r reading) usable() bool {
	return r.err == nil && (r.other || r.code == dns.RcodeSuccess || r.code == dns.RcodeNameError)
}

// rejectsEDNS reports whether the reply suggests that the server does not support EDNS, or not version 0
// (RFC 6891, sections 6.1.3 and 7).
func (r reading) rejectsEDNS() bool {
	return !r.edns && (r.code == dns.RcodeFormatError || r.code == dns.RcodeNotImplemented || r.code == dns.RcodeBadVers)
}

// hasOPT reports whether a reply has an OPT record.
func hasOPT(reply []byte) bool {
	if wire.Count(reply, wire.AdditionalSection) == 0 {
		return false
	}
	end, _ := questionEnd(reply)
	records := wire.Walk(reply, end)
	for records.Next() {
		if records.Section == wire.AdditionalSection && records.Type() == dns.TypeOPT {
			return true
		}
	}
	return false
}

// read reads a reply; check is [Config.Check].
func read(reply []byte, check func(reply []byte) (rcode int, negative bool, err error)) (r reading) {
	r.code, r.truncated = rcode(reply), truncated(reply)
	switch {
	case !isQuery(reply):
		r.other = true
		return r
	case check == nil:
		r.negative = r.code == dns.RcodeNameError || r.code == dns.RcodeSuccess && wire.Count(reply, wire.AnswerSection) == 0
	default:
		r.code, r.negative, r.err = check(reply)
	}
	r.negative = r.negative && !r.truncated
	r.edns = r.code != dns.RcodeBadVers && hasOPT(reply)
	return r
}
