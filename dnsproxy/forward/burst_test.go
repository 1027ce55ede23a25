package forward_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/fakeclock"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// startForwarder runs a forwarder that asks a fake nameserver.
func startForwarder(t *testing.T, clock *clock.Clock, handler fakedns.Handler) (*forward.Forwarder, *fakedns.Server) {
	t.Helper()
	fake := fakedns.Start(t, handler)
	f := newForwarder(t, forward.Config{Upstreams: []upstream.Spec{{Addr: fake.Addr}}, Timeout: time.Hour, Clock: clock})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return f, fake
}

// missed returns a query for www.example that the cache does not answer.
func missed(t *testing.T, f *forward.Forwarder) *forward.Query {
	t.Helper()
	q := new(wire.Query)
	packet, err := new(dns.Msg).SetQuestion("www.example.", dns.TypeA).Pack()
	if err != nil || !q.Parse(packet) {
		t.Fatal(err)
	}
	ask := &forward.Query{Name: q.Name, Cacheable: true, Key: forward.Key(q), Message: packet}
	if found, ok := f.Lookup(ask); ok {
		t.Fatalf("in the cache: %+v", found)
	}
	return ask
}

// Many clients that ask the same before the cache has the answer cause one query to
// the nameservers, also clients that ask when the others have their answer already.
func TestBurst(t *testing.T) { // F8
	t.Parallel()
	// Time stands still in the bubble, because the nameserver waits for the kernel. So no query is late and sent again.
	synctest.Test(t, func(t *testing.T) {
		const clients, late = 1000, 100
		f, fake := startForwarder(t, nil, fakedns.Answer("www.example. 300 IN A 192.0.2.1"))
		queries := make([]*forward.Query, clients)
		for i := range queries {
			queries[i] = missed(t, f)
		}
		answer := func(q *forward.Query) {
			if found := f.Answer(q); found.Err != nil || found.Reply.Answers() != 1 {
				t.Errorf("%+v", found)
			}
		}
		var burst sync.WaitGroup
		for _, q := range queries[late:] {
			burst.Go(func() { answer(q) })
		}
		burst.Wait()
		for _, q := range queries[:late] {
			answer(q)
		}
		if n := len(fake.Queries()); n != 1 {
			t.Errorf("%d queries to the nameserver for %d clients", n, clients)
		}
	})
}

// A query that was looked up before the cache was flushed does not get what was in it.
func TestFlushedMeanwhile(t *testing.T) { // F8, F9
	t.Parallel()
	clock := fakeclock.New()
	f, fake := startForwarder(t, clock.Clock, fakedns.Answer("www.example. 60 IN A 192.0.2.1"))
	stale := missed(t, f)
	f.Answer(stale)
	clock.Suspend(t, time.Minute)
	if f.Lookup(stale); stale.Stale() == nil {
		t.Fatal("the reply is not expired")
	}
	fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	if _, err := f.FlushCache(forward.CacheSelection{}); err != nil {
		t.Fatal(err)
	}
	if found := f.Answer(stale); found.Err != nil || found.Rcode() != dns.RcodeServerFailure {
		t.Errorf("%+v", found)
	}
}
