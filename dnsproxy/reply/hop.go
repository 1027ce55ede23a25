package reply

import (
	"bytes"
	"encoding/binary"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// Hop returns a copy of a relayed message of any opcode, with the OPT record of the next hop, because an OPT record is
// between neighbours (RFC 6891, section 6.2). udpSize replaces the size in it, and options for neighbours are removed;
// other options, such as the client's subnet, stay. If edns is false, because the next neighbour does not use EDNS, the
// copy has no OPT record.
//
// If edns is true, a reply without an OPT record gets one: without it, the client would conclude
// that this agent does not know EDNS. A message that is signed as a whole, or cannot be walked,
// is copied as it is.
func Hop(msg []byte, edns bool, udpSize uint16) []byte {
	opt, ok := findHopOPT(msg)
	if ok && opt.end != opt.last {
		// Records behind OPT move, and with them the targets of pointers.
		moved, err := optToEnd(msg)
		if err != nil {
			return bytes.Clone(msg)
		}
		msg = moved
		opt, ok = findHopOPT(msg)
	}
	if !ok {
		out := bytes.Clone(msg)
		if edns && opt.none && msg[wire.FlagsOffset]&wire.QR != 0 && len(msg) <= dns.MaxMsgSize-wire.OPTLen {
			addCount(out, 1)
			return wire.AppendOPT(out, udpSize, 0)
		}
		return out
	}
	out := append(make([]byte, 0, opt.end), msg[:opt.start]...)
	if !edns {
		dropExtendedRcode(out, msg[opt.fixed+wire.TTLOffset])
		return out
	}
	out = wire.AppendOPT(out, udpSize, binary.BigEndian.Uint32(msg[opt.fixed+wire.TTLOffset:]))
	length := len(out) - 2
	out = appendForOthers(out, msg[opt.fixed+wire.FixedLen:opt.end])
	binary.BigEndian.PutUint16(out[length:], uint16(len(out)-length-2)) //nolint:gosec // no longer than it was
	return out
}

// ClearAD clears the AD bit of a message, which must have a header.
func ClearAD(msg []byte) { msg[wire.FlagsOffset+1] &^= wire.AD }

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

// dropExtendedRcode adapts the header of msg, whose OPT record was removed. The header has only
// four bits of the response code, which mean something else alone: BADVERS would be NOERROR.
func dropExtendedRcode(msg []byte, rcodeHigh byte) {
	addCount(msg, -1)
	if rcodeHigh != 0 {
		msg[wire.FlagsOffset+1] = msg[wire.FlagsOffset+1]&^wire.RcodeMask | dns.RcodeServerFailure
	}
}

// appendForOthers appends the EDNS options that are not for neighbours alone, and malformed
// options, too.
func appendForOthers(dst, options []byte) []byte {
	for len(options) > 0 {
		code, option, rest, _ := wire.CutOption(options)
		if !wire.HopByHop(code, option) {
			dst = append(dst, option...)
		}
		options = rest
	}
	return dst
}

// AddOption adds an EDNS option to a response that ends in an OPT record, and returns the response;
// it returns any other response as it is. If the response would be longer than limit, TC is set
// instead, as for Extended DNS Errors, except at the limit of TCP: over TCP a client could do nothing
// about TC.
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

// A hopOPT is the place of the OPT record of a message.
type hopOPT struct {
	start, fixed, end int
	last              int  // where the last record ends
	signed            bool // the message is signed as a whole
	none              bool // there is no OPT record, and nothing behind the last record
}

// findHopOPT finds the OPT record of version 0. It reports false if there is not exactly
// one, or if the message must not be changed.
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
	opt.last, opt.none = w.End, found == 0 && w.End == len(msg)
	const version = wire.TTLOffset + 1
	return opt, found == 1 && msg[opt.start] == 0 && msg[opt.fixed+version] == 0
}
