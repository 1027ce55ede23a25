package reply_test

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/reply"
)

// FuzzParse compares the sections of a response with the sections of the reply, as the DNS
// library unpacks both.
func FuzzParse(f *testing.F) {
	for _, msg := range replies(f) {
		f.Add(pack(f, msg), uint16(0), true)
		msg.SetEdns0(4096, true)
		msg.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_EDE{InfoCode: 9, ExtraText: "why"}}
		f.Add(pack(f, msg), uint16(100), true)
		msg.Extra = append(msg.Extra, records(f, "ns9.example. 60 A 192.0.2.9")...)
		f.Add(pack(f, msg), uint16(0), false)
	}
	f.Fuzz(func(t *testing.T, wire []byte, less uint16, _ bool) {
		r, err := reply.Parse(bytes.Clone(wire))
		if err != nil {
			return
		}
		q := &request{owner: headerLen, limit: dns.MaxMsgSize}
		q.head = append([]byte{0xC1, 0x1E, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}, r.Question()...)
		bare := len(r.Question()) == 0
		if bare {
			q.head = append(q.head, "\x01a\x00\x00\x01\x00\x01"...)
		}
		upperCase(q.head)
		whole := q.append(nil, r, reply.Age{})
		q.limit = max(512, len(whole)-int(less))
		got := q.append([]byte("xy"), r, reply.Age{Seconds: 1})[2:]
		if len(got) > q.limit && len(whole) > 512 {
			t.Fatalf("%d bytes, limit %d", len(got), q.limit)
		}
		msg := new(dns.Msg)
		if bare || msg.Unpack(wire) != nil || !wellFormed(wire, msg) {
			return
		}
		if _, err := reply.Parse(got); err != nil {
			t.Fatalf("of %x the response %x: %v", wire, got, err)
		}
		// The case of names is ignored here; TestAppendSpelling tests it.
		lower := cmp.Transformer("lower", func(s string) string { return string(bytes.ToLower([]byte(s))) })
		if diff := cmp.Diff(sections(msg), sections(unpack(t, whole)), lower); diff != "" {
			t.Fatalf("of %x the response %x (-reply +response):\n%s", wire, whole, diff)
		}
		q.limit = dns.MaxMsgSize
		if again := q.append(nil, parse(t, bytes.Clone(whole)), reply.Age{}); !bytes.Equal(again, whole) {
			t.Fatalf("the response of %x is %x, and of that %x", wire, whole, again)
		}
		// Behind a CNAME record to the same name, the records of a usual message are the same.
		msg.Compress = true
		usual, err := msg.Pack()
		if err != nil || new(dns.Msg).Unpack(usual) != nil {
			return
		}
		if r, err = reply.Parse(usual); err != nil {
			return
		}
		target := q.head[headerLen : len(q.head)-4]
		head := append(newRaw(0, "\x00", 1), "\x00\x00\x05\x00\x01\x00\x00\x00\x00\x00"...)
		head = append(append(head, byte(len(target))), target...)
		moved := &request{head: head, owner: len(head) - len(target), limit: dns.MaxMsgSize}
		behind := moved.append(nil, r, reply.Age{})
		if got := unpack(t, behind); len(behind) < 1<<14 {
			got.Answer = got.Answer[1:]
			if diff := cmp.Diff(sections(msg), sections(got), lower); diff != "" {
				t.Fatalf("of %x behind a CNAME record %x (-reply +response):\n%s", wire, behind, diff)
			}
		}
	})
}

// upperCase changes the name of the question to upper case.
func upperCase(query []byte) {
	for i := headerLen; query[i] != 0; {
		n := 1 + int(query[i])
		for j, c := range query[i : i+n] {
			if 'a' <= c && c <= 'z' {
				query[i+j] = c - 'a' + 'A'
			}
		}
		i += n
	}
}

// wellFormed reports whether every record of wire, which unpacks to msg, is unpacked to the
// same with other bytes in the header, in TTLs, in OPT and behind the record. If not,
// a name points to bytes that are not a name, and a response may differ from the reply.
func wellFormed(wire []byte, msg *dns.Msg) bool {
	const noLabel = "\x40\x40\x40\x40\x40\x40\x40\x40\x40\x40\x40\x40"
	alone := bytes.Clone(wire)
	copy(alone, noLabel)
	off := headerLen
	for wire[off] != 0 {
		off += 1 + int(wire[off])
	}
	copy(alone[off+1:], noLabel[:4])
	off += 1 + 4
	for _, want := range slices.Concat(msg.Answer, msg.Ns, msg.Extra) {
		_, fixed, err := dns.UnpackDomainName(alone, off)
		if err != nil {
			return false
		}
		copy(alone[fixed+4:], noLabel[:4])
		end := fixed + 10 + int(binary.BigEndian.Uint16(alone[fixed+8:]))
		rr, _, err := dns.UnpackRR(alone[:end], off)
		if err != nil {
			return false
		}
		if want.Header().Rrtype == dns.TypeOPT {
			copy(alone[off:end], bytes.Repeat([]byte(noLabel[:1]), end-off))
		} else if rr.Header().Ttl = want.Header().Ttl; rr.String() != want.String() {
			return false
		}
		off = end
	}
	return true
}

// FuzzHop checks that Hop is idempotent, and that a message which can be unpacked still can be.
func FuzzHop(f *testing.F) { // F19
	msg := upstream(f, "a.example.", dns.TypeA, "a.example. 5 A 192.0.2.1")
	msg.SetEdns0(4096, true)
	msg.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Cookie: "0123456789abcdef"}, &dns.EDNS0_LOCAL{Code: 65001, Data: []byte{1}}}
	f.Add(pack(f, msg), true)
	msg.Extra = append(msg.Extra, records(f, "a.example. 5 A 192.0.2.1")...)
	f.Add(pack(f, msg), false)
	f.Fuzz(func(t *testing.T, wire []byte, edns bool) {
		before := bytes.Clone(wire)
		once := reply.Hop(wire, edns, 1232)
		if !bytes.Equal(before, wire) {
			t.Fatal("Hop changed the message")
		}
		if twice := reply.Hop(once, edns, 1232); !bytes.Equal(once, twice) {
			t.Errorf("twice % x, once % x", twice, once)
		}
		msg := new(dns.Msg)
		if msg.Unpack(wire) != nil {
			return
		}
		msg.Compress = true
		if usual, err := msg.Pack(); err == nil && new(dns.Msg).Unpack(usual) == nil && new(dns.Msg).Unpack(reply.Hop(usual, edns, 1232)) != nil {
			t.Errorf("% x can be unpacked, and not the copy", usual)
		}
	})
}
