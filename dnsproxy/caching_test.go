package dnsproxy_test

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakeclock"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

func TestCacheAnswers(t *testing.T) { // F8
	synctest.Test(t, func(t *testing.T) {
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
		wantAsked(t, 3, fake)
		resp := p.exchange(t, "tcp", question("www.example", dns.TypeA))
		if resp.Authoritative || !resp.RecursionAvailable || len(resp.Answer) != 1 {
			t.Errorf("over TCP, from the cache:\n%v", resp)
		}
		// Each query counts once as a hit or a miss.
		for name, want := range map[string]float64{"nametap_cache_misses_total": 3, "nametap_cache_hits_total": 10} {
			if got := p.count(t, name); got != want {
				t.Errorf("%s is %v, want %v", name, got, want)
			}
		}
	})
}

// Stale answers and failures of the cache have a source of their own, and each question counts once for the cache.
func TestCacheCountsFailures(t *testing.T) { // F8, F9, R4
	t.Parallel()
	clock := fakeclock.New()
	fake := nameserver(t, fakedns.Answer("www.example. 1 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Clock: clock.Clock}})
	p.ask(t, "www.example", dns.TypeA)
	fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	clock.Suspend(t, time.Minute)
	for _, network := range []string{"udp", "tcp"} {
		if resp := p.exchange(t, network, question("www.example", dns.TypeA)); resp.Answer[0].Header().Ttl != 30 {
			t.Errorf("want a stale answer:\n%v", resp)
		}
	}
	if n := p.bySource(t, "stale"); n != 2 || p.count(t, "nametap_cache_stale_total") != n {
		t.Errorf("%v stale answers are counted, and %v of the cache, want 2", n, p.count(t, "nametap_cache_stale_total"))
	}
	sum := 0.0
	for _, name := range []string{"hits", "misses", "stale", "failures"} {
		sum += p.count(t, "nametap_cache_"+name+"_total")
	}
	if sum != 3 || sum != p.count(t, requestsMetric) {
		t.Errorf("the cache counts %v questions, want 3", sum)
	}
}

// The bits DO and CD are part of the cache's key: they change what a nameserver answers.
func TestCacheKeepsApart(t *testing.T) { // F8
	synctest.Test(t, func(t *testing.T) {
		fake := nameserver(t, fakedns.Answer("www.example. 300 IN A 192.0.2.1"))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
		for range 2 {
			for _, do := range []bool{false, true} {
				for _, cd := range []bool{false, true} {
					req := question("www.example", dns.TypeA).SetEdns0(1232, do)
					req.CheckingDisabled = cd
					if resp := p.exchange(t, "udp", req); resp.IsEdns0().Do() != do || resp.CheckingDisabled != cd || len(resp.Answer) != 1 {
						t.Errorf("DO=%v CD=%v:\n%v", do, cd, resp)
					}
				}
			}
		}
		wantAsked(t, 4, fake)
		// A query without RD asks for what the nameserver has in its cache.
		req := question("www.example", dns.TypeA)
		req.RecursionDesired = false
		p.exchange(t, "udp", req)
		wantAsked(t, 5, fake)
	})
}

func TestWithoutCache(t *testing.T) { // F8
	synctest.Test(t, func(t *testing.T) {
		fake := nameserver(t, fakedns.Truncate(fakedns.Size(2000)))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), CacheSize: -1}})
		for range 2 {
			// What is truncated over UDP is asked for again over TCP, for clients over both.
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
		if got["udp"] != 4 || got["tcp"] != 4 {
			t.Errorf("asked %v", fake.Queries())
		}
	})
}

// held returns a handler that answers when release is closed, and a channel that receives each query before.
func held(handler fakedns.Handler, release <-chan struct{}) (holding fakedns.Handler, asked <-chan *dns.Msg) {
	queries := make(chan *dns.Msg, 10_000)
	return func(query *dns.Msg, network string) *dns.Msg {
		queries <- query.Copy()
		<-release
		return handler(query, network)
	}, queries
}

func TestQuestionsInFlightAreShared(t *testing.T) { // F8
	synctest.Test(t, func(t *testing.T) {
		const clients = 50
		release := make(chan struct{})
		holding, _ := held(anywhere("192.0.2.1"), release)
		fake := nameserver(t, holding)
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
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
		p.converse(t, []dialogue{{"web A", webAddress}})
		close(release)
		asking.Wait()
		wantAsked(t, 1, fake)
	})
}

// A nameserver that refuses connections has failed, too, and is not asked for every query.
func TestUnreachableIsShortlyKept(t *testing.T) { // F8
	synctest.Test(t, func(t *testing.T) {
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: []upstream.Spec{deadServer(t)}}})
		for range 3 {
			p.converse(t, []dialogue{{"www.example A", "SERVFAIL"}})
		}
		if failed := p.bySource(t, "cached_failure"); failed != 2 {
			t.Errorf("%v failures came from the cache", failed)
		}
	})
}

// An answer that has expired is used while nameservers fail, and not without --serve-stale.
func TestServeStale(t *testing.T) { // F9
	t.Parallel()
	for name, c := range map[string]struct {
		failing fakedns.Handler
		stale   time.Duration
		want    string
	}{
		"silence":       {fakedns.Silence, 0, "www.example. A 192.0.2.1"},
		"SERVFAIL":      {fakedns.Rcode(dns.RcodeServerFailure), 0, "www.example. A 192.0.2.1"},
		"SERVFAIL, off": {fakedns.Rcode(dns.RcodeServerFailure), -1, "SERVFAIL"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := fakeclock.New()
			fake := nameserver(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1"))
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{
				Upstreams: servers(fake), ServeStale: c.stale, Clock: clock.Clock, Timeout: 2 * time.Second,
			}})
			p.ask(t, "www.example", dns.TypeA)
			fake.Handle(c.failing)
			clock.Suspend(t, time.Hour)
			resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
			if got := outcome(resp); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
			if e := ede(resp); c.stale == 0 && (resp.Answer[0].Header().Ttl != 30 || e == nil || e.InfoCode != dns.ExtendedErrorCodeStaleAnswer) {
				t.Errorf("want a TTL of 30 s, and the error that says it is stale:\n%v", resp)
			}
			// A question that was never answered has no stale answer.
			p.converse(t, []dialogue{{"other.example A", "SERVFAIL"}})
			// Nameservers that recover are used.
			fake.Handle(anywhere("192.0.2.2"))
			until(t, "the new answer", func() bool {
				clock.Suspend(t, time.Minute)
				return outcome(p.ask(t, "www.example", dns.TypeA)) == "www.example. A 192.0.2.2"
			})
		})
	}
}

// A popular name is refreshed before it expires, so no client waits for it.
func TestRefreshAhead(t *testing.T) { // F8
	t.Parallel()
	clock := fakeclock.New()
	fake := nameserver(t, fakedns.Answer("www.example. 3600 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Clock: clock.Clock}})
	for range 10 {
		p.ask(t, "www.example", dns.TypeA)
	}
	fake.Handle(anywhere("192.0.2.2"))
	clock.Suspend(t, 57*time.Minute)
	until(t, "a question of our own accord", func() bool {
		return outcome(p.ask(t, "www.example", dns.TypeA)) == "www.example. A 192.0.2.2"
	})
	if n := p.bySource(t, "upstream"); n != 1 {
		t.Errorf("%v clients waited for the nameserver", n)
	}
}

// While nameservers are down, clients get stale answers at once: none waits for a nameserver any more.
func TestStaleAtOnce(t *testing.T) { // F9
	t.Parallel()
	clock := fakeclock.New()
	fake := nameserver(t, anywhere("192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{
		ResolvConf: resolvConf(t, "search corp.example"), Upstreams: servers(fake), Clock: clock.Clock,
	}})
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	p.ask(t, "www.example", dns.TypeA)
	fake.Handle(fakedns.Silence)
	clock.Suspend(t, time.Hour)
	until(t, "the nameserver is down", func() bool {
		p.ask(t, "www.example", dns.TypeA)
		return p.UpstreamStatus()[0].State == upstream.Down
	})
	from := p.provenance(t, "udp", "www.example A")
	if from.Source != "stale" || !strings.Contains(from.Failure, "down") {
		t.Errorf("%+v, want a stale answer because the nameserver is down", from)
	}
	// So they do from the table, if nameservers are asked before it (N5).
	p.converse(t, []dialogue{{"web.corp.example A", "web.corp.example. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.1"}})
	// Their recovery is noticed, although no client waits for them.
	fake.Handle(anywhere("192.0.2.2"))
	until(t, "the new answer", func() bool {
		clock.Suspend(t, time.Minute)
		return outcome(p.ask(t, "www.example", dns.TypeA)) == "www.example. A 192.0.2.2"
	})
}

// V7: the TTLs of cached replies count down while the machine is suspended, and a reply that expired meanwhile is stale,
// until it is too old (--serve-stale). No nameserver counts as down because of a suspend.
func TestSuspended(t *testing.T) { // F8, F9
	t.Parallel()
	clock := fakeclock.New()
	fake := nameserver(t, fakedns.Answer("www.example. 3600 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Clock: clock.Clock}})
	p.ask(t, "www.example", dns.TypeA)
	fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	clock.Suspend(t, 50*time.Minute)
	if ttl := p.ask(t, "www.example", dns.TypeA).Answer[0].Header().Ttl; ttl > 600 {
		t.Errorf("after 50 minutes of an hour the TTL is %d", ttl)
	}
	clock.Suspend(t, 20*time.Hour)
	if state := p.UpstreamStatus()[0].State; state != upstream.Up {
		t.Errorf("after the suspend the nameserver is %v", state)
	}
	if resp := p.ask(t, "www.example", dns.TypeA); outcome(resp) != "www.example. A 192.0.2.1" || resp.Answer[0].Header().Ttl != 30 {
		t.Errorf("want the stale answer:\n%v", resp)
	}
	clock.Suspend(t, 6*time.Hour)
	p.converse(t, []dialogue{{"www.example A", "SERVFAIL"}})
	// A failure is not remembered over a suspend.
	fake.Handle(fakedns.Answer("www.example. 300 IN A 192.0.2.2"))
	clock.Suspend(t, time.Minute)
	p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.2"}})
}
