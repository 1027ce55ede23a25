package dnsproxy_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

const guardPolicy = `
allow:
- names: [api.example.com, git.corp.example]
- names: ["*.pkg.example.net", "*.corp.example"]
- names: [mail.example.com]
  types: [MX]
- names: [only.below.example.org]
deny:
- names: [bad.pkg.example.net]
`

// A guarded is a proxy with a policy.
type guarded struct {
	*proxy

	guard *guard.Guard
	fake  *fakedns.Server
}

// guarding returns a proxy with guardPolicy, and a nameserver that has some records.
func guarding(t *testing.T, cfg dnsproxy.Config) *guarded {
	t.Helper()
	g := &guarded{guard: guard.New("key"), fake: nameserver(t, fakedns.Answer(
		"mail.example.com. 60 IN MX 10 mx.example.com.", "leak.example.com. 60 IN A 192.0.2.66", "leak.example.com. 60 IN TXT leak",
		"real.corp.example. 60 IN A 192.0.2.9", "db.corp.example. 60 IN A 192.0.2.10", "api.example.com. 60 IN A 192.0.2.1",
	))}
	g.use(t, guardPolicy)
	cfg.Guard = g.guard
	cfg.Forward = forward.Config{Upstreams: servers(g.fake), ResolvConf: resolvConf(t, "search shop.svc.cluster.local svc.cluster.local cluster.local corp.example")}
	g.proxy = start(t, cfg)
	return g
}

// use makes a policy the one in use.
func (g *guarded) use(t *testing.T, text string) {
	t.Helper()
	policy, err := guard.Parse("policy.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	g.guard.Use(policy)
}

// vip returns the VIP of a name.
func (g *guarded) vip(t *testing.T, name string) guard.Pair {
	t.Helper()
	n, err := wire.ParseHostname(name)
	if err != nil {
		t.Fatal(err)
	}
	return g.guard.VIPs(n)
}

// guardHosts is a mesh beside the guard.
func guardHosts() hosts {
	return hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"), "db.shop.svc.cluster.local": service("db", "shop", "10.0.0.2"),
		"ext.example.com": external("192.0.2.77"), "*.wild.example.com": external("192.0.2.78"),
	}
}

// G2, G3: what is not allowed does not leave, in any form, and the client is told why.
func TestGuardDenies(t *testing.T) {
	t.Parallel()
	g := guarding(t, dnsproxy.Config{Bypass: []string{"bypass.example"}})
	g.load(t, guardHosts())
	for ask, want := range map[string]string{
		"leak.example.com A":                           "no rule of policy.yaml allows it",
		"LEAK.eXample.com TXT":                         "no rule of policy.yaml allows it",
		"*.pkg.example.net AAAA":                       "no rule of policy.yaml allows it",
		"bad.pkg.example.net A":                        "denied by policy.yaml:9",
		"x.bypass.example A":                           "no rule of policy.yaml allows it",
		"api.example.com.shop.svc.cluster.local A":     "no rule of policy.yaml allows it",
		"api.example.com.cluster.local A":              "no rule of policy.yaml allows it",
		"x.api.example.com A":                          "no rule of policy.yaml allows it",
		"9.2.0.192.in-addr.arpa PTR":                   "no rule of policy.yaml allows it",
		"1.0.64.240.in-addr.arpa PTR":                  "no rule of policy.yaml allows it",
		"_ldap._tcp.example.com SRV":                   "no rule of policy.yaml allows it",
		"ext.example.com.corp.example.attacker.test A": "no rule of policy.yaml allows it",
		". NS":                      "no rule of policy.yaml allows it",
		"below.example.org A":       "NODATA policy.yaml allows only names below it",
		"api.example.com TXT":       "NODATA policy.yaml:3 does not name this type",
		"api.example.com HTTPS":     "NODATA policy.yaml:3 does not name this type",
		"api.example.com ANY":       "NODATA policy.yaml:3 does not name this type",
		"a.pkg.example.net SVCB":    "NODATA policy.yaml:4 does not name this type",
		"mail.example.com TXT":      "NODATA policy.yaml:5 does not name this type",
		"bad.pkg.example.net HTTPS": "denied by policy.yaml:9",
	} {
		name, qtype, _ := strings.Cut(ask, " ")
		for _, network := range []string{"udp", "tcp"} {
			resp := g.exchange(t, network, withEDNS(question(name, dns.StringToType[qtype]), 1232))
			e := ede(resp)
			rcode, text := dns.RcodeNameError, want
			if rest, found := strings.CutPrefix(want, "NODATA "); found {
				rcode, text = dns.RcodeSuccess, rest
			}
			soa := ""
			if len(resp.Ns) == 1 {
				soa = fmt.Sprintf("%s %s %d", resp.Ns[0].Header().Name, dns.TypeToString[resp.Ns[0].Header().Rrtype], resp.Ns[0].Header().Ttl)
			}
			if resp.Rcode != rcode || len(resp.Answer) > 0 || soa != "guard.nametap. SOA 30" || e == nil || e.InfoCode != dns.ExtendedErrorCodeBlocked ||
				e.ExtraText != "guard: "+text || resp.Question[0].Name != dns.Fqdn(name) {
				t.Errorf("%s over %s, want %q:\n%v", ask, network, want, resp)
			}
		}
	}
	wantAsked(t, 0, g.fake)
}

// G4: allowed names have VIPs, which have PTR records; no packet leaves. The longest denied name fits in a response.
func TestGuardAllows(t *testing.T) {
	t.Parallel()
	g := guarding(t, dnsproxy.Config{TTL: time.Hour})
	g.load(t, guardHosts())
	for _, name := range []string{"api.example.com", "x.y.pkg.example.net", "git.corp.example"} {
		pair := g.vip(t, name)
		mixed := strings.ToUpper(name[:3]) + name[3:] + "."
		g.converse(t, []dialogue{
			{mixed + " A", mixed + " A " + pair.V4.String()},
			{mixed + " AAAA", mixed + " AAAA " + pair.V6.String()},
		})
		for _, vip := range []string{pair.V4.String(), pair.V6.String()} {
			reverse, err := dns.ReverseAddr(vip)
			if err != nil {
				t.Fatal(err)
			}
			g.converse(t, []dialogue{{reverse + " PTR", reverse + " PTR " + name + "."}, {reverse + " TXT", "NODATA guard.nametap."}})
		}
		if ttl := g.ask(t, name, dns.TypeA).Answer[0].Header().Ttl; ttl != 30 {
			t.Errorf("%s has the TTL %d", name, ttl)
		}
	}
	wantAsked(t, 0, g.fake)
	long := strings.Repeat(strings.Repeat("a", 61)+".", 4)
	for _, req := range []*dns.Msg{question(long, dns.TypeA), withEDNS(question(long, dns.TypeA), 512)} {
		if resp := g.exchange(t, "udp", req); resp.Rcode != dns.RcodeNameError || resp.Truncated || len(resp.Ns) != 1 {
			t.Errorf("%v", resp)
		}
	}
	g.converse(t, []dialogue{{"mail.example.com MX", "mail.example.com. MX 10 mx.example.com."}})
	wantAsked(t, 1, g.fake)
}

// G2: names of the mesh table, special-use names and local-only names are answered as before. A denied search candidate
// does not hide the mesh name behind it, nor does one that a wildcard allows and that does not exist.
func TestGuardLeavesMesh(t *testing.T) {
	t.Parallel()
	g := guarding(t, dnsproxy.Config{LocalOnly: []string{"lab.example"}, Version: "1.0"})
	g.load(t, guardHosts())
	const web = "web.shop.svc.cluster.local."
	g.converse(t, []dialogue{
		{"web A", webAddress}, {web + " A", web + " A 10.0.0.1"}, {web + " TXT", "NODATA " + web},
		{"ext.example.com A", "ext.example.com. A 192.0.2.77"}, {"x.wild.example.com A", "x.wild.example.com. A 192.0.2.78"},
		{"ext.example.com.shop.svc.cluster.local A", "ext.example.com.shop.svc.cluster.local. CNAME ext.example.com.; ext.example.com. A 192.0.2.77"},
		{"1.0.0.10.in-addr.arpa PTR", "1.0.0.10.in-addr.arpa. PTR " + web},
		{"77.2.0.192.in-addr.arpa PTR", "77.2.0.192.in-addr.arpa. PTR ext.example.com."},
		{"localhost A", "localhost. A 127.0.0.1"}, {"x.invalid A", "NXDOMAIN"}, {"x.lab.example A", "NXDOMAIN"},
	})
	wantAsked(t, 0, g.fake)
	g.converse(t, []dialogue{
		{"web.shop.corp.example A", "web.shop.corp.example. CNAME " + web + "; " + web + " A 10.0.0.1"}, // the nameserver does not have it
		{"leak.example.com.corp.example A", "NXDOMAIN"},
		{"real.corp.example A", "real.corp.example. A " + g.vip(t, "real.corp.example").V4.String()},
		{"db.corp.example AAAA", "db.corp.example. AAAA " + g.vip(t, "db.corp.example").V6.String()},
	})
	for _, q := range g.fake.Queries() {
		if !strings.HasSuffix(q.Name, ".corp.example.") {
			t.Errorf("%s has left", q.Name)
		}
	}
	g.use(t, "allow:\n- names: [api.example.com]") // the candidates are denied now
	g.fake.Reset()
	g.converse(t, []dialogue{
		{"web.shop.corp.example A", "web.shop.corp.example. CNAME " + web + "; " + web + " A 10.0.0.1"},
		{"real.corp.example A", "NXDOMAIN"},
	})
	wantAsked(t, 0, g.fake)
}

// G5: opcodes other than QUERY, transfers, and signed queries are refused, unless they need not leave.
func TestGuardRefuses(t *testing.T) {
	t.Parallel()
	g := guarding(t, dnsproxy.Config{})
	g.load(t, guardHosts())
	for name, change := range map[string]func(*dns.Msg){
		"update":   func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate },
		"notify":   func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify },
		"transfer": func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAXFR },
		"signed":   func(m *dns.Msg) { m.SetTsig("key.", dns.HmacSHA256, 300, time.Now().Unix()) },
	} {
		for _, to := range []string{"mail.example.com", "leak.example.com"} {
			req := withEDNS(question(to, dns.TypeMX), 1232)
			if change(req); name == "signed" && to != "mail.example.com" {
				continue // it is denied as others are
			}
			resp := g.exchange(t, "tcp", req)
			if e := ede(resp); resp.Rcode != dns.RcodeRefused || e == nil || e.InfoCode != dns.ExtendedErrorCodeBlocked || resp.Opcode != req.Opcode {
				t.Errorf("%s of %s:\n%v", name, to, resp)
			}
		}
	}
	signed := question("web", dns.TypeA).SetTsig("key.", dns.HmacSHA256, 300, time.Now().Unix())
	if got := outcome(g.exchange(t, "udp", signed)); got != webAddress {
		t.Errorf("a signed query for a mesh name: %s", got)
	}
	wantAsked(t, 0, g.fake)
}

// G2, G12: names are judged before the first table, too. A change of the policy is in use for the next query; without a
// policy, or in audit, queries are answered as without a guard. G11, G13: what was asked is recorded, and by whom.
func TestGuardChanges(t *testing.T) {
	t.Parallel()
	g := guarding(t, dnsproxy.Config{})
	const vip, real = "api.example.com A", "api.example.com. A 192.0.2.1"
	g.converse(t, []dialogue{{"leak.example.com A", "NXDOMAIN"}, {vip, "api.example.com. A " + g.vip(t, "api.example.com").V4.String()}})
	wantAsked(t, 0, g.fake)
	g.load(t, guardHosts())
	g.use(t, "mode: audit\n"+guardPolicy)
	g.converse(t, []dialogue{
		{vip, real}, {"leak.example.com TXT", `leak.example.com. TXT "leak"`}, {"gone.example.com A", "NXDOMAIN"}, {"web A", webAddress},
	})
	var got []string
	for _, r := range g.guard.Records().Names {
		got = append(got, fmt.Sprint(r.Name, " ", r.Verdict, " ", r.Rule, " ", r.Asked, " ", r.Exists, " ", r.Types, " ", r.Client))
	}
	who := fmt.Sprintf(" uid %d", os.Getuid())
	if want := strings.Join([]string{
		"api.example.com allowed policy.yaml:4 2 true []" + who,
		"gone.example.com denied  1 false []" + who,
		"leak.example.com denied  2 true [TXT]" + who,
	}, "\n"); strings.Join(got, "\n") != want {
		t.Errorf("%s\nwant\n%s", strings.Join(got, "\n"), want)
	}
	g.guard.Use(nil)
	g.converse(t, []dialogue{{vip, real}, {"leak.example.com A", "leak.example.com. A 192.0.2.66"}})
	g.use(t, "deny:\n- names: [api.example.com]")
	g.converse(t, []dialogue{{vip, "NXDOMAIN"}})
}

// G2, G6: the agent itself may look up all names, but no CNAME record may lead to a name that a rule denies.
func TestGuardAliases(t *testing.T) {
	t.Parallel()
	g := guarding(t, dnsproxy.Config{})
	cname, err := dns.NewRR("cdn.example.com. 60 IN CNAME bad.pkg.example.net.")
	if err != nil {
		t.Fatal(err)
	}
	answers := fakedns.Answer("leak.example.com. 60 IN A 192.0.2.66", "bad.pkg.example.net. 60 IN A 192.0.2.67")
	g.fake.Handle(func(query *dns.Msg, network string) *dns.Msg {
		if query.Question[0].Name != "cdn.example.com." {
			return answers(query, network)
		}
		reply := answers(question("bad.pkg.example.net", dns.TypeA), network)
		reply.Answer = append([]dns.RR{cname}, reply.Answer...)
		reply.Id, reply.Question = query.Id, query.Question
		return reply
	})
	if addrs, _, err := g.Resolve(t.Context(), "leak.example.com", dns.TypeA, false); err != nil || len(addrs) != 1 {
		t.Errorf("%v, %v", addrs, err)
	}
	want := "a CNAME record leads to bad.pkg.example.net.: guard: denied by policy.yaml:9"
	for _, onlyCached := range []bool{false, true} {
		if addrs, _, err := g.Resolve(t.Context(), "cdn.example.com", dns.TypeA, onlyCached); err == nil || err.Error() != want {
			t.Errorf("%v, %v, want %s", addrs, err, want)
		}
	}
	g.guard.Use(nil)
	if addrs, _, err := g.Resolve(t.Context(), "cdn.example.com", dns.TypeA, true); err != nil || len(addrs) != 1 {
		t.Errorf("without a policy: %v, %v", addrs, err)
	}
}

// G16: the rule that decides is named.
func TestGuardExplains(t *testing.T) {
	t.Parallel()
	g := guarding(t, dnsproxy.Config{})
	g.load(t, guardHosts())
	for ask, want := range map[string]string{
		"leak.example.com A":    "[G3] self guard: no rule of policy.yaml allows it: NXDOMAIN",
		"bad.pkg.example.net A": "[G3] self guard: denied by policy.yaml:9: NXDOMAIN",
		"below.example.org A":   "[G3] self guard: policy.yaml allows only names below it: NODATA",
		"api.example.com TXT":   "[G5] self guard: policy.yaml:3 does not name this type: NODATA",
		"api.example.com A":     "[G4] self guard: allowed by policy.yaml:3: its VIP",
		"api.example.com AXFR":  "[G5] self guard: zone transfers, signed queries and opcodes other than QUERY do not leave this host",
		"ext.example.com TXT":   "[N1 A4] upstream in the mesh table: the host's FQDN; forwarded, because the table has no records of this type",
		"mail.example.com MX":   "[N9] upstream not in the mesh table: forwarded; guard: allowed by policy.yaml:5",
	} {
		if e := explain(t, g.proxy, ask); fmt.Sprint(e.Rows, " ", e.Source, " ", e.Why) != want {
			t.Errorf("%s: %v %s %s, want %s", ask, e.Rows, e.Source, e.Why, want)
		}
	}
	if records := g.guard.Records().Names; len(records) > 0 {
		t.Errorf("explaining is recorded: %v", records)
	}
}
