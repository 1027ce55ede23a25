package dnsproxy_test

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// startForwarder runs a server with an empty table.
func startForwarder(tb testing.TB, cfg dnsproxy.Config) *proxy {
	tb.Helper()
	p := start(tb, cfg)
	p.load(tb, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	return p
}

// deadServer returns an address without a listener.
func deadServer(tb testing.TB) upstream.Spec {
	tb.Helper()
	fake := fakedns.Start(tb, fakedns.Silence)
	fake.Close()
	return servers(fake)[0]
}

func TestFailuresMoveOn(t *testing.T) { // F3
	t.Parallel()
	good := nameserver(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1"))
	for _, rcode := range []int{
		dns.RcodeServerFailure, dns.RcodeRefused, dns.RcodeNotImplemented, dns.RcodeFormatError,
	} {
		bad := nameserver(t, fakedns.Rcode(rcode))
		bare := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg { // a header alone
			reply := new(dns.Msg).SetRcode(query, rcode)
			reply.Question = nil
			return reply
		})
		for _, first := range []*fakedns.Server{bad, bare} {
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, good)}})
			began := time.Now()
			p.converse(t, []dialogue{
				{"www.example A", "www.example. A 192.0.2.1"},
				{"none.example A", "NXDOMAIN"},
			})
			if took := time.Since(began); took > 1900*time.Millisecond {
				t.Errorf("%s: two queries took %s", dns.RcodeToString[rcode], took)
			}
			// There is one more query, without EDNS, which the server may not know (RFC
			// 6891, section 7).
			if asked := len(first.Queries()); asked > 4 {
				t.Errorf("%s: the first server was asked %d times for two queries", dns.RcodeToString[rcode], asked)
			}
		}
		// All fail: the client gets the first failure.
		other := nameserver(t, fakedns.Rcode(dns.RcodeNotAuth))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: append([]upstream.Spec{deadServer(t)}, servers(bad, other)...)}})
		p.converse(t, []dialogue{{"www.example A", dns.RcodeToString[rcode]}})
	}
}

func TestFirstUsableAnswerWins(t *testing.T) { // F3
	t.Parallel()
	first := nameserver(t, fakedns.Answer())
	second := nameserver(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second)}})
	p.converse(t, []dialogue{{"www.example A", "NXDOMAIN"}})
	if asked := first.Queries(); len(asked) != 1 {
		t.Errorf("the first server was asked: %v", asked)
	}
}

func TestDeadServers(t *testing.T) { // F3
	t.Parallel()
	good := nameserver(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1"))
	silent := nameserver(t, fakedns.Silence)
	dead := deadServer(t)
	for _, first := range append([]upstream.Spec{dead}, servers(silent)...) {
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: append([]upstream.Spec{first}, servers(good)...)}})
		p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
	}
	// If all servers are dead the query fails at once, even if one is listed twice.
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: []upstream.Spec{dead, dead}}})
	began := time.Now()
	resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
	if e := ede(resp); resp.Rcode != dns.RcodeServerFailure || e == nil ||
		e.InfoCode != dns.ExtendedErrorCodeNoReachableAuthority || !strings.Contains(e.ExtraText, dead.String()) {
		t.Errorf("want SERVFAIL that names the server:\n%v", resp)
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("SERVFAIL took %s", took)
	}
	if asked := p.count(t, "istio_agent_dns_upstream_requests_total"); asked != 1 {
		t.Errorf("one dead server was asked %v times", asked)
	}
}

// A lost query is retried within the query's timeout.
func TestLostReply(t *testing.T) { // F4
	t.Parallel()
	lost := make(chan struct{}, 2)
	answer := fakedns.Answer("www.example. 60 IN A 192.0.2.1")
	fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		select {
		case lost <- struct{}{}:
			return nil
		default:
			return answer(query, network)
		}
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
}

func TestDeadline(t *testing.T) { // F4
	t.Parallel()
	silent := nameserver(t, fakedns.Silence)
	for _, timeout := range []time.Duration{300 * time.Millisecond, 2500 * time.Millisecond} {
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Timeout: timeout, Upstreams: servers(silent, silent)}})
		began := time.Now()
		resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
		if e := ede(resp); resp.Rcode != dns.RcodeServerFailure || e == nil {
			t.Errorf("want SERVFAIL and why:\n%v", resp)
		}
		if took := time.Since(began); took < timeout || took > timeout+2*time.Second {
			t.Errorf("SERVFAIL took %s, want %s", took, timeout)
		}
	}
	// A server's failure response wins over silence.
	refuses := nameserver(t, fakedns.Rcode(dns.RcodeRefused))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Timeout: 200 * time.Millisecond, Upstreams: servers(refuses, silent)}})
	p.converse(t, []dialogue{{"www.example A", "REFUSED"}})
}

func TestWrongReplies(t *testing.T) { // F11
	t.Parallel()
	fake := rawNameserver(t, func(query *dns.Msg, reply func([]byte)) {
		send := func(change func(*dns.Msg)) {
			msg := new(dns.Msg).SetReply(query)
			msg.Answer = []dns.RR{&dns.A{
				Hdr: dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET},
				A:   net.IPv4(192, 0, 2, 66),
			}}
			change(msg)
			packet, err := msg.Pack()
			if err != nil {
				t.Error(err)
			}
			reply(packet)
		}
		reply(nil)
		reply([]byte{1})
		reply([]byte("twelve bytes"))
		send(func(m *dns.Msg) { m.Id++ })
		send(func(m *dns.Msg) { m.Question[0].Name = "other.example." })
		send(func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAAAA })
		send(func(m *dns.Msg) { m.Question = nil })
		send(func(m *dns.Msg) { m.Response = false })
		send(func(m *dns.Msg) { m.Answer[0].(*dns.A).A = net.IPv4(192, 0, 2, 1) })
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: []upstream.Spec{fake}}})
	p.converse(t, []dialogue{{"wWw.example A", "wWw.example. A 192.0.2.1"}})
}

func TestNoUpstream(t *testing.T) { // F7
	t.Parallel()
	p := startForwarder(t, dnsproxy.Config{})
	for range 100 {
		began := time.Now()
		resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
		if e := ede(resp); resp.Rcode != dns.RcodeServerFailure || e == nil ||
			e.InfoCode != dns.ExtendedErrorCodeNoReachableAuthority || !strings.Contains(e.ExtraText, "no nameserver") {
			t.Fatalf("want SERVFAIL and why:\n%v", resp)
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("SERVFAIL took %s", took)
		}
	}
	if resp := p.ask(t, "www.example", dns.TypeA); resp.Rcode != dns.RcodeServerFailure || len(resp.Extra) > 0 {
		t.Errorf("without EDNS: want a plain SERVFAIL:\n%v", resp)
	}
	p.converse(t, []dialogue{{"web A", "web. A 10.0.0.1"}})
}

func TestMaxInflight(t *testing.T) { // F10
	t.Parallel()
	asked, release := make(chan struct{}, 100), make(chan struct{})
	answer := fakedns.Answer("www.example. 60 IN A 192.0.2.1")
	fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		asked <- struct{}{}
		<-release
		return answer(query, network)
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), MaxInflight: 1, Timeout: wait.Limit}})
	packet, err := question("www.example", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	conn := p.dial(t, "udp")
	defer conn.Close()
	write(t, conn, packet)
	<-asked
	resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
	if e := ede(resp); resp.Rcode != dns.RcodeServerFailure || e == nil || !strings.Contains(e.ExtraText, "too many") {
		t.Errorf("want SERVFAIL and why:\n%v", resp)
	}
	p.converse(t, []dialogue{{"web A", "web. A 10.0.0.1"}})
	close(release)
	if got := outcome(parse(t, read(t, conn))); got != "www.example. A 192.0.2.1" {
		t.Errorf("the first query: %s", got)
	}
	p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
}

// A long reason does not exceed the response's limit.
func TestLongReason(t *testing.T) { // A9
	t.Parallel()
	var dead []upstream.Spec
	for port := range 12 {
		dead = append(dead, upstream.Spec{Addr: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(port+1))})
	}
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: dead}})
	packet, err := withEDNS(question(strings.Repeat("x.", 127), dns.TypeA), 512).Pack()
	if err != nil {
		t.Fatal(err)
	}
	resp := p.send(t, "udp", packet)
	if e := ede(parse(t, resp)); len(resp) > 512 || e == nil {
		t.Errorf("%d bytes:\n%v", len(resp), parse(t, resp))
	}
}
