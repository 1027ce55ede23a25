package reply_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// replies returns replies as nameservers send them: aliases, referrals, negative answers,
// signatures, types with names in their data, and unknown types.
func replies(tb testing.TB) map[string]*dns.Msg {
	tb.Helper()
	signed := upstream(tb, "www.example.", dns.TypeA, "www.example. 300 A 192.0.2.1",
		"www.example. 300 RRSIG A 13 2 300 20300101000000 20200101000000 1 example. c2lnbmF0dXJl")
	signed.AuthenticatedData = true
	full := upstream(tb, "www.example.", dns.TypeMX, "www.example. 300 MX 10 Mail.example.", "www.example. 300 MX 20 b.mail.example.")
	full.Ns = records(tb, "example. 3600 NS ns1.example.", "example. 3600 NS ns2.example.")
	full.Extra = records(tb, "mail.example. 60 A 192.0.2.5", "ns1.example. 60 AAAA 2001:db8::1")
	nodata := upstream(tb, "www.example.", dns.TypeAAAA)
	nodata.Ns = records(tb, soa)
	gone := upstream(tb, "www.example.", dns.TypeA)
	gone.Ns, gone.Rcode = records(tb, soa), dns.RcodeNameError
	return map[string]*dns.Msg{
		"address": upstream(tb, "www.example.", dns.TypeA, "www.example. 300 A 192.0.2.1"),
		"alias": upstream(tb, "www.example.", dns.TypeA, "www.example. 300 CNAME Edge.CDN.example.",
			"Edge.CDN.example. 20 A 192.0.2.1", "Edge.CDN.example. 20 A 192.0.2.2"),
		"signed": signed, "full": full, "nodata": nodata, "gone": gone,
		"unknown": upstream(tb, "www.example.", 65280, `www.example. 5 TYPE65280 \# 3 c00c01`),
		"service": upstream(tb, "www.example.", dns.TypeHTTPS, `www.example. 5 HTTPS 1 . alpn="h2" ipv4hint=192.0.2.1`),
		"failure": func() *dns.Msg {
			m := upstream(tb, "www.example.", dns.TypeA)
			m.Rcode = dns.RcodeServerFailure
			return m
		}(),
	}
}

// F1: a response has all records of the reply, compressed or not.
func TestAppendEqualsReply(t *testing.T) {
	for _, msg := range replies(t) {
		for _, compress := range []bool{true, false} {
			msg.Compress = compress
			wantSections(t, unpack(t, ask(t, "www.example.", msg.Question[0].Qtype).append(nil, parse(t, pack(t, msg)), reply.Age{})), msg)
		}
	}
}

// A4, F1: behind a CNAME record names still are those of the reply, also in types that must not have compressed names.
func TestAppendMoved(t *testing.T) {
	const www, alias = "\x03www\x07example\x00", "\x05alias\x00"
	head := append(newRaw(0, alias, 1), "\xC0\x0C\x00\x05\x00\x01\x00\x00\x00\x1E\x00\x0D"+www...)
	q := &request{head: head, owner: len(head) - len(www), limit: dns.MaxMsgSize}
	const to = "\x04mail\xC0\x10" // mail.example.
	for data, types := range map[string][]uint16{
		to:                                 {dns.TypeNS, dns.TypeDNAME, dns.TypePTR},
		"\x00\x0A" + to:                    {dns.TypeMX, dns.TypeKX, dns.TypeRT, dns.TypeAFSDB},
		"\x00\x0A" + to + to:               {dns.TypePX},
		"\x00\x01\x00\x02\x01\xBB" + to:    {dns.TypeSRV},
		to + to:                            {dns.TypeRP, dns.TypeMINFO},
		to + to + string(make([]byte, 20)): {dns.TypeSOA},
		"\x00\x01\x00\x02\x01u\x00\x03a\xC0b" + to: {dns.TypeNAPTR},
	} {
		for _, rrtype := range types {
			m := newRaw(0, www, 2).record("\xC0\x0C", byte(rrtype), data)
			at := bytes.Index(m, []byte(to))
			m = m.record(string([]byte{1, 'n', 0xC0, byte(at)}), 1, "\xC0\x00\x02\x01")
			want := unpack(t, m)
			got := unpack(t, q.append(nil, parse(t, m), reply.Age{}))
			got.Answer = got.Answer[1:]
			lower := cmp.Transformer("lower", strings.ToLower)
			if diff := cmp.Diff(sections(want), sections(got), lower); diff != "" {
				t.Errorf("%s (-reply +response):\n%s", dns.Type(rrtype), diff)
			}
		}
	}
}

// A4, A9: behind a CNAME record, records are left out from the first one with a name that a pointer cannot reach.
func TestAppendTooFar(t *testing.T) {
	const www = "\x03www\x07example\x00"
	m := newRaw(0, www, 3).record("\xC0\x0C", 16, strings.Repeat("\x09123456789", 1630))
	far := len(m)
	m = m.record("\x01a\xC0\x0C", 1, "\xC0\x00\x02\x01").record(string([]byte{0xC0 | byte(far>>8), byte(far)}), 1, "\xC0\x00\x02\x02")
	for _, pad := range []string{"", strings.Repeat("\x07another", 10)} {
		head := append(newRaw(0, www, 1), "\xC0\x0C\x00\x05\x00\x01\x00\x00\x00\x1E\x00"...)
		head = append(append(append(head, byte(len(pad)+len(www))), pad...), www...)
		q := &request{head: head, owner: len(head) - len(www), limit: dns.MaxMsgSize}
		if got, want := len(unpack(t, q.append(nil, parse(t, m), reply.Age{})).Answer), 4; got != want-len(pad)/80 {
			t.Errorf("%d answers behind %d bytes", got, len(head))
		}
	}
}

// F1: the CNAME records at the start of the answer section that lead from the question's name to another name.
func TestAliases(t *testing.T) {
	sig := "www.example. 300 RRSIG CNAME 13 2 300 20300101000000 20200101000000 1 example. c2ln"
	for _, c := range []struct {
		answer []string
		want   int
		target string
	}{
		{answer: []string{"www.example. 5 A 192.0.2.1", "www.example. 5 CNAME b.example."}},
		{answer: []string{"other.example. 5 CNAME b.example."}},
		{answer: []string{"www.example. 5 CNAME B.example.", "b.example. 5 A 192.0.2.1"}, want: 1, target: "b.example."},
		{answer: []string{"www.example. 5 CNAME b.example.", sig, "B.example. 5 CNAME c.Other.", "c.other. 5 A 192.0.2.1"}, want: 3, target: "c.other."},
		{answer: []string{"www.example. 5 CNAME b.example.", "c.example. 5 CNAME d.example."}, want: 1, target: "b.example."},
		{answer: []string{"example. 5 DNAME other.", "www.example. 5 CNAME www.other."}, want: 2, target: "www.other."},
	} {
		r := parse(t, pack(t, upstream(t, "WWW.example.", dns.TypeA, c.answer...)))
		if r.Aliases() != c.want {
			t.Errorf("%s: %d aliases, want %d", c.answer, r.Aliases(), c.want)
		} else if c.want > 0 {
			var buf [wire.MaxNameLen]byte
			if target, ok := r.Alias(c.want-1, &buf); !ok || target.String() != c.target {
				t.Errorf("%s: %s, want %s", c.answer, target, c.target)
			}
		}
	}
}

// F8: owners have the case of the question, whatever case the nameserver used.
func TestAppendSpelling(t *testing.T) {
	const www = "\x03www\x07example\x00"
	address := "\xC0\x00\x02\x01"
	target := newRaw(0, www, 3).record("\x03fOo\x07eXample\x00", 1, address) // its eXample is at 33
	for name, wire := range map[string][]byte{
		"pointer":            newRaw(0, www, 1).record("\xC0\x0C", 1, address),
		"spelled out":        newRaw(0, www, 1).record(www, 1, address),
		"in another case":    newRaw(0, www, 1).record("\x03WWW\x07eXaMPLE\x00", 1, address),
		"label and pointer":  newRaw(0, www, 1).record("\x03Www\xC0\x10", 1, address),
		"pointer elsewhere":  target.record("\x03Www\xC0\x21", 1, address).record("\xC0\x1D", 1, address),
		"pointer at a label": newRaw(0, www, 2).record("\x03WwW\xC0\x10", 1, address).record("\xC0\x1D", 1, address),
	} {
		t.Run(name, func(t *testing.T) {
			r := parse(t, wire)
			for _, spelling := range []string{"www.example.", "WWW.EXAMPLE.", "wWw.ExAmPlE."} {
				for _, age := range []reply.Age{{}, {Seconds: 1}} {
					got := unpack(t, ask(t, spelling, dns.TypeA).append(nil, r, age))
					if got.Question[0].Name != spelling {
						t.Errorf("question %s, want %s", got.Question[0].Name, spelling)
					}
					for _, rr := range got.Answer {
						owner := rr.Header().Name
						if strings.EqualFold(owner, spelling) && owner != spelling {
							t.Errorf("owner %s, want %s", owner, spelling)
						}
					}
				}
			}
		})
	}
}

// F8, F9: TTLs are counted down and bounded, those of stale records are 30 s.
func TestAppendTTLs(t *testing.T) {
	msg := upstream(t, "www.example.", dns.TypeA, "www.example. 300 CNAME b.example.")
	msg.Ns = records(t, "example. 600 SOA ns.example. host.example. 1 7200 1800 86400 60", "example. 10 NS ns.example.")
	r := parse(t, pack(t, msg))
	for _, c := range []struct {
		age                     reply.Age
		cname, soa, minimum, ns uint32
	}{
		{reply.Age{}, 300, 600, 60, 10},
		{reply.Age{Seconds: 15}, 285, 45, 60, 0},
		{reply.Age{Seconds: 5, Max: 20}, 15, 15, 20, 5},
		{reply.Age{Seconds: 4000, Stale: true}, 30, 30, 60, 30},
		{reply.Age{Seconds: 4000, Stale: true, Max: 20}, 20, 20, 20, 20},
	} {
		got := unpack(t, ask(t, "www.example.", dns.TypeA).append(nil, r, c.age))
		soa := got.Ns[0].(*dns.SOA)
		if ttls := [...]uint32{got.Answer[0].Header().Ttl, soa.Hdr.Ttl, soa.Minttl, got.Ns[1].Header().Ttl}; ttls != [...]uint32{c.cname, c.soa, c.minimum, c.ns} {
			t.Errorf("%+v: %v", c, ttls)
		}
	}
}

// F2, A9: a response that is too long is cut at a record's boundary, and keeps the OPT record.
func TestAppendCut(t *testing.T) {
	msg := upstream(t, "www.example.", dns.TypeTXT)
	for i := range 40 {
		msg.Answer = append(msg.Answer, records(t, fmt.Sprintf("www.example. 300 TXT %q", strings.Repeat("x", i)))...)
	}
	msg.Ns = records(t, "example. 300 NS ns.example.")
	msg.Extra = records(t, "ns.example. 300 A 192.0.2.1")
	msg.SetEdns0(4096, false)
	r := parse(t, pack(t, msg))
	all := append(append(append([]dns.RR{}, msg.Answer...), msg.Ns...), withoutOPT(msg.Extra)...)
	for _, options := range []int{0, 20} {
		q := ask(t, "www.example.", dns.TypeTXT)
		size := len(q.append(nil, r, reply.Age{})) + options
		q.options = options
		needed := size - options - len("\xC0\x00") - 10 - 4 // without the additional record, for which TC is not set
		for q.limit = 512; q.limit <= size; q.limit++ {
			wire := q.append(nil, r, reply.Age{})
			got := unpack(t, wire)
			kept := append(append(got.Answer, got.Ns...), withoutOPT(got.Extra)...)
			switch {
			case len(wire) > q.limit:
				t.Fatalf("%d bytes, limit %d", len(wire), q.limit)
			case got.Truncated != (q.limit < needed || options > 0 && q.limit < size) || q.limit < size-options != (len(kept) < len(all)):
				t.Fatalf("limit %d of %d: TC %t, %d of %d records", q.limit, size, got.Truncated, len(kept), len(all))
			}
			for i, rr := range kept {
				if rr.String() != all[i].String() {
					t.Fatalf("limit %d, record %d: %v, want %v", q.limit, i, rr, all[i])
				}
			}
			if next := len(kept); next < len(all) && next < len(msg.Answer) && len(wire)+12+1+next <= q.limit {
				t.Fatalf("limit %d: %d bytes, and record %d would fit", q.limit, len(wire), next)
			}
		}
	}
}

// An OPT record may be anywhere in the additional section (RFC 6891, section
// 6.1.1), and names behind it may point to others behind it.
func TestAppendOPTInTheMiddle(t *testing.T) {
	msg := upstream(t, "www.example.", dns.TypeMX, "www.example. 300 MX 1 mail.other.")
	msg.SetEdns0(4096, false)
	msg.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_EDE{InfoCode: 7}}
	msg.Extra = append(msg.Extra, records(t, "a.long.name. 300 A 192.0.2.1", "b.long.name. 60 A 192.0.2.2")...)
	r := parse(t, pack(t, msg))
	got := unpack(t, ask(t, "WWW.example.", dns.TypeMX).append(nil, r, reply.Age{}))
	want := unpack(t, bytes.Replace(pack(t, msg), []byte("www"), []byte("WWW"), 1))
	wantSections(t, got, want)
	if n := r.OptionsLen(false); n != 6 {
		t.Errorf("errors of %d bytes", n)
	}
	if ttl, _ := r.TTL(); ttl.Seconds() != 60 {
		t.Errorf("TTL %v", ttl)
	}
}

// Append keeps what is in the buffer: over TCP a length is in front of the message. Buffers are
// reused.
func TestAppendBehind(t *testing.T) {
	r := parse(t, pack(t, replies(t)["full"]))
	q := ask(t, "wWw.example.", dns.TypeMX)
	buf := append(make([]byte, 0, 4096), "xy"...)
	got := q.append(buf, r, reply.Age{Seconds: 3})
	if want := q.append(nil, r, reply.Age{Seconds: 3}); !bytes.Equal(got[2:], want) || &got[0] != &buf[:1][0] {
		t.Errorf("behind 2 bytes %x, alone %x", got, want)
	}
	if allocs := testing.AllocsPerRun(100, func() { q.append(buf, r, reply.Age{Stale: true}) }); allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}

// F2, A9: additional records that do not all fit are left out, and nothing else is.
func TestAppendWholeSets(t *testing.T) {
	msg := upstream(t, "www.example.", dns.TypeA, "www.example. 300 A 192.0.2.1")
	for i := range 30 {
		msg.Extra = append(msg.Extra, records(t, fmt.Sprintf("one-%d.example. 300 A 192.0.2.1", i/2),
			fmt.Sprintf("TWO-%d.example. 300 A 192.0.2.%d", i/2, i))...)
	}
	msg.Extra = append(msg.Extra, records(t, "two-4.Example. 300 A 192.0.2.200")...) // behind all others
	r := parse(t, pack(t, msg))
	for limit := 512; limit < 2000; limit++ {
		q := ask(t, "www.example.", dns.TypeA)
		q.limit = limit
		got := unpack(t, q.append(nil, r, reply.Age{}))
		want := 0
		if len(ask(t, "www.example.", dns.TypeA).append(nil, r, reply.Age{})) <= limit {
			want = len(withoutOPT(msg.Extra))
		}
		if n := len(withoutOPT(got.Extra)); got.Truncated || len(got.Answer) != 1 || n != want {
			t.Fatalf("limit %d: TC is %t, %d answers, %d additional records, want %d", limit, got.Truncated, len(got.Answer), n, want)
		}
	}
}
