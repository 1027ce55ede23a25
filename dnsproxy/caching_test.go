package dnsproxy_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestCacheAnswers(t *testing.T) { // F8
	t.Parallel()
	fake := nameserver(t, fakedns.Answer(
		"www.example. 300 IN A 192.0.2.1", "www.example. 300 IN TXT here", "api.example. 300 IN A 192.0.2.2"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	for range 3 {
		p.converse(t, []dialogue{
			{"www.example A", "www.example. A 192.0.2.1"},
			{"wWw.eXample A", "wWw.eXample. A 192.0.2.1"}, // the client's spelling
			{"www.example TXT", `www.example. TXT "here"`},
			{"api.example A", "api.example. A 192.0.2.2"},
		})
	}
	p.wantForwarded(t, fake, 3)
	resp := p.exchange(t, "tcp", question("www.example", dns.TypeA))
	if resp.Authoritative || !resp.RecursionAvailable || len(resp.Answer) != 1 {
		t.Errorf("over TCP, from the cache:\n%v", resp)
	}
	wait.Until(t, "a TTL that counts down", func() bool {
		return p.ask(t, "www.example", dns.TypeA).Answer[0].Header().Ttl < 300
	})
	p.wantForwarded(t, fake, 3)
}

// Each query counts once as a hit or a miss.
func TestCacheCounts(t *testing.T) { // F8, R4
	t.Parallel()
	fake := nameserver(t, fakedns.Answer("www.example. 300 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	for range 3 {
		p.ask(t, "www.example", dns.TypeA)
	}
	p.exchange(t, "tcp", question("www.example", dns.TypeA))
	p.exchange(t, "tcp", question("other.example", dns.TypeA))
	for name, want := range map[string]float64{"nametap_cache_misses_total": 2, "nametap_cache_hits_total": 3} {
		if got := p.count(t, name); got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}

// Stale answers and failures of the cache have a source of their own, and each question counts once for the cache.
func TestCacheCountsFailures(t *testing.T) { // F8, F9, R4
	t.Parallel()
	fake := nameserver(t, fakedns.Answer("www.example. 1 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	p.ask(t, "www.example", dns.TypeA)
	fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	asked := 1.0
	wait.Until(t, "a stale answer", func() bool {
		asked++
		return p.ask(t, "www.example", dns.TypeA).Answer[0].Header().Ttl == 30
	})
	p.exchange(t, "tcp", question("www.example", dns.TypeA))
	asked++
	if n := p.bySource(t, "stale"); n != 2 {
		t.Errorf("%v stale answers are counted, want 2", n)
	}
	p.ask(t, "other.example", dns.TypeA)
	for _, network := range []string{"udp", "tcp"} {
		if resp := p.exchange(t, network, question("other.example", dns.TypeA)); resp.Rcode != dns.RcodeServerFailure {
			t.Errorf("want the failure of the cache:\n%v", resp)
		}
	}
	asked += 3
	if n := p.bySource(t, "cached_failure"); n != 2 || p.count(t, "nametap_cache_failures_total") != n {
		t.Errorf("%v failures of the cache are answered, and %v counted, want 2", n, p.count(t, "nametap_cache_failures_total"))
	}
	if n := p.count(t, "nametap_cache_stale_total"); n != 2 {
		t.Errorf("nametap_cache_stale_total is %v, want 2", n)
	}
	sum := 0.0
	for _, name := range []string{"hits", "misses", "stale", "failures"} {
		sum += p.count(t, "nametap_cache_"+name+"_total")
	}
	if sum != asked || sum != p.count(t, "istio_agent_dns_requests_total") {
		t.Errorf("the cache counts %v questions, want %v", sum, asked)
	}
}

// The bits DO and CD are part of the cache's key: they change what a nameserver answers.
func TestCacheKeepsApart(t *testing.T) { // F8
	t.Parallel()
	fake := nameserver(t, fakedns.Answer("www.example. 300 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	ask := func(do, cd bool) *dns.Msg {
		req := question("www.example", dns.TypeA).SetEdns0(1232, do)
		req.CheckingDisabled = cd
		return p.exchange(t, "udp", req)
	}
	for range 2 {
		for _, do := range []bool{false, true} {
			for _, cd := range []bool{false, true} {
				if resp := ask(do, cd); resp.IsEdns0().Do() != do || resp.CheckingDisabled != cd || len(resp.Answer) != 1 {
					t.Errorf("DO=%v CD=%v:\n%v", do, cd, resp)
				}
			}
		}
	}
	p.wantForwarded(t, fake, 4)
	// A query without RD asks for what the nameserver has in its cache.
	req := question("www.example", dns.TypeA)
	req.RecursionDesired = false
	p.exchange(t, "udp", req)
	p.wantForwarded(t, fake, 5)
}

func TestNegativeAnswersAreKept(t *testing.T) { // F8
	t.Parallel()
	fake := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
		reply := new(dns.Msg).SetRcode(query, dns.RcodeNameError)
		if query.Question[0].Qtype == dns.TypeTXT {
			return reply // without an SOA it must not be cached: RFC 2308, section 5
		}
		soa, err := dns.NewRR("example. 300 IN SOA ns.example. h.example. 1 2 3 4 60")
		if err != nil {
			t.Error(err)
		}
		reply.Ns = []dns.RR{soa}
		return reply
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	for qtype, kept := range map[uint16]bool{dns.TypeA: true, dns.TypeTXT: false} {
		for range 3 {
			fake.Reset()
			if resp := p.ask(t, "none.example", qtype); resp.Rcode != dns.RcodeNameError {
				t.Errorf("want NXDOMAIN:\n%v", resp)
			}
		}
		// On a busy machine one query is sent more than once.
		if asked := fake.Queries(); len(asked) > 0 == kept {
			t.Errorf("%s: the nameserver was asked %v for the third answer, want one from the cache: %v", dns.TypeToString[qtype], asked, kept)
		}
	}
}

func TestWithoutCache(t *testing.T) { // F8
	t.Parallel()
	fake := nameserver(t, fakedns.Truncate(fakedns.Size(2000)))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), CacheSize: -1}})
	for range 2 {
		// The nameserver is asked over the client's transport.
		if resp := p.exchange(t, "udp", withEDNS(question("big.example", dns.TypeTXT), 1232)); !resp.Truncated {
			t.Errorf("over UDP, want TC:\n%v", resp)
		}
		if resp := p.exchange(t, "tcp", question("big.example", dns.TypeTXT)); resp.Truncated || resp.Len() < 2000 {
			t.Errorf("over TCP, want all:\n%v", resp)
		}
	}
	got := map[string]int{}
	for _, q := range fake.Queries() {
		got[q.Network]++
	}
	if got["udp"] != 2 || got["tcp"] != 2 {
		t.Errorf("asked %v", fake.Queries())
	}
}

func TestQuestionsInFlightAreShared(t *testing.T) { // F8
	t.Parallel()
	const clients = 50
	release := make(chan struct{})
	answer := fakedns.Answer("www.example. 300 IN A 192.0.2.1")
	fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		<-release
		return answer(query, network)
	})
	other := nameserver(t, fakedns.Silence) // receives the duplicates and retries
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake, other), Timeout: wait.Limit}})
	var asking sync.WaitGroup
	for i := range clients {
		asking.Go(func() {
			network := []string{"udp", "tcp"}[i%2]
			if got := outcome(p.exchange(t, network, question("www.example", dns.TypeA))); got != "www.example. A 192.0.2.1" {
				t.Errorf("got %s", got)
			}
		})
	}
	p.await(t, "nametap_dns_inflight", clients)
	close(release)
	asking.Wait()
	if requests := p.count(t, "istio_agent_dns_requests_total"); requests != clients {
		t.Errorf("%v of %d queries were counted", requests, clients)
	}
	p.ask(t, "www.example", dns.TypeA)
	// The number of retries to a late server depends on its delay, not on the number of
	// clients.
	ids := map[string]int{}
	for _, q := range fake.Queries() {
		ids[fmt.Sprint(q.Name, q.Type)]++
	}
	if len(ids) == 0 || ids["www.example.1"] >= clients/2 {
		t.Errorf("%d clients were %v queries", clients, ids)
	}
}

func TestFailuresAreShortlyKept(t *testing.T) { // F8
	t.Parallel()
	for _, rcode := range []int{dns.RcodeServerFailure, dns.RcodeRefused, dns.RcodeNotImplemented, dns.RcodeFormatError} {
		want := dns.RcodeToString[rcode]
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			fake := nameserver(t, fakedns.Rcode(rcode))
			testShortlyKept(t, fake, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}}, want)
		})
	}
	t.Run("silence", func(t *testing.T) {
		t.Parallel()
		fake := nameserver(t, fakedns.Silence)
		testShortlyKept(t, fake, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Timeout: 300 * time.Millisecond}}, "SERVFAIL")
	})
}

// testShortlyKept queries repeatedly while a nameserver fails, and after it has recovered.
func testShortlyKept(t *testing.T, fake *fakedns.Server, cfg dnsproxy.Config, want string) {
	t.Helper()
	p := startForwarder(t, cfg)
	ask := []dialogue{{"www.example A", want}}
	p.converse(t, ask)
	fake.Reset()
	p.converse(t, ask)
	for _, q := range fake.Queries() {
		if q.Name == "www.example." {
			t.Error("asked once more")
		}
	}
	fake.Handle(fakedns.Answer("www.example. 300 IN A 192.0.2.1"))
	wait.Until(t, "the answer of a nameserver that recovered", func() bool {
		return outcome(p.ask(t, "www.example", dns.TypeA)) == "www.example. A 192.0.2.1"
	})
}

// A nameserver that refuses connections has failed, too, and is not asked for every query.
func TestUnreachableIsShortlyKept(t *testing.T) { // F8
	t.Parallel()
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: []upstream.Spec{deadServer(t)}}})
	for range 3 {
		p.converse(t, []dialogue{{"www.example A", "SERVFAIL"}})
	}
	if failed := p.bySource(t, "cached_failure"); failed < 1 {
		t.Error("no failure came from the cache")
	}
}

// The TTLs of positive and negative answers are bounded.
func TestTTLsAreBounded(t *testing.T) { // F8
	t.Parallel()
	fake := nameserver(t, withSOA(t, "86400", fakedns.Answer("www.example. 9999999 IN A 192.0.2.1")))
	const positive, negative = 7 * 86400, 3 * 3600
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	p.ask(t, "www.example", dns.TypeA)
	p.ask(t, "none.example", dns.TypeA)
	if ttl := p.ask(t, "www.example", dns.TypeA).Answer[0].Header().Ttl; ttl > positive || ttl < positive-30 {
		t.Errorf("TTL %d, want %d", ttl, positive)
	}
	if ttl := p.ask(t, "none.example", dns.TypeA).Ns[0].Header().Ttl; ttl > negative || ttl < negative-30 {
		t.Errorf("negative TTL %d, want %d", ttl, negative)
	}
}

func TestServeStale(t *testing.T) { // F9
	t.Parallel()
	for _, failing := range []fakedns.Handler{fakedns.Silence, fakedns.Rcode(dns.RcodeServerFailure)} {
		fake := nameserver(t, fakedns.Answer("www.example. 1 IN A 192.0.2.1"))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
		p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
		fake.Handle(failing)
		var resp *dns.Msg
		wait.Until(t, "a stale answer", func() bool {
			resp = p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
			if outcome(resp) != "www.example. A 192.0.2.1" {
				t.Fatalf("want the answer that there was:\n%v", resp)
			}
			return resp.Answer[0].Header().Ttl == 30
		})
		if e := ede(resp); e == nil || e.InfoCode != dns.ExtendedErrorCodeStaleAnswer {
			t.Errorf("want the error that says it is stale:\n%v", resp)
		}
		// A question that was never answered has no stale answer.
		p.converse(t, []dialogue{{"other.example A", "SERVFAIL"}})
		// Nameservers that recover are used.
		fake.Handle(fakedns.Answer("www.example. 300 IN A 192.0.2.2"))
		wait.Until(t, "the new answer", func() bool {
			return outcome(p.ask(t, "www.example", dns.TypeA)) == "www.example. A 192.0.2.2"
		})
	}
}

func TestServeStaleOff(t *testing.T) { // F9
	t.Parallel()
	fake := nameserver(t, fakedns.Answer("www.example. 1 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), ServeStale: -1}})
	p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
	fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	wait.Until(t, "SERVFAIL", func() bool { return p.ask(t, "www.example", dns.TypeA).Rcode == dns.RcodeServerFailure })
}

// A popular name is refreshed before it expires, so no client waits for it.
func TestRefreshAhead(t *testing.T) { // F8
	t.Parallel()
	fake := nameserver(t, fakedns.Answer("www.example. 2 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	wait.Until(t, "a question of our own accord", func() bool {
		p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
		return float64(len(fake.Queries())) > p.bySource(t, "upstream")
	})
}

// While nameservers are down, clients get stale answers at once.
func TestStaleAtOnce(t *testing.T) { // F9
	t.Parallel()
	const names = 20
	answer := func(query *dns.Msg, network string) *dns.Msg {
		return fakedns.Answer(query.Question[0].Name+" 1 IN A 192.0.2.1")(query, network)
	}
	fake := nameserver(t, answer)
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	name := func(i int) string { return fmt.Sprintf("www%d.example", i) }
	for i := range names {
		p.ask(t, name(i), dns.TypeA)
	}
	fake.Handle(fakedns.Silence)
	wait.Until(t, "a stale answer", func() bool { return p.ask(t, name(0), dns.TypeA).Answer[0].Header().Ttl == 30 })
	wait.Until(t, "the nameserver is down", func() bool {
		p.ask(t, name(0), dns.TypeA)
		return p.UpstreamStatus()[0].State == upstream.Down
	})
	slow := 0
	for range 3 {
		for i := range names {
			began := time.Now()
			resp := p.ask(t, name(i), dns.TypeA)
			if outcome(resp) != fmt.Sprintf("www%d.example. A 192.0.2.1", i) {
				t.Fatalf("want the answer that there was:\n%v", resp)
			}
			if time.Since(began) > time.Second {
				slow++
			}
		}
	}
	if slow > 1 {
		t.Errorf("%d of %d clients waited", slow, 3*names)
	}
	// Their recovery is noticed, although no client waits for them.
	fake.Handle(anywhere("192.0.2.2"))
	wait.Until(t, "the new answer", func() bool {
		return outcome(p.ask(t, name(0), dns.TypeA)) == "www0.example. A 192.0.2.2"
	})
}
