package reply_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/reply"
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
	for name, msg := range replies(t) {
		for _, compress := range []bool{true, false} {
			for _, edns := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s compressed %t EDNS %t", name, compress, edns), func(t *testing.T) {
					msg := msg.Copy()
					msg.Compress = compress
					if edns {
						msg.SetEdns0(4096, true)
					}
					q := request(t, "www.example.", msg.Question[0].Qtype)
					q.KeepAD = true
					got := unpack(t, parse(t, pack(t, msg)).Append(nil, q, reply.Age{}))
					wantSections(t, got, msg)
					want := msg.MsgHdr
					want.Id = 0xC11E
					if got.MsgHdr != want {
						t.Errorf("header %+v, want %+v", got.MsgHdr, want)
					}
				})
			}
		}
	}
}

// A1, A8: the header bits and the OPT record that belong to the client or to the hop.
func TestAppendHeader(t *testing.T) {
	msg := upstream(t, "www.example.", dns.TypeA)
	msg.RecursionDesired, msg.AuthenticatedData, msg.Zero = true, true, true
	msg.SetEdns0(4096, true)
	msg.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"}}
	r := parse(t, pack(t, msg))
	for i := range 32 {
		rd, cd, edns, do, keepAD := i&1 > 0, i&2 > 0, i&4 > 0, i&8 > 0, i&16 > 0
		client := new(dns.Msg).SetQuestion("www.example.", dns.TypeA)
		client.RecursionDesired, client.CheckingDisabled, client.AuthenticatedData = rd, cd, true
		client.SetEdns0(512, false)
		wire := pack(t, client)
		q := &reply.Request{Query: wire[:len(wire)-11], EDNS: edns, DO: do, UDPSize: 1232, KeepAD: keepAD, Limit: 512}
		got := unpack(t, r.Append(nil, q, reply.Age{}))
		want := dns.MsgHdr{Id: client.Id, Response: true, Authoritative: true, RecursionAvailable: true,
			RecursionDesired: rd, CheckingDisabled: cd, AuthenticatedData: keepAD}
		if got.MsgHdr != want {
			t.Errorf("header %+v, want %+v", got.MsgHdr, want)
		}
		opt := got.IsEdns0()
		if (opt != nil) != edns {
			t.Fatalf("EDNS %t: OPT %v", edns, opt)
		}
		if edns && (opt.Do() != do || opt.UDPSize() != 1232 || len(opt.Option) != 0) {
			t.Errorf("DO %t: %v", do, opt)
		}
	}
}

// RFC 6891, section 6.1.3: the response code BADVERS needs an OPT record.
func TestAppendExtendedRcode(t *testing.T) {
	msg := upstream(t, "www.example.", dns.TypeA)
	msg.SetEdns0(4096, false)
	msg.Rcode = dns.RcodeBadVers
	r := parse(t, pack(t, msg))
	q := request(t, "www.example.", dns.TypeA)
	if got := unpack(t, r.Append(nil, q, reply.Age{})); got.Rcode != dns.RcodeBadVers {
		t.Errorf("with EDNS %v", got)
	}
	q.EDNS = false
	if got := unpack(t, r.Append(nil, q, reply.Age{})); got.Rcode != dns.RcodeServerFailure {
		t.Errorf("without EDNS the response code must not become NOERROR: %v", got)
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
				for _, age := range []reply.Age{{}, {Cached: true}} {
					got := unpack(t, r.Append(nil, request(t, spelling, dns.TypeA), age))
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

// F8: for a reply from the cache TTLs are counted down, and AA is cleared.
func TestAppendCached(t *testing.T) {
	msg := upstream(t, "www.example.", dns.TypeA, "www.example. 300 CNAME b.example.", "b.example. 20 A 192.0.2.1")
	msg.Ns = records(t, "example. 10 NS ns.example.")
	msg.SetEdns0(4096, true)
	want := msg.Copy()
	want.Answer = records(t, "www.example. 285 CNAME b.example.", "b.example. 5 A 192.0.2.1")
	want.Ns = records(t, "example. 0 NS ns.example.")
	q := request(t, "www.example.", dns.TypeA)
	got := unpack(t, parse(t, pack(t, msg)).Append(nil, q, reply.Age{Cached: true, Seconds: 15}))
	wantSections(t, got, want)
	if got.Authoritative || got.IsEdns0().Hdr.Ttl != 0 {
		t.Errorf("got %v", got)
	}
}

// F9: a stale reply has a TTL of 30 s and an Extended DNS Error.
func TestAppendStale(t *testing.T) {
	for rcode, code := range map[int]uint16{
		dns.RcodeSuccess:   dns.ExtendedErrorCodeStaleAnswer,
		dns.RcodeNameError: dns.ExtendedErrorCodeStaleNXDOMAINAnswer,
	} {
		msg := upstream(t, "www.example.", dns.TypeA, "www.example. 300 A 192.0.2.1")
		msg.Rcode, msg.AuthenticatedData = rcode, true
		r := parse(t, pack(t, msg))
		q := request(t, "www.example.", dns.TypeA)
		q.KeepAD = true
		age := reply.Age{Cached: true, Seconds: 4000, Stale: true}
		got := unpack(t, r.Append(nil, q, age))
		opt := got.IsEdns0()
		if got.Answer[0].Header().Ttl != 30 || got.Authoritative || got.AuthenticatedData || len(opt.Option) != 1 {
			t.Fatalf("got %v", got)
		}
		if ede, ok := opt.Option[0].(*dns.EDNS0_EDE); !ok || ede.InfoCode != code {
			t.Errorf("Extended DNS Error %v, want %d", ede, code)
		}
		q.EDNS = false
		if got := unpack(t, r.Append(nil, q, age)); got.IsEdns0() != nil || got.Answer[0].Header().Ttl != 30 {
			t.Errorf("without EDNS %v", got)
		}
	}
}

// RFC 8914: the client gets the nameserver's Extended DNS Errors, but not its other options.
func TestAppendExtendedErrors(t *testing.T) {
	msg := upstream(t, "www.example.", dns.TypeA)
	msg.SetEdns0(4096, false)
	dnssec := &dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeDNSBogus, ExtraText: "no key"}
	network := &dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeNetworkError}
	msg.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_NSID{Code: dns.EDNS0NSID, Nsid: "aa"}, dnssec,
		&dns.EDNS0_PADDING{Padding: make([]byte, 20)}, network}
	msg.Rcode = dns.RcodeServerFailure
	r := parse(t, pack(t, msg))
	q := request(t, "www.example.", dns.TypeA)
	q.Limit = 512
	got := unpack(t, r.Append(nil, q, reply.Age{})).IsEdns0().Option
	if len(got) != 2 || *got[0].(*dns.EDNS0_EDE) != *dnssec || *got[1].(*dns.EDNS0_EDE) != *network {
		t.Errorf("options %v", got)
	}

	// They are left out before any record is.
	dnssec.ExtraText = strings.Repeat("x", 600)
	msg.Rcode = dns.RcodeSuccess
	msg.Answer = records(t, "www.example. 300 A 192.0.2.1")
	cut := unpack(t, parse(t, pack(t, msg)).Append(nil, q, reply.Age{}))
	if !cut.Truncated || len(cut.Answer) != 1 || len(cut.IsEdns0().Option) != 0 {
		t.Errorf("got %v", cut)
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
	for _, edns := range []bool{true, false} {
		q := request(t, "www.example.", dns.TypeTXT)
		q.EDNS = edns
		q.Limit = dns.MaxMsgSize
		size := len(r.Append(nil, q, reply.Age{}))
		needed := size - len("\xC0\x00") - 10 - 4 // without the additional record, for which TC is not set
		for q.Limit = 512; q.Limit <= size; q.Limit++ {
			wire := r.Append(nil, q, reply.Age{})
			got := unpack(t, wire)
			kept := append(append(got.Answer, got.Ns...), withoutOPT(got.Extra)...)
			switch {
			case len(wire) > q.Limit:
				t.Fatalf("%d bytes, limit %d", len(wire), q.Limit)
			case got.Truncated != (q.Limit < needed) || got.Truncated != (len(kept) < len(all)-1) || q.Limit < size != (len(kept) < len(all)):
				t.Fatalf("limit %d of %d: TC %t, %d of %d records", q.Limit, size, got.Truncated, len(kept), len(all))
			case (got.IsEdns0() != nil) != edns:
				t.Fatalf("limit %d: EDNS %t, OPT %v", q.Limit, edns, got.IsEdns0())
			}
			for i, rr := range kept {
				if rr.String() != all[i].String() {
					t.Fatalf("limit %d, record %d: %v, want %v", q.Limit, i, rr, all[i])
				}
			}
			if next := len(kept); next < len(all) && next < len(msg.Answer) && len(wire)+12+1+next <= q.Limit {
				t.Fatalf("limit %d: %d bytes, and record %d would fit", q.Limit, len(wire), next)
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
	got := unpack(t, r.Append(nil, request(t, "WWW.example.", dns.TypeMX), reply.Age{}))
	want := unpack(t, bytes.Replace(pack(t, msg), []byte("www"), []byte("WWW"), 1))
	wantSections(t, got, want)
	if opt := got.IsEdns0(); len(opt.Option) != 1 {
		t.Errorf("OPT %v", opt)
	}
	if ttl, _ := r.TTL(); ttl.Seconds() != 60 {
		t.Errorf("TTL %v", ttl)
	}
}

// Append keeps what is in the buffer: over TCP a length is in front of the message. Buffers are
// reused.
func TestAppendBehind(t *testing.T) {
	r := parse(t, pack(t, replies(t)["full"]))
	q := request(t, "wWw.example.", dns.TypeMX)
	buf := append(make([]byte, 0, 4096), "xy"...)
	got := r.Append(buf, q, reply.Age{Cached: true, Seconds: 3})
	if want := r.Append(nil, q, reply.Age{Cached: true, Seconds: 3}); !bytes.Equal(got[2:], want) || &got[0] != &buf[:1][0] {
		t.Errorf("behind 2 bytes %x, alone %x", got, want)
	}
	if allocs := testing.AllocsPerRun(100, func() { r.Append(buf, q, reply.Age{Cached: true, Stale: true}) }); allocs != 0 {
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
		q := request(t, "www.example.", dns.TypeA)
		q.Limit = limit
		got := unpack(t, r.Append(nil, q, reply.Age{}))
		want := 0
		if len(r.Append(nil, request(t, "www.example.", dns.TypeA), reply.Age{})) <= limit {
			want = len(withoutOPT(msg.Extra))
		}
		if n := len(withoutOPT(got.Extra)); got.Truncated || len(got.Answer) != 1 || n != want {
			t.Fatalf("limit %d: TC is %t, %d answers, %d additional records, want %d", limit, got.Truncated, len(got.Answer), n, want)
		}
	}
}
