package reply_test

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/wire"
)

const soa = "example. 600 SOA ns.example. host.example. 1 7200 1800 86400 60"

// F8: how long replies may be cached.
func TestTTL(t *testing.T) {
	for _, tt := range []struct {
		name  string
		rcode int
		qtype uint16
		an    []string
		ns    []string
		extra []string
		tc    bool
		want  time.Duration
	}{
		{name: "least of the answer", an: []string{"a.example. 300 A 192.0.2.1", "a.example. 20 A 192.0.2.2"}, want: 20 * time.Second},
		{name: "authority and additional count", an: []string{"a.example. 300 A 192.0.2.1"},
			ns: []string{"example. 40 NS ns.example."}, extra: []string{"ns.example. 30 A 192.0.2.3"}, want: 30 * time.Second},
		{name: "an SOA beside an answer is a record", an: []string{"a.example. 300 A 192.0.2.1"}, ns: []string{soa}, want: 300 * time.Second},
		{name: "TTL 0", an: []string{"a.example. 0 A 192.0.2.1"}},
		{name: "top bit", an: []string{"a.example. 2147483648 A 192.0.2.1"}},
		{name: "more than a week", an: []string{"a.example. 1209600 A 192.0.2.1"}, want: 14 * 24 * time.Hour},
		{name: "ANY", qtype: dns.TypeANY, an: []string{"a.example. 9 HINFO a b"}, want: 9 * time.Second},
		{name: "truncated", tc: true, an: []string{"a.example. 300 A 192.0.2.1"}},
		{name: "NODATA", ns: []string{soa}, want: time.Minute},
		{name: "NODATA, the SOA's TTL is less", ns: []string{"example. 6 SOA ns.example. host.example. 1 2 3 4 60"}, want: 6 * time.Second},
		{name: "NODATA below an alias", an: []string{"a.example. 5 CNAME b.example."}, ns: []string{soa}, want: 5 * time.Second},
		{name: "an alias alone", an: []string{"a.example. 5 CNAME b.example."}},
		{name: "NODATA without SOA", ns: []string{"example. 600 NS ns.example."}},
		{name: "NXDOMAIN", rcode: dns.RcodeNameError, ns: []string{soa}, want: time.Minute},
		{name: "NXDOMAIN below an alias", rcode: dns.RcodeNameError, an: []string{"a.example. 5 CNAME b.example."}, ns: []string{soa}, want: 5 * time.Second},
		{name: "NXDOMAIN without SOA", rcode: dns.RcodeNameError},
		{name: "SOA elsewhere", rcode: dns.RcodeNameError, extra: []string{soa}},
		{name: "SERVFAIL", rcode: dns.RcodeServerFailure, want: 5 * time.Second},
		{name: "REFUSED", rcode: dns.RcodeRefused, ns: []string{soa}, want: 5 * time.Second},
		{name: "BADVERS", rcode: dns.RcodeBadVers, an: []string{"a.example. 300 A 192.0.2.1"}, want: 5 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			msg := upstream(t, "a.example.", max(tt.qtype, dns.TypeA), tt.an...)
			msg.Ns, msg.Extra = records(t, tt.ns...), records(t, tt.extra...)
			msg.Truncated = tt.tc
			msg.SetEdns0(1232, false) // its TTL field is not a TTL
			msg.Rcode = tt.rcode
			r := parse(t, pack(t, msg))
			if got, ok := r.TTL(); got != tt.want || ok != (tt.want > 0) {
				t.Errorf("TTL() = %v, %t, want %v", got, ok, tt.want)
			}
			if r.Rcode() != tt.rcode || r.Truncated() != tt.tc || r.Answers() != len(tt.an) {
				t.Errorf("rcode %d, truncated %t, %d answers", r.Rcode(), r.Truncated(), r.Answers())
			}
		})
	}
}

func TestHasType(t *testing.T) {
	msg := upstream(t, "a.example.", dns.TypeA, "a.example. 5 CNAME b.example.", "b.example. 5 A 192.0.2.1")
	msg.Ns = records(t, soa)
	r := parse(t, pack(t, msg))
	has := func(rrtype uint16) bool { return r.HasType(wire.AnswerSection, rrtype) }
	if !has(dns.TypeA) || !has(dns.TypeCNAME) || has(dns.TypeSOA) || has(dns.TypeAAAA) || !r.HasType(wire.AuthoritySection, dns.TypeSOA) {
		t.Error("HasType is wrong about the sections")
	}
	if want := pack(t, new(dns.Msg).SetQuestion("a.example.", dns.TypeA))[headerLen:]; !bytes.Equal(r.Question(), want) {
		t.Errorf("Question() = %x, want %x", r.Question(), want)
	}
}

func TestParseRefuses(t *testing.T) {
	const www = "\x03www\x07example\x00"
	address := "\xC0\x00\x02\x01"
	long := strings.Repeat("\x3f"+strings.Repeat("a", 63), 4) + "\x00" // 257 bytes
	for name, wire := range map[string][]byte{
		"nothing":                  nil,
		"no header":                make([]byte, headerLen-1),
		"a query":                  pack(t, new(dns.Msg).SetQuestion("a.example.", dns.TypeA)),
		"another opcode":           newRaw(5<<11, www),
		"two questions":            append([]byte{0, 0, 0x80, 0, 0, 2}, make([]byte, 20)...),
		"answer, no question":      append([]byte{0, 0, 0x80, 0, 0, 0, 0, 1, 0, 0, 0, 0}, make([]byte, 11)...),
		"question cut":             newRaw(0, www)[:headerLen+len(www)+3],
		"long question":            newRaw(0, long),
		"compressed question":      newRaw(0, "\xC0\x0C"),
		"reserved label type":      newRaw(0, www, 1).record("\x43abc\x00", 1, address),
		"a record too few":         newRaw(0, www, 2).record("\xC0\x0C", 1, address),
		"all counts lie":           newRaw(0, www, 0xFFFF, 0xFFFF, 0xFFFF),
		"data cut":                 newRaw(0, www, 1).record("\xC0\x0C", 1, address)[:headerLen+len(www)+4+12+3],
		"a pointer to itself":      newRaw(0, www, 1).record("\xC0\x1D", 1, address),
		"a pointer forward":        newRaw(0, www, 1).record("\xC0\xFF", 1, address),
		"a pointer to the header":  newRaw(0, www, 1).record("\xC0\x02", 1, address),
		"a name that meets itself": newRaw(0, www, 1).record("\x01a\xC0\x1D", 1, address),
		"a name that runs on":      newRaw(0, www, 1).record("\x05a\xC0\x1D", 1, address),
		"a long owner":             newRaw(0, www, 1).record(long, 1, address),
		"OPT in the answer":        newRaw(0, www, 1).record("\x00", 41, ""),
		"two OPT records":          newRaw(0, www, 0, 0, 2).record("\x00", 41, "").record("\x00", 41, ""),
		"OPT of a name":            newRaw(0, www, 0, 0, 1).record("\x01a\x00", 41, ""),
		"OPT with half an option":  newRaw(0, www, 0, 0, 1).record("\x00", 41, "\x00\x0F\x00\x03\x00\x01"),
		"longer than any message":  append(newRaw(0, www), make([]byte, dns.MaxMsgSize)...),
	} {
		if r, err := reply.Parse(wire); err == nil {
			t.Errorf("%s: Parse returned a reply with %d answers", name, r.Answers())
		} else if !strings.HasPrefix(err.Error(), "parsing a reply: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Long chains of pointers, each of them valid, must not make a reply expensive to parse.
func TestParseBoundsPointers(t *testing.T) {
	const www = "\x03www\x07example\x00"
	wire := newRaw(0, www, 2)
	first := len(wire) + 1 + 10
	chain := []byte{0, 0}
	for len(chain) < 2*200 {
		chain = binary.BigEndian.AppendUint16(chain, uint16(0xC000|first+len(chain)-2))
	}
	wire = wire.record("\x00", 16, string(chain))
	last := uint16(0xC000 | len(wire) - 2)
	wire = wire.record(string(binary.BigEndian.AppendUint16(nil, last)), 1, "\xC0\x00\x02\x01")
	if _, err := reply.Parse(wire); err == nil {
		t.Error("Parse followed 200 pointers")
	}
}

// A server may truncate a reply within a record, and leave the counts as they were.
func TestParseCut(t *testing.T) {
	const www = "\x03www\x07example\x00"
	const truncated = 0x0200
	whole := newRaw(truncated, www, 2, 0, 1).record("\xC0\x0C", 1, "\xC0\x00\x02\x01")
	next := whole.record("\xC0\x0C", 1, "\xC0\x00\x02\x02")
	for end := len(whole); end < len(next); end++ {
		r := parse(t, bytes.Clone(next[:end]))
		got := unpack(t, ask(t, "www.example.", dns.TypeA).append(nil, r, reply.Age{}))
		if r.Answers() != 1 || len(got.Answer) != 1 || !got.Truncated || len(withoutOPT(got.Extra)) > 0 {
			t.Fatalf("cut at %d of %d: %v", end, len(next), got)
		}
	}
}

func TestParseDropsTrailingBytes(t *testing.T) {
	wire := pack(t, upstream(t, "a.example.", dns.TypeA, "a.example. 5 A 192.0.2.1"))
	q := ask(t, "a.example.", dns.TypeA)
	want := q.append(nil, parse(t, wire), reply.Age{})
	got := q.append(nil, parse(t, append(bytes.Clone(wire), "trailing"...)), reply.Age{})
	if !bytes.Equal(got, want) {
		t.Errorf("with trailing bytes %x, without %x", got, want)
	}
}
