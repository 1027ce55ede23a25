package dnsproxy_test

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
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
	for _, rcode := range []int{
		dns.RcodeServerFailure, dns.RcodeRefused, dns.RcodeNotImplemented, dns.RcodeFormatError,
	} {
		t.Run(dns.RcodeToString[rcode], func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				good, bad := nameserver(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1")), nameserver(t, fakedns.Rcode(rcode))
				bare := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg { // a header alone
					reply := new(dns.Msg).SetRcode(query, rcode)
					reply.Question = nil
					return reply
				})
				for _, first := range []*fakedns.Server{bad, bare} {
					p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, good)}})
					p.converse(t, []dialogue{
						{"www.example A", "www.example. A 192.0.2.1"},
						{"none.example A", "NXDOMAIN"},
					})
					// There is one more query, without EDNS, which the server may not know (RFC
					// 6891, section 7).
					if asked := len(first.Queries()); asked > 4 {
						t.Errorf("the first server was asked %d times for two queries", asked)
					}
				}
				// All fail: the client gets the best failure.
				other := nameserver(t, fakedns.Rcode(dns.RcodeNotAuth))
				p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: append([]upstream.Spec{deadServer(t)}, servers(bad, other)...)}})
				p.converse(t, []dialogue{{"www.example A", dns.RcodeToString[rcode]}})
			})
		})
	}
}

// If all servers are dead the query fails at once, even if one is listed twice, and the reason names the server.
func TestDeadServers(t *testing.T) { // F3
	synctest.Test(t, func(t *testing.T) {
		dead := deadServer(t)
		good := nameserver(t, anywhere("192.0.2.1"))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: append([]upstream.Spec{dead}, servers(good)...)}})
		p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
		p = startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: []upstream.Spec{dead, dead}}})
		resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
		if e := ede(resp); resp.Rcode != dns.RcodeServerFailure || e == nil ||
			e.InfoCode != dns.ExtendedErrorCodeNoReachableAuthority || !strings.Contains(e.ExtraText, dead.String()) {
			t.Errorf("want SERVFAIL that names the server:\n%v", resp)
		}
		if asked := p.count(t, "istio_agent_dns_upstream_requests_total"); asked != 1 {
			t.Errorf("one dead server was asked %v times", asked)
		}
	})
}

// A lost query is sent again.
func TestLostReply(t *testing.T) { // F4
	t.Parallel()
	lost := make(chan struct{}, 2)
	answer := anywhere("192.0.2.1")
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

// A query ends when its time is up. A server's failure wins over silence.
func TestDeadline(t *testing.T) { // F4
	t.Parallel()
	silent, refuses := nameserver(t, fakedns.Silence), nameserver(t, fakedns.Rcode(dns.RcodeRefused))
	const timeout = 2 * time.Second
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Timeout: timeout, Upstreams: servers(silent, silent)}})
	began := time.Now()
	resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
	if e := ede(resp); resp.Rcode != dns.RcodeServerFailure || e == nil || time.Since(began) < timeout {
		t.Errorf("want SERVFAIL and why, not before the time is up:\n%v", resp)
	}
	p = startForwarder(t, dnsproxy.Config{Forward: forward.Config{Timeout: timeout, Upstreams: servers(refuses, silent)}})
	p.converse(t, []dialogue{{"www.example A", "REFUSED"}})
}

func TestWrongReplies(t *testing.T) { // F11
	synctest.Test(t, func(t *testing.T) {
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
	})
}

func TestNoUpstream(t *testing.T) { // F7
	synctest.Test(t, func(t *testing.T) {
		p := startForwarder(t, dnsproxy.Config{})
		resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
		if e := ede(resp); resp.Rcode != dns.RcodeServerFailure || e == nil ||
			e.InfoCode != dns.ExtendedErrorCodeNoReachableAuthority || !strings.Contains(e.ExtraText, "no nameserver") {
			t.Errorf("want SERVFAIL and why:\n%v", resp)
		}
		if resp := p.ask(t, "www.example", dns.TypeA); resp.Rcode != dns.RcodeServerFailure || len(resp.Extra) > 0 || resp.Authoritative || !resp.RecursionAvailable {
			t.Errorf("without EDNS: want a plain SERVFAIL:\n%v", resp)
		}
		p.converse(t, []dialogue{{"web A", webAddress}})
	})
}

// A query beyond the bound takes the place of the oldest one, which is refused; mesh names, and names in the cache, are
// answered.
func TestMaxInflight(t *testing.T) { // F10
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		holding, asked := held(anywhere("192.0.2.1"), release)
		fake := nameserver(t, except("cached.example.", anywhere("192.0.2.1"), holding))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), MaxInflight: 1}})
		cached := []dialogue{{"cached.example A", "cached.example. A 192.0.2.1"}, {"web A", webAddress}}
		p.converse(t, cached)
		conn := p.dial(t, "tcp")
		defer conn.Close()
		for _, name := range []string{"first.example", "second.example"} {
			packet, err := withEDNS(question(name, dns.TypeA), 1232).Pack()
			if err != nil {
				t.Fatal(err)
			}
			write(t, conn, packet)
			<-asked
		}
		resp := parse(t, read(t, conn))
		if e := ede(resp); resp.Question[0].Name != "first.example." || resp.Rcode != dns.RcodeServerFailure || e == nil ||
			!strings.Contains(e.ExtraText, "too many") {
			t.Errorf("want SERVFAIL for the first query and why:\n%v", resp)
		}
		p.converse(t, cached)
		close(release)
		if got := outcome(parse(t, read(t, conn))); got != "second.example. A 192.0.2.1" {
			t.Errorf("the second query: %s", got)
		}
	})
}

// A long reason does not exceed the response's limit.
func TestLongReason(t *testing.T) { // A9
	synctest.Test(t, func(t *testing.T) {
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
	})
}
