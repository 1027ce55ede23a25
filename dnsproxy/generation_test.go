package dnsproxy_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakeclock"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// After a change of nameservers, or a flush, replies that were in flight then go only to the clients that already wait
// for them.
func TestQueryInFlightAtChange(t *testing.T) { // F17, F21
	t.Parallel()
	configure := func(t *testing.T, p *proxy, before *fakedns.Server, cfg forward.Config) {
		t.Helper()
		cfg.Upstreams = servers(nameserver(t, anywhere("192.0.2.2")))
		p.configure(t, resolvConf(t), dnsproxy.Config{Forward: cfg})
		before.Reset()
	}
	flush := func(t *testing.T, p *proxy, before *fakedns.Server, _ forward.Config) {
		t.Helper()
		if _, err := p.FlushCache(forward.CacheSelection{Name: "www.example"}); err != nil {
			t.Fatal(err)
		}
		before.Handle(anywhere("192.0.2.2"))
	}
	for name, c := range map[string]struct {
		late   fakedns.Handler
		want   string // for the client that asked before the change
		size   int    // of the cache
		change func(t *testing.T, p *proxy, before *fakedns.Server, cfg forward.Config)
	}{
		"NXDOMAIN":          {withSOA(t, "900", fakedns.Answer()), "NXDOMAIN", 0, configure},
		"SERVFAIL":          {fakedns.Rcode(dns.RcodeServerFailure), "SERVFAIL", 0, configure},
		"an answer":         {anywhere("192.0.2.1"), "www.example. A 192.0.2.1", 0, configure},
		"without cache":     {anywhere("192.0.2.1"), "www.example. A 192.0.2.1", -1, configure},
		"an answer, flush":  {anywhere("192.0.2.1"), "www.example. A 192.0.2.1", 0, flush},
		"a negative, flush": {withSOA(t, "900", fakedns.Answer()), "NXDOMAIN", 0, flush},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				release := make(chan struct{})
				holding, asked := held(c.late, release)
				before := nameserver(t, holding)
				cfg := forward.Config{Upstreams: servers(before), CacheSize: c.size}
				p := startForwarder(t, dnsproxy.Config{Forward: cfg})
				first := make(chan string)
				go func() { first <- outcome(p.ask(t, "www.example", dns.TypeA)) }()
				<-asked
				c.change(t, p, before, cfg)
				now := []dialogue{{"www.example A", "www.example. A 192.0.2.2"}}
				p.converse(t, now) // it does not join the query in flight
				close(release)
				if got := <-first; got != c.want {
					t.Errorf("the client that asked before has %s, want %s", got, c.want)
				}
				p.await(t, "nametap_dns_inflight", 0)
				p.converse(t, now)
			})
		})
	}
}

// The reply of a refresh that was in flight when the nameservers changed is not cached.
func TestRefreshInFlightAtChange(t *testing.T) { // F17
	t.Parallel()
	clock := fakeclock.New()
	before := nameserver(t, fakedns.Answer("www.example. 3600 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(before), Clock: clock.Clock}})
	release := make(chan struct{})
	holding, asked := held(anywhere("192.0.2.1"), release)
	for range 10 {
		p.ask(t, "www.example", dns.TypeA)
	}
	before.Handle(holding)
	clock.Suspend(t, 57*time.Minute)
	p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
	<-asked
	p.configure(t, resolvConf(t), dnsproxy.Config{Forward: forward.Config{Upstreams: servers(nameserver(t, anywhere("192.0.2.2")))}})
	now := []dialogue{{"www.example A", "www.example. A 192.0.2.2"}}
	p.converse(t, now)
	close(release)
	p.await(t, "nametap_dns_inflight", 0)
	p.converse(t, now)
}
