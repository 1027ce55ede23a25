package dnsproxy_test

import (
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakeclock"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// V7: the TTLs of cached replies count down while the machine is suspended.
func TestSuspendedTTL(t *testing.T) { // F8
	t.Parallel()
	clock := fakeclock.New()
	fake := nameserver(t, fakedns.Answer("www.example. 3600 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Clock: clock.Clock}})
	p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
	clock.Suspend(t, 50*time.Minute)
	resp := p.ask(t, "www.example", dns.TypeA)
	if ttl := resp.Answer[0].Header().Ttl; ttl > 600 {
		t.Errorf("after 50 minutes of an hour the TTL is %d", ttl)
	}
	p.wantForwarded(t, fake, 1)
	fake.Handle(fakedns.Answer("www.example. 3600 IN A 192.0.2.2"))
	clock.Suspend(t, 10*time.Minute)
	p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.2"}})
	p.wantForwarded(t, fake, 2)
}

// V7: a reply that expired while the machine was suspended is stale, and too old after
// --serve-stale. No nameserver counts as down because of the suspend.
func TestSuspendedStale(t *testing.T) { // F9
	t.Parallel()
	clock := fakeclock.New()
	fake := nameserver(t, fakedns.Answer("www.example. 3600 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Clock: clock.Clock}})
	p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
	clock.Suspend(t, 20*time.Hour)
	if state := p.UpstreamStatus()[0].State; state != upstream.Up {
		t.Errorf("after the suspend the nameserver is %v", state)
	}
	fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	resp := p.ask(t, "www.example", dns.TypeA)
	if outcome(resp) != "www.example. A 192.0.2.1" || resp.Answer[0].Header().Ttl != 30 {
		t.Errorf("want the stale answer:\n%v", resp)
	}
	clock.Suspend(t, 6*time.Hour)
	p.converse(t, []dialogue{{"www.example A", "SERVFAIL"}})
}

// V7: a failure to answer a question is not remembered over a suspend.
func TestSuspendedFailure(t *testing.T) { // F8
	t.Parallel()
	clock := fakeclock.New()
	fake := nameserver(t, fakedns.Rcode(dns.RcodeServerFailure))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Clock: clock.Clock}})
	p.converse(t, []dialogue{{"www.example A", "SERVFAIL"}})
	fake.Handle(fakedns.Answer("www.example. 300 IN A 192.0.2.1"))
	clock.Suspend(t, time.Minute)
	p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
}

// V7: a nameserver that was silent when the machine was suspended is not down afterwards: it is
// not known to have been silent meanwhile.
func TestSuspendedSilence(t *testing.T) { // F4
	t.Parallel()
	clock := fakeclock.New()
	fake := nameserver(t, fakedns.Answer("www.example. 300 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Timeout: wait.Limit, Clock: clock.Clock}})
	p.ask(t, "www.example", dns.TypeA)
	fake.Handle(fakedns.Silence)
	conn := p.dial(t, "udp")
	packet, err := question("lost.example", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	write(t, conn, packet)
	wait.Until(t, "the query is lost", func() bool { return len(fake.Queries()) > 1 })
	clock.Suspend(t, 8*time.Hour)
	if state := p.UpstreamStatus()[0].State; state != upstream.Up {
		t.Errorf("after the suspend the nameserver is %v", state)
	}
	fake.Handle(fakedns.Answer("lost.example. 300 IN A 192.0.2.2"))
	if got := outcome(parse(t, read(t, conn))); got != "lost.example. A 192.0.2.2" {
		t.Errorf("the query that was in flight got %s", got)
	}
}
