package reply

import (
	"bytes"
	"encoding/binary"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// Hop returns a copy of a relayed message of any opcode, changed for the next neighbour that gets it. What changes
// is the OPT record, because an OPT record is only for two neighbours (RFC 6891, section 6.2). edns reports whether
// the next neighbour uses EDNS. If it does not, the copy has no OPT record. If it does, udpSize replaces the size in
// the OPT record, and options that are only for neighbours are removed. Other options, such as the client's subnet,
// stay.
//
// If edns is true, and msg is a reply without an OPT record, the copy gets one. Without it, the client would conclude
// that this agent does not support EDNS. A message that is signed as a whole, or is malformed, is copied as it is.
func Hop(msg []byte, edns bool, udpSize uint16) []byte {
	opt, ok := findHopOPT(msg)
	if ok && opt.end != opt.last {
		moved, err := optToEnd(msg[:opt.last], opt.start, opt.end)
		if err != nil {
			return bytes.Clone(msg)
		}
		msg = moved
		opt, ok = findHopOPT(msg)
	}
	if !ok {
		out := bytes.Clone(msg)
		if edns && opt.noOPT && msg[wire.FlagsOffset]&wire.QR != 0 && len(msg) <= dns.MaxMsgSize-wire.OPTLen {
			addCount(out, 1)
			return wire.AppendOPT(out, udpSize, 0)
		}
		return out
	}
	out := append(make([]byte, 0, opt.end), msg[:opt.start]...)
	if !edns {
		// The OPT record had the high bits of the response code. Without them, the four bits in the header mean something
		// else: BADVERS (16) would become NOERROR (0). So the response code becomes SERVFAIL.
		addCount(out, -1)
		if msg[opt.fixed+wire.TTLOffset] != 0 {
			out[wire.FlagsOffset+1] = out[wire.FlagsOffset+1]&^wire.RcodeMask | dns.RcodeServerFailure
		}
		return out
	}
	out = wire.AppendOPT(out, udpSize, binary.BigEndian.Uint32(msg[opt.fixed+wire.TTLOffset:]))
	length := len(out) - 2
	for options := msg[opt.fixed+wire.FixedLen : opt.end]; len(options) > 0; {
		code, option, rest, _ := wire.CutOption(options) // also a malformed one
		if !wire.HopByHop(code, option) {
			out = append(out, option...)
		}
		options = rest
	}
	binary.BigEndian.PutUint16(out[length:], uint16(len(out)-length-2)) //nolint:gosec // no longer than it was
	return out
}

// Signed reports whether a message is signed as a whole (TSIG, SIG(0)).
func Signed(msg []byte) bool {
	opt, _ := findHopOPT(msg)
	return opt.signed
}

// addCount adds n to the number of additional records in the header.
func addCount(msg []byte, n int) {
	n += wire.Count(msg, wire.AdditionalSection)
	wire.PutCount(msg, wire.AdditionalSection, uint16(n)) //nolint:gosec // wraps as the field does
}

// AddOption adds an EDNS option to a response that ends in an OPT record, and returns the response. It returns any
// other response unchanged. If the response would become longer than limit, AddOption does not add the option but
// sets TC, so that the client asks again over TCP. If limit is the limit of TCP, it does not set TC, because there is
// no other way to get a longer response.
func AddOption(msg, option []byte, limit int) []byte {
	opt, ok := findHopOPT(msg)
	switch {
	case !ok || opt.end != len(msg):
		return msg
	case len(msg)+len(option) > limit:
		if limit < dns.MaxMsgSize {
			msg[wire.FlagsOffset] |= wire.TC
		}
		return msg
	}
	length := msg[opt.fixed+wire.DataLenOffset:]
	binary.BigEndian.PutUint16(length, binary.BigEndian.Uint16(length)+uint16(len(option))) //nolint:gosec // within limit
	return append(msg, option...)
}

// A hopOPT says where the OPT record of a message is. The offsets are like those of [wire.Walker].
type hopOPT struct {
	start, fixed, end int
	last              int  // where the last record ends
	signed            bool // the message is signed as a whole
	noOPT             bool // there is no OPT record, and no byte follows the last record
}

// findHopOPT finds the OPT record of a message. It reports false if there is not exactly one, if its version is not
// 0, or if the message must not be changed because it is signed or malformed.
func findHopOPT(msg []byte) (opt hopOPT, ok bool) {
	if len(msg) < wire.HeaderLen {
		return opt, false
	}
	questionEnd, err := wire.WalkQuestions(msg)
	if err != nil {
		return opt, false
	}
	found := 0
	w := wire.Walk(msg, questionEnd)
	for w.Next() {
		if w.Section != wire.AdditionalSection {
			continue
		}
		switch w.Type() {
		case dns.TypeOPT:
			found++
			opt.start, opt.fixed, opt.end = w.Owner, w.Fixed, w.End
		case dns.TypeTSIG, dns.TypeSIG:
			opt.signed = true
			return opt, false
		}
	}
	if w.Err != nil {
		return opt, false
	}
	opt.last, opt.noOPT = w.End, found == 0 && w.End == len(msg)
	const version = wire.TTLOffset + 1
	return opt, found == 1 && msg[opt.start] == 0 && msg[opt.fixed+version] == 0
}

// Cut returns a relayed message that is longer than limit bytes without its records, and with TC set. If the questions
// do not fit either, or are malformed, it leaves them out, too. It does not change a message that fits. The result is in
// the memory of msg, which Cut changes.
func Cut(msg []byte, limit int) []byte {
	if len(msg) <= limit || len(msg) < wire.HeaderLen {
		return msg
	}
	end, err := wire.WalkQuestions(msg)
	counts := [wire.Sections]uint16{uint16(wire.Count(msg, wire.QuestionSection))} //nolint:gosec // the count has 16 bits
	if err != nil || end > limit {
		end, counts = wire.HeaderLen, [wire.Sections]uint16{}
	}
	msg[wire.FlagsOffset] |= wire.TC
	wire.PutCounts(msg, &counts)
	return msg[:end]
}
