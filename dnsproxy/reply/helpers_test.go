package reply_test

import (
	"encoding/binary"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/wire"
)

const headerLen = 12

// upstream returns a reply to a query for name, with answers in presentation form.
func upstream(tb testing.TB, name string, qtype uint16, answers ...string) *dns.Msg {
	tb.Helper()
	msg := new(dns.Msg).SetQuestion(name, qtype)
	msg.Response, msg.RecursionAvailable, msg.Authoritative, msg.Compress = true, true, true, true
	msg.Answer = records(tb, answers...)
	return msg
}

func records(tb testing.TB, texts ...string) []dns.RR {
	tb.Helper()
	var rrs []dns.RR
	for _, text := range texts {
		rr, err := dns.NewRR(text)
		if err != nil {
			tb.Fatal(err)
		}
		rrs = append(rrs, rr)
	}
	return rrs
}

func pack(tb testing.TB, msg *dns.Msg) []byte {
	tb.Helper()
	wire, err := msg.Pack()
	if err != nil {
		tb.Fatal(err)
	}
	return wire
}

func unpack(tb testing.TB, wire []byte) *dns.Msg {
	tb.Helper()
	msg := new(dns.Msg)
	if err := msg.Unpack(wire); err != nil {
		tb.Fatalf("unpacking %x: %v", wire, err)
	}
	return msg
}

func parse(tb testing.TB, wire []byte) *reply.Reply {
	tb.Helper()
	r, err := reply.Parse(wire)
	if err != nil {
		tb.Fatalf("Parse(%x): %v", wire, err)
	}
	return r
}

// A request is what a response begins with, up to the name that the reply is about, and what it must be like.
type request struct {
	head           []byte
	owner          int
	limit, options int
}

// ask returns the request of a client that asks for name.
func ask(tb testing.TB, name string, qtype uint16) *request {
	tb.Helper()
	return &request{head: pack(tb, new(dns.Msg).SetQuestion(name, qtype)), owner: headerLen, limit: dns.MaxMsgSize}
}

// append appends to dst a response that has the flags and the records of r.
func (q *request) append(dst []byte, r *reply.Reply, age reply.Age) []byte {
	start := len(dst)
	place := reply.Place{Start: start, Owner: q.owner, Limit: q.limit, Options: q.options}
	dst, counts, cut := r.Append(append(dst, q.head...), place, r.Records(), age)
	out := dst[start:]
	counts[wire.QuestionSection] = 1
	counts[wire.AnswerSection] += uint16(wire.Count(out, wire.AnswerSection))
	wire.PutCounts(out, &counts)
	out[wire.FlagsOffset], out[wire.FlagsOffset+1] = wire.QR|wire.AA|wire.RD, wire.RA|byte(r.Rcode())&wire.RcodeMask
	_, second := r.Flags()
	out[wire.FlagsOffset+1] |= second & wire.AD
	if cut || r.Truncated() {
		out[wire.FlagsOffset] |= wire.TC
	}
	return dst
}

// withoutOPT returns the records except OPT.
func withoutOPT(rrs []dns.RR) []dns.RR {
	var left []dns.RR
	for _, rr := range rrs {
		if rr.Header().Rrtype != dns.TypeOPT {
			left = append(left, rr)
		}
	}
	return left
}

// sections returns the records of msg except OPT, as text.
func sections(msg *dns.Msg) [3][]string {
	var texts [3][]string
	for i, rrs := range [][]dns.RR{msg.Answer, msg.Ns, withoutOPT(msg.Extra)} {
		for _, rr := range rrs {
			texts[i] = append(texts[i], rr.String())
		}
	}
	return texts
}

func wantSections(tb testing.TB, got, want *dns.Msg) {
	tb.Helper()
	if diff := cmp.Diff(sections(want), sections(got)); diff != "" {
		tb.Errorf("sections differ (-reply +response):\n%s", diff)
	}
}

// A raw is a message, which may be one that no library makes.
type raw []byte

// newRaw returns a reply with a question for the name in wire form, and counts.
func newRaw(flags uint16, name string, counts ...uint16) raw {
	m := raw{0x12, 0x34}
	m = binary.BigEndian.AppendUint16(m, 0x8000|flags)
	m = binary.BigEndian.AppendUint16(m, 1)
	for _, n := range append(counts, 0, 0, 0)[:3] {
		m = binary.BigEndian.AppendUint16(m, n)
	}
	return append(append(m, name...), 0, 1, 0, 1)
}

// record appends a record of type rrtype with a TTL of 300.
func (m raw) record(owner string, rrtype byte, data string) raw {
	m = append(append(m, owner...), 0, rrtype, 0, 1, 0, 0, 1, 44)
	m = binary.BigEndian.AppendUint16(m, uint16(len(data)))
	return append(m, data...)
}
