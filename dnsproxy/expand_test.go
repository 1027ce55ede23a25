package dnsproxy_test

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// withSOA adds an SOA record with a TTL in seconds to a handler's negative answers, so that
// they are cached.
func withSOA(tb testing.TB, ttl string, handler fakedns.Handler) fakedns.Handler {
	tb.Helper()
	soa, err := dns.NewRR("example. " + ttl + " IN SOA ns.example. h.example. 1 2 3 4 " + ttl)
	if err != nil {
		tb.Fatal(err)
	}
	return func(query *dns.Msg, network string) *dns.Msg {
		reply := handler(query, network)
		if reply != nil && len(reply.Answer) == 0 && reply.Rcode != dns.RcodeServerFailure {
			reply.Ns = []dns.RR{soa}
		}
		return reply
	}
}

// except answers the names below a suffix with another handler.
func except(suffix string, special, others fakedns.Handler) fakedns.Handler {
	return func(query *dns.Msg, network string) *dns.Msg {
		if dns.IsSubDomain(suffix, strings.ToLower(query.Question[0].Name)) {
			return special(query, network)
		}
		return others(query, network)
	}
}

// startWalker runs a server that walks the search list shop.example, corp.example,
// lab.example and asks one nameserver.
func startWalker(tb testing.TB, handler fakedns.Handler, cfg dnsproxy.Config) (*proxy, *fakedns.Server) {
	tb.Helper()
	fake := nameserver(tb, handler)
	cfg.Forward.Upstreams, cfg.Autopath = servers(fake), dnsproxy.AutopathAll
	if cfg.Forward.ResolvConf == "" {
		cfg.Forward.ResolvConf = resolvConf(tb, "search shop.example corp.example lab.example", "options ndots:3")
	}
	return startForwarder(tb, cfg), fake
}

// The first name that has an address is the target for both families. For the family
// without addresses there is no CNAME record, which would end glibc's walk: a client that
// wants only that family reaches a later name that has it.
func TestWalkLeadsToOneHost(t *testing.T) { // F13
	t.Parallel()
	known := fakedns.Answer(
		"db.corp.example. 60 IN AAAA 2001:db8::1",
		"db.lab.example. 60 IN A 192.0.2.2", "db.lab.example. 60 IN AAAA 2001:db8::2",
		"api.corp.example. 60 IN A 192.0.2.3", "api.lab.example. 60 IN AAAA 2001:db8::3",
		"mail.corp.example. 60 IN MX 1 mail.example.", "mail.lab.example. 60 IN A 192.0.2.4",
		"here.shop.example. 60 IN A 192.0.2.5", "here.corp.example. 60 IN AAAA 2001:db8::5",
	)
	// This server says that names without an AAAA record do not exist (RFC 4074).
	broken := func(query *dns.Msg, network string) *dns.Msg {
		reply := known(query, network)
		if query.Question[0].Qtype == dns.TypeAAAA && len(reply.Answer) == 0 {
			reply.Rcode = dns.RcodeNameError
		}
		return reply
	}
	for name, handler := range map[string]fakedns.Handler{"by the book": known, "broken": broken} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, _ := startWalker(t, withSOA(t, "60", handler), dnsproxy.Config{})
			dialogues := []dialogue{
				{"db.shop.example A", "NODATA example."},
				{"db.shop.example AAAA", "db.shop.example. CNAME db.corp.example.; db.corp.example. AAAA 2001:db8::1"},
				{"api.shop.example A", "api.shop.example. CNAME api.corp.example.; api.corp.example. A 192.0.2.3"},
				{"api.shop.example AAAA", "NODATA example."},
				// A name without any address is skipped, as in glibc.
				{"mail.shop.example A", "mail.shop.example. CNAME mail.lab.example.; mail.lab.example. A 192.0.2.4"},
				{"here.shop.example A", "here.shop.example. A 192.0.2.5"},
				{"none.shop.example A", "NXDOMAIN"},
				{"none.shop.example AAAA", "NXDOMAIN"},
			}
			p.converse(t, dialogues)
			slices.Reverse(dialogues)
			p.converse(t, dialogues) // from the cache
		})
	}
}

// A search list may contain the root: the unexpanded name is tried at that place, as in
// glibc.
func TestWalkRootInSearchList(t *testing.T) { // F13, F5
	t.Parallel()
	known := withSOA(t, "60", fakedns.Answer("db. 60 IN A 192.0.2.1", "db.corp.example. 60 IN A 192.0.2.2", "api.corp.example. 60 IN A 192.0.2.3"))
	for search, want := range map[string]string{
		"shop.example . corp.example . lab.example": "db.",
		"shop.example corp.example .":               "db.corp.example.",
		// The client has asked for db. before.
		". shop.example corp.example": "db.corp.example.",
	} {
		conf := resolvConf(t, "search "+search, "options ndots:3")
		p, _ := startWalker(t, known, dnsproxy.Config{Forward: forward.Config{ResolvConf: conf}})
		p.converse(t, []dialogue{{"api.shop.example A", "api.shop.example. CNAME api.corp.example.; api.corp.example. A 192.0.2.3"}})
		resp := p.ask(t, "db.shop.example", dns.TypeA)
		if alias, ok := resp.Answer[0].(*dns.CNAME); !ok || alias.Target != want {
			t.Errorf("search %s: want an alias of %s:\n%v", search, want, resp)
		}
	}
}

// Only the first query of a client's walk starts a walk: other names below the search list
// are literal, or later steps of the client's own walk.
func TestWalkOnlyFromTheStart(t *testing.T) { // F13
	t.Parallel()
	p, fake := startWalker(t, fakedns.Answer("db.lab.example. 60 IN A 192.0.2.1", "a.b.c.d. 60 IN A 192.0.2.2"), dnsproxy.Config{})
	p.converse(t, []dialogue{
		{"db.corp.example A", "NXDOMAIN"},
		{"a.b.c.d.shop.example A", "NXDOMAIN"}, // a client tries a name with that many dots unexpanded first
	})
	signed := question("db.shop.example", dns.TypeA).SetEdns0(1232, true)
	if got := outcome(p.exchange(t, "udp", signed)); got != "NXDOMAIN" { // a client could not validate nametap's CNAME
		t.Errorf("with DO: %s", got)
	}
	if asked := fake.Queries(); len(asked) != 3 {
		t.Errorf("asked %v", asked)
	}
}

// A mesh name ends the walk, as it would end the client's.
func TestWalkEndsAtTable(t *testing.T) { // F13
	t.Parallel()
	p, _ := startWalker(t, withSOA(t, "60", fakedns.Answer("db.lab.example. 60 IN A 192.0.2.1")), dnsproxy.Config{})
	p.converse(t, []dialogue{{"db.shop.example A", "db.shop.example. CNAME db.lab.example.; db.lab.example. A 192.0.2.1"}})
	p.load(t, hosts{"db.corp.example": external("10.0.0.9")})
	p.converse(t, []dialogue{
		{"db.shop.example A", "NXDOMAIN"},
		{"db.corp.example A", "db.corp.example. A 10.0.0.9"},
	})
}

// A name whose nameservers are silent does not delay a name before it, and delays one after
// it by at most the query timeout.
func TestWalkWithDeadZone(t *testing.T) { // F13, F16
	t.Parallel()
	const timeout = 2 * time.Second
	known := fakedns.Answer("db.corp.example. 60 IN A 192.0.2.1", "db.lab.example. 60 IN A 192.0.2.2")
	for dead, c := range map[string]struct{ want string }{
		"lab.example.":  {"db.shop.example. CNAME db.corp.example.; db.corp.example. A 192.0.2.1"},
		"corp.example.": {"db.shop.example. CNAME db.lab.example.; db.lab.example. A 192.0.2.2"},
	} {
		t.Run(dead, func(t *testing.T) {
			t.Parallel()
			p, _ := startWalker(t, withSOA(t, "60", except(dead, fakedns.Silence, known)), dnsproxy.Config{Forward: forward.Config{Timeout: timeout}})
			began := time.Now()
			p.converse(t, []dialogue{{"db.shop.example A", c.want}})
			took := time.Since(began)
			if dead == "lab.example." && took >= timeout || took >= 2*timeout {
				t.Errorf("it took %s", took)
			}
		})
	}
}

// A cached walk does not outlive a change of the search list.
func TestWalkFollowsSearchList(t *testing.T) { // F13, F5
	t.Parallel()
	path := resolvConf(t, "nameserver 192.0.2.53", "search shop.example corp.example", "options ndots:3")
	p, _ := startWalker(t, withSOA(t, "600", fakedns.Answer("db.corp.example. 600 IN A 192.0.2.1", "db.lab.example. 600 IN A 192.0.2.2")),
		dnsproxy.Config{Forward: forward.Config{ResolvConf: path}})
	p.converse(t, []dialogue{{"db.shop.example A", "db.shop.example. CNAME db.corp.example.; db.corp.example. A 192.0.2.1"}})
	for _, c := range []struct{ conf, want string }{
		{"search shop.example lab.example\noptions ndots:3\n", "db.shop.example. CNAME db.lab.example.; db.lab.example. A 192.0.2.2"},
		{"search shop.example lab.example\noptions ndots:0\n", "NXDOMAIN"},
	} {
		if err := os.WriteFile(path, []byte("nameserver 192.0.2.53\n"+c.conf), 0o600); err != nil {
			t.Fatal(err)
		}
		wait.Until(t, c.want, func() bool { return outcome(p.ask(t, "db.shop.example", dns.TypeA)) == c.want })
	}
}

// The result of a walk becomes stale with its parts, and never fresh again.
func TestWalkStale(t *testing.T) { // F13, F9
	t.Parallel()
	known := fakedns.Answer("db.corp.example. 1 IN A 192.0.2.1")
	p, fake := startWalker(t, withSOA(t, "600", known), dnsproxy.Config{})
	const want = "db.shop.example. CNAME db.corp.example.; db.corp.example. A 192.0.2.1"
	p.converse(t, []dialogue{{"db.shop.example A", want}})
	fake.Handle(withSOA(t, "600", except("corp.example.", fakedns.Rcode(dns.RcodeServerFailure), known)))
	var resp *dns.Msg
	wait.Until(t, "a stale answer", func() bool {
		resp = p.exchange(t, "udp", withEDNS(question("db.shop.example", dns.TypeA), 1232))
		return resp.Answer[len(resp.Answer)-1].Header().Ttl == 30
	})
	for range 3 {
		if e := ede(resp); outcome(resp) != want || e == nil || e.InfoCode != dns.ExtendedErrorCodeStaleAnswer {
			t.Errorf("want the old answer, and that it is stale:\n%v", resp)
		}
		resp = p.exchange(t, "udp", withEDNS(question("db.shop.example", dns.TypeA), 1232))
	}
	fake.Handle(withSOA(t, "600", fakedns.Answer("db.corp.example. 1 IN A 192.0.2.2")))
	wait.Until(t, "the new answer", func() bool {
		return strings.HasSuffix(outcome(p.ask(t, "db.shop.example", dns.TypeA)), "192.0.2.2")
	})
}

// A popular walk is refreshed before it expires, and its TTL is never longer than the
// remaining TTL of its parts.
func TestWalkRefreshed(t *testing.T) { // F13, F8
	t.Parallel()
	p, fake := startWalker(t, withSOA(t, "600", fakedns.Answer("db.corp.example. 2 IN A 192.0.2.1")), dnsproxy.Config{})
	asked := func() (n int) {
		for _, q := range fake.Queries() {
			if q.Name == "db.corp.example." {
				n++
			}
		}
		return n
	}
	wait.Until(t, "a question of our own accord", func() bool {
		for _, rr := range p.ask(t, "db.shop.example", dns.TypeA).Answer {
			if rr.Header().Ttl > 2 {
				t.Errorf("%v", rr)
			}
		}
		return float64(asked()) > p.bySource(t, "upstream")
	})
}

// The CNAME record's TTL is that of its target.
func TestWalkTTL(t *testing.T) { // F13
	t.Parallel()
	p, _ := startWalker(t, withSOA(t, "600", fakedns.Answer("db.corp.example. 60 IN AAAA 2001:db8::1")), dnsproxy.Config{})
	for range 2 {
		resp := p.ask(t, "db.shop.example", dns.TypeAAAA)
		if len(resp.Answer) != 2 || resp.Answer[0].Header().Ttl > 60 || resp.AuthenticatedData {
			t.Errorf("want a CNAME record with a TTL of 60 s:\n%v", resp)
		}
	}
	p, _ = startWalker(t, fakedns.Answer("db.corp.example. 60 IN AAAA 2001:db8::1"), dnsproxy.Config{}) // no SOA
	if resp := p.ask(t, "db.shop.example", dns.TypeAAAA); len(resp.Answer) != 2 || resp.Answer[0].Header().Ttl != 0 {
		t.Errorf("want a CNAME record that is not to be kept:\n%v", resp)
	}
}
