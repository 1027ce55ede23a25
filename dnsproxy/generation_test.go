package dnsproxy_test

import (
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A handover is a proxy whose resolv.conf lists one nameserver and then another.
type handover struct {
	*proxy
	path    string
	before  *fakedns.Server
	held    atomic.Int64  // queries that the first nameserver is holding
	answer  chan struct{} // closed by release
	release func()        // lets it answer them
}

// on53 starts a nameserver on port 53 of a loopback address.
func on53(tb testing.TB, addr string, handler fakedns.Handler) *fakedns.Server {
	tb.Helper()
	server, err := fakedns.Listen(handler, fakedns.On(netip.AddrPortFrom(netip.MustParseAddr(addr), 53)))
	if err != nil {
		tb.Skipf("LEFT OUT: nameservers on port 53: %v", err)
	}
	tb.Cleanup(server.Close)
	return server
}

// newHandover starts a proxy with the first nameserver; the second one answers 192.0.2.2
// for every name. Their addresses are 127.0.NET.1 and 127.0.NET.2.
func newHandover(tb testing.TB, network string, cfg dnsproxy.Config) *handover {
	tb.Helper()
	h := &handover{answer: make(chan struct{})}
	h.release = sync.OnceFunc(func() { close(h.answer) })
	h.before = on53(tb, network+".1", anywhere("192.0.2.1"))
	on53(tb, network+".2", anywhere("192.0.2.2"))
	tb.Cleanup(h.release)
	h.path = resolvConf(tb, "nameserver "+network+".1")
	cfg.Forward.ResolvConf = h.path
	h.proxy = startForwarder(tb, cfg)
	return h
}

// hold makes the first nameserver hold its queries until release, and answer late then.
func (h *handover) hold(late *dns.Msg) {
	h.before.Handle(func(query *dns.Msg, _ string) *dns.Msg {
		h.held.Add(1)
		<-h.answer
		reply := late.Copy()
		return reply.SetRcode(query, late.Rcode)
	})
}

// change writes the second nameserver to resolv.conf, and waits until it is used.
func (h *handover) change(tb testing.TB, network string) {
	tb.Helper()
	if err := os.WriteFile(h.path, []byte("nameserver "+network+".2\n"), 0o600); err != nil {
		tb.Fatal(err)
	}
	after := netip.MustParseAddrPort(network + ".2:53")
	wait.Until(tb, "the new nameserver", func() bool {
		servers := h.Upstreams()
		return len(servers) == 1 && servers[0].Addr == after
	})
}

// message makes a reply: an address, or a response code with an SOA record.
func message(tb testing.TB, rcode int, record string) *dns.Msg {
	tb.Helper()
	msg := new(dns.Msg)
	msg.Rcode = rcode
	rr, err := dns.NewRR(record)
	if err != nil {
		tb.Fatal(err)
	}
	if rr.Header().Rrtype == dns.TypeSOA {
		msg.Ns = []dns.RR{rr}
	} else {
		msg.Answer = []dns.RR{rr}
	}
	return msg
}

// After a change of resolv.conf, replies of the previous nameservers go only to the clients
// that already wait for them.
func TestQueryInFlightAtChange(t *testing.T) { // F17
	t.Parallel()
	const network, soa = "127.0.54", "example. 900 IN SOA ns.example. h.example. 1 2 3 4 900"
	for name, c := range map[string]struct {
		late *dns.Msg
		want string // for the client that asked before the change
		size int    // of the cache
	}{
		"NXDOMAIN":      {message(t, dns.RcodeNameError, soa), "NXDOMAIN", 0},
		"SERVFAIL":      {message(t, dns.RcodeServerFailure, soa), "SERVFAIL", 0},
		"an answer":     {message(t, dns.RcodeSuccess, "www.example. 900 IN A 192.0.2.1"), "www.example. A 192.0.2.1", 0},
		"without cache": {message(t, dns.RcodeNameError, soa), "NXDOMAIN", -1},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHandover(t, network, dnsproxy.Config{Forward: forward.Config{CacheSize: c.size, Timeout: wait.Limit}})
			h.hold(c.late)
			first := make(chan string)
			go func() { first <- outcome(h.ask(t, "www.example", dns.TypeA)) }()
			wait.Until(t, "the first query", func() bool { return h.held.Load() > 0 })
			h.change(t, network)
			now := []dialogue{{"www.example A", "www.example. A 192.0.2.2"}}
			h.converse(t, now) // it does not join the query in flight
			h.release()
			if got := <-first; got != c.want {
				t.Errorf("the client that asked before has %s, want %s", got, c.want)
			}
			h.await(t, "nametap_dns_inflight", 0)
			h.converse(t, now)
		})
	}
}

// The reply of a refresh that was in flight when resolv.conf changed is not cached.
func TestRefreshInFlightAtChange(t *testing.T) { // F17
	t.Parallel()
	const network = "127.0.55"
	h := newHandover(t, network, dnsproxy.Config{Forward: forward.Config{Timeout: wait.Limit}})
	h.before.Handle(fakedns.Answer("www.example. 2 IN A 192.0.2.1"))
	h.ask(t, "www.example", dns.TypeA)
	h.hold(message(t, dns.RcodeSuccess, "www.example. 900 IN A 192.0.2.1"))
	wait.Until(t, "a refresh", func() bool {
		h.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
		return h.held.Load() > 0
	})
	h.change(t, network)
	now := []dialogue{{"www.example A", "www.example. A 192.0.2.2"}}
	h.converse(t, now)
	h.release()
	h.await(t, "nametap_dns_inflight", 0)
	h.converse(t, now)
}
