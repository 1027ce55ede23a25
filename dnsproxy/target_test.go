package dnsproxy_test

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// targetHosts has an external host, a wildcard, and a Service of type ExternalName for a host that the
// table does not have.
func targetHosts() hosts {
	return hosts{
		"api.example.com":            external("192.0.2.1"),
		"*.wild.example.com":         external("192.0.2.3"),
		"ext.shop.svc.cluster.local": alias("ext", "mail.example.org", "192.0.2.4"),
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
	}
}

// targetRecords are the data of records of types that the table does not have.
var targetRecords = map[string]string{
	"MX": "10 mx.example.net.", "TXT": `"v=spf1 -all"`, "SRV": "0 5 443 srv.example.net.", "CAA": `0 issue "ca.example.net"`,
	"NAPTR": `100 10 "S" "SIP+D2U" "" _sip._udp.example.net.`, "NS": "ns.example.net.", "CNAME": "lb.example.net.", "URI": `10 1 "https://example.net/"`,
}

// TestTargets asks for records of types that the table does not have, by all names of a host. Nameservers
// are asked once, for the name that these lead to.
func TestTargets(t *testing.T) { // A4, D9, N5
	synctest.Test(t, func(t *testing.T) {
		p, fake := startMesh(t, targetHosts())
		const ext = "ext.shop.svc.cluster.local.; ext.shop.svc.cluster.local. CNAME mail.example.org."
		names := map[string][]string{
			"api.example.com.": {
				"api.example.com.", "Api.example.com.SHOP.svc.cluster.local. CNAME Api.example.com.",
			},
			"a.wild.example.com.": {"a.wild.example.com.", "a.wild.example.com.shop.svc.cluster.local. CNAME a.wild.example.com."},
			"mail.example.org.": {
				"mail.example.org.", "ext.shop.svc.cluster.local. CNAME mail.example.org.", "ext.shop. CNAME " + ext, "ext.shop.shop.svc.cluster.local. CNAME " + ext,
			},
		}
		for qtype, data := range targetRecords {
			var records []string
			for target := range names {
				records = append(records, target+" 60 IN "+qtype+" "+data)
			}
			fake.Handle(fakedns.Answer(records...))
			fake.Reset()
			code := dns.StringToType[qtype]
			for target, forms := range names {
				for _, form := range forms {
					name, _, _ := strings.Cut(form, " ")
					want := target + " " + qtype + " " + data
					if form != name && qtype == "CNAME" {
						want, _, _ = strings.Cut(form, ";") // the table has it
					} else if form != name {
						want = form + "; " + want
					}
					for _, network := range []string{"udp", "tcp"} {
						if got := strings.TrimSuffix(outcome(p.exchange(t, network, question(name, code))), "; NODATA"); !strings.EqualFold(got, want) {
							t.Errorf("%s %s over %s\n got %s\nwant %s", name, qtype, network, got, want)
						}
					}
				}
			}
			asked := map[string]int{}
			for _, q := range fake.Queries() {
				if q.Type == code {
					asked[strings.ToLower(q.Name)]++
				}
			}
			want := map[string]int{"api.example.com.": 1, "a.wild.example.com.": 1, "mail.example.org.": 1}
			if diff := cmp.Diff(want, asked); diff != "" {
				t.Errorf("%s: nameservers are asked (-want +got):\n%s", qtype, diff)
			}
		}
	})
}

// TestTargetWithoutRecords checks that an expanded name whose target has no such record is NODATA without
// a CNAME record, at which glibc would end its search list, and that failures stay failures.
func TestTargetWithoutRecords(t *testing.T) { // A4, N5
	t.Parallel()
	p, fake := startMesh(t, targetHosts())
	fake.Handle(fakedns.Answer(`mail.example.org. 60 IN A 192.0.2.4`))
	const ext = "ext.shop.svc.cluster.local."
	p.converse(t, []dialogue{
		{"api.example.com MX", "NODATA api.example.com."}, // NXDOMAIN of the nameserver
		{"api.example.com.shop.svc.cluster.local MX", "NODATA api.example.com.shop.svc.cluster.local."},
		{ext + " MX", ext + " CNAME mail.example.org.; NODATA mail.example.org."}, // NODATA of the nameserver, without SOA
		{"ext.shop.shop.svc.cluster.local MX", "NODATA ext.shop.shop.svc.cluster.local."},
	})
	fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	p.converse(t, []dialogue{{"api.example.com.shop.svc.cluster.local TXT", "SERVFAIL"}, {"ext TXT", "SERVFAIL"}})
}

// TestReverseRecords asks for records of types but PTR of the reverse names of addresses: nameservers may have
// some, unless a Service has the address.
func TestReverseRecords(t *testing.T) { // A4, N8
	t.Parallel()
	p, fake := startMesh(t, targetHosts())
	fake.Handle(fakedns.Answer(`1.2.0.192.in-addr.arpa. 60 IN TXT "a host"`, `1.0.0.10.in-addr.arpa. 60 IN TXT "a Service"`))
	p.converse(t, []dialogue{
		{"1.2.0.192.in-addr.arpa TXT", `1.2.0.192.in-addr.arpa. TXT "a host"`},
		{"1.2.0.192.in-addr.arpa PTR", "NODATA"}, // the nameserver's
		{"1.0.0.10.in-addr.arpa TXT", "NODATA 1.0.0.10.in-addr.arpa."},
	})
	fake.Handle(fakedns.Rcode(dns.RcodeNameError))
	p.converse(t, []dialogue{
		{"1.2.0.192.in-addr.arpa MX", "NODATA 1.2.0.192.in-addr.arpa."}, // the name exists
		{"4.2.0.192.in-addr.arpa PTR", forwarded},                       // an alias's
	})
}

// TestTargetRelayed asks with a client's subnet, without RD, and through a nameserver that truncates: what is
// not cached leads to the target, too.
func TestTargetRelayed(t *testing.T) { // A4, F1
	synctest.Test(t, func(t *testing.T) {
		p, fake := startMesh(t, targetHosts())
		fake.Handle(fakedns.Answer(`api.example.com. 60 IN MX 10 mx.example.net.`))
		const name, want = "api.example.com.shop.svc.cluster.local.", "api.example.com.shop.svc.cluster.local. CNAME api.example.com.; api.example.com. MX 10 mx.example.net."
		for _, prepare := range []func(*dns.Msg){
			func(m *dns.Msg) { m.RecursionDesired = false },
			func(m *dns.Msg) { // of an unusual shape
				m.Extra = append(m.Extra, &dns.A{Hdr: dns.RR_Header{Name: "x.", Rrtype: dns.TypeA, Class: dns.ClassINET}, A: []byte{192, 0, 2, 1}})
			},
			func(m *dns.Msg) {
				m.SetEdns0(1232, true)
				opt := m.IsEdns0()
				opt.Option = append(opt.Option, &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: []byte{192, 0, 2, 0}})
			},
		} {
			for _, network := range []string{"udp", "tcp"} {
				req := question(name, dns.TypeMX)
				prepare(req)
				resp := p.exchange(t, network, req)
				if got := outcome(resp); got != want || (resp.IsEdns0() == nil) != (req.IsEdns0() == nil) {
					t.Errorf("over %s:\n%v", network, resp)
				}
			}
		}
		for _, q := range fake.Queries() {
			if strings.Contains(q.Name, "shop") {
				t.Errorf("a nameserver is asked for %s", q.Name)
			}
		}
		fake.Handle(fakedns.Truncate(fakedns.Size(2000)))
		req := question(name, dns.TypeTXT)
		req.RecursionDesired = false
		if resp := p.exchange(t, "udp", req); !resp.Truncated {
			t.Errorf("the reply is truncated, and the response is\n%v", resp)
		}
	})
}

// TestTargetIsLocal checks that a name is not forwarded as one that is local-only, and that a local-only name is
// forwarded as one that is not.
func TestTargetIsLocal(t *testing.T) { // F12, D9
	t.Parallel()
	fake := nameserver(t, fakedns.Answer(`mail.example.org. 60 IN MX 10 mx.example.net.`))
	p := start(t, dnsproxy.Config{
		LocalOnly: []string{"cluster.local", "intern.example"},
		Forward:   forward.Config{ResolvConf: resolvConf(t, "search corp.example"), Upstreams: servers(fake)},
	})
	p.load(t, hosts{
		"ext.shop.svc.cluster.local": alias("ext", "mail.example.org", "192.0.2.4"),
		"db.example.com":             {Ips: []string{"192.0.2.5"}, Alias: "db.intern.example"},
	})
	p.converse(t, []dialogue{
		{"ext.shop.svc.cluster.local MX", "ext.shop.svc.cluster.local. CNAME mail.example.org.; mail.example.org. MX 10 mx.example.net."},
		{"db.example.com MX", "db.example.com. CNAME db.intern.example.; NODATA intern.example."},
	})
	if asked := fake.Queries(); slices.ContainsFunc(asked, func(q fakedns.Query) bool { return q.Name != "mail.example.org." }) {
		t.Errorf("nameservers are asked %v", asked)
	}
}

// TestTrustAD checks that AD reaches clients only with trust-ad, also in relayed replies and in
// replies for the target of a mesh name.
func TestTrustAD(t *testing.T) { // F1
	synctest.Test(t, func(t *testing.T) {
		for _, options := range []string{"options ndots:1", "options trust-ad"} {
			fake := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
				reply := new(dns.Msg).SetReply(query)
				reply.AuthenticatedData = true
				return reply
			})
			p := start(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: resolvConf(t, options), Upstreams: servers(fake)}})
			p.load(t, targetHosts())
			for _, recursion := range []bool{true, false} {
				req := question("www.example.org", dns.TypeMX)
				req.RecursionDesired = recursion
				if got := p.exchange(t, "udp", req).AuthenticatedData; got != (options == "options trust-ad") {
					t.Errorf("%s, RD %t: AD is %t", options, recursion, got)
				}
			}
		}
	})
}

// TestLongTarget asks for records of a target that nearly fill a message. Over TCP, records for
// which the CNAME record leaves no room are left out.
func TestLongTarget(t *testing.T) { // A4, A9
	synctest.Test(t, func(t *testing.T) {
		const target, txt = "api.example.com.", 255
		p, fake := startMesh(t, targetHosts())
		fake.Handle(func(query *dns.Msg, network string) *dns.Msg {
			msg := new(dns.Msg).SetReply(query)
			msg.Compress, msg.Truncated = true, network == "udp"
			for msg.Len() < dns.MaxMsgSize-txt && network == "tcp" {
				for range 10 {
					hdr := dns.RR_Header{Name: target, Rrtype: dns.TypeTXT, Class: dns.ClassINET, Ttl: 60}
					msg.Answer = append(msg.Answer, &dns.TXT{Hdr: hdr, Txt: []string{fmt.Sprintf("%0*d", txt, len(msg.Answer))}})
				}
				for msg.Len() > dns.MaxMsgSize {
					msg.Answer = msg.Answer[:len(msg.Answer)-1]
				}
			}
			return msg
		})
		whole := p.exchange(t, "tcp", question(target, dns.TypeTXT))
		cut := p.exchange(t, "tcp", question(target+"shop.svc.cluster.local.", dns.TypeTXT))
		if cut.Truncated || cut.Rcode != dns.RcodeSuccess || len(cut.Answer) > len(whole.Answer)+1 || len(cut.Answer) < len(whole.Answer)-1 {
			t.Errorf("of %d records there are %d behind the CNAME record, %s, TC %t", len(whole.Answer), len(cut.Answer)-1, dns.RcodeToString[cut.Rcode], cut.Truncated)
		}
		if small := p.ask(t, target+"shop.svc.cluster.local.", dns.TypeTXT); !small.Truncated {
			t.Errorf("over UDP:\n%v", small)
		}
	})
}

// TestTargetData asks for records whose data the DNS library does not read, or not as they are.
func TestTargetData(t *testing.T) { // A4
	synctest.Test(t, func(t *testing.T) {
		p, fake := startMesh(t, targetHosts())
		for qtype, data := range map[uint16]string{
			dns.TypeAPL:   "\x00\x01\x20\x04\xc0\x00\x02\x00", // with the zeros at the end that RFC 3123 leaves out
			dns.TypeHINFO: "\x05Intel",
			dns.TypeTLSA:  "\x03\x01",
			dns.TypeTXT:   "\x09short", // a length beyond the end
			dns.TypeLOC:   "\x01",
			65280:         "\x00\xff",
		} {
			fake.Handle(func(query *dns.Msg, _ string) *dns.Msg {
				reply := new(dns.Msg).SetReply(query)
				hdr := dns.RR_Header{Name: query.Question[0].Name, Rrtype: qtype, Class: dns.ClassINET, Ttl: 60}
				reply.Answer = []dns.RR{&dns.RFC3597{Hdr: hdr, Rdata: hex.EncodeToString([]byte(data))}}
				return reply
			})
			packed, err := question("api.example.com.shop.svc.cluster.local.", qtype).Pack()
			if err != nil {
				t.Fatal(err)
			}
			for _, network := range []string{"udp", "tcp"} {
				if got := p.send(t, network, packed); !bytes.HasSuffix(got, []byte(data)) || wire.Count(got, wire.AnswerSection) != 2 {
					t.Errorf("%s over %s: %q, want a CNAME record and one that ends with %q", dns.Type(qtype), network, got, data)
				}
			}
		}
	})
}
