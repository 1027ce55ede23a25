package reply

import (
	"bytes"
	"encoding/binary"

	"github.com/miekg/dns"
)

// Hop returns a copy of a message of any opcode, which is relayed as it came, with the OPT
// record of the next hop: what that record says is between neighbours (RFC 6891, section
// 6.2). udpSize takes the place of the size in it, and the options go that are for
// neighbours; others, such as the client's subnet, stay. Without edns the next neighbour
// said nothing of EDNS and is sent no OPT record.
//
// A reply without an OPT record gets one if its client sent one: the lack would say that
// this agent does not know EDNS. A message that is signed as a whole, or cannot be walked,
// is copied as it is.
func Hop(wire []byte, edns bool, udpSize uint16) []byte {
	opt, ok := findHopOPT(wire)
	if ok && opt.end != opt.last {
		// What follows OPT moves, and with it what points there.
		moved, err := optToEnd(wire)
		if err != nil {
			return bytes.Clone(wire)
		}
		wire = moved
		opt, ok = findHopOPT(wire)
	}
	if !ok {
		out := bytes.Clone(wire)
		if edns && opt.none && wire[flagsOffset]&bitQR != 0 && len(wire) <= dns.MaxMsgSize-optLen {
			return addOPT(out, udpSize)
		}
		return out
	}
	out := append(make([]byte, 0, opt.end), wire[:opt.start]...)
	if !edns {
		dropExtendedRcode(out, wire[opt.fixed+ttlOffset])
		return out
	}
	out = append(out, 0)
	out = binary.BigEndian.AppendUint16(out, dns.TypeOPT)
	out = binary.BigEndian.AppendUint16(out, udpSize)
	out = append(out, wire[opt.fixed+ttlOffset:opt.fixed+lengthOffset]...)
	length := len(out)
	out = appendForOthers(append(out, 0, 0), wire[opt.fixed+fixedLen:opt.end])
	binary.BigEndian.PutUint16(out[length:], uint16(len(out)-length-2)) //nolint:gosec // no longer than it was
	return out
}

// Signed reports whether a message is signed as a whole (TSIG, SIG(0)).
func Signed(wire []byte) bool {
	opt, _ := findHopOPT(wire)
	return opt.signed
}

// addOPT adds an OPT record to a message without.
func addOPT(msg []byte, udpSize uint16) []byte {
	const count = countsOffset + 2*(1+additional)
	binary.BigEndian.PutUint16(msg[count:], binary.BigEndian.Uint16(msg[count:])+1)
	msg = append(msg, 0)
	msg = binary.BigEndian.AppendUint16(msg, dns.TypeOPT)
	msg = binary.BigEndian.AppendUint16(msg, udpSize)
	return append(msg, 0, 0, 0, 0, 0, 0) // response code, version, flags, no options
}

// dropExtendedRcode makes msg, whose OPT record was removed, say so. The low bits of a
// response code that has more say something else: BADVERS would be NOERROR.
func dropExtendedRcode(msg []byte, rcodeHigh byte) {
	const count = countsOffset + 2*(1+additional)
	binary.BigEndian.PutUint16(msg[count:], binary.BigEndian.Uint16(msg[count:])-1)
	if rcodeHigh != 0 {
		msg[flagsOffset+1] = msg[flagsOffset+1]&^maskRcode | dns.RcodeServerFailure
	}
}

// appendForOthers appends the EDNS options that are not for neighbours alone: cookies (RFC
// 7873), keepalive (RFC 7828) and padding (RFC 7830).
func appendForOthers(dst, options []byte) []byte {
	for len(options) >= optionLen {
		next := min(len(options), optionLen+int(binary.BigEndian.Uint16(options[2:])))
		switch binary.BigEndian.Uint16(options) {
		case dns.EDNS0COOKIE, dns.EDNS0TCPKEEPALIVE, dns.EDNS0PADDING:
		default:
			dst = append(dst, options[:next]...)
		}
		options = options[next:]
	}
	return dst
}

// A hopOPT is where the OPT record of a message is.
type hopOPT struct {
	start, fixed, end int
	last              int  // where the last record ends
	signed            bool // the message is, as a whole
	none              bool // there is none, and nothing behind the last record
}

// findHopOPT finds the OPT record of version 0. It reports false if there is not just
// one, or if nothing about the message may be changed.
func findHopOPT(wire []byte) (opt hopOPT, ok bool) {
	if len(wire) < headerLen {
		return opt, false
	}
	count := func(section int) int { return int(binary.BigEndian.Uint16(wire[countsOffset+2*section:])) }
	off := headerLen
	for range count(0) {
		end, err := walkQuestion(wire, off)
		if err != nil {
			return opt, false
		}
		off = end
	}
	found := 0
	for section := 1; section <= sections; section++ {
		for range count(section) {
			fixed, end, _, err := walkRecord(wire, off)
			if err != nil {
				return opt, false
			}
			if section == 1+additional {
				switch binary.BigEndian.Uint16(wire[fixed:]) {
				case dns.TypeOPT:
					found++
					opt.start, opt.fixed, opt.end = off, fixed, end
				case dns.TypeTSIG, dns.TypeSIG:
					opt.signed = true
					return opt, false
				}
			}
			off = end
		}
	}
	opt.last, opt.none = off, found == 0 && off == len(wire)
	const version = ttlOffset + 1
	return opt, found == 1 && wire[opt.start] == 0 && wire[opt.fixed+version] == 0
}
