package dnsproxy_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
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
