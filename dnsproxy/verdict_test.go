package dnsproxy_test

import (
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// F3: a malformed reply, or a failure with an extended response code, does not win over an
// answer; alone it is a failure.
func TestBadRepliesMoveOn(t *testing.T) {
	t.Parallel()
	good := nameserver(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1"))
	code := func(rcode int) *fakedns.Server {
		return nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
			reply := new(dns.Msg).SetReply(query)
			reply.SetEdns0(1232, false)
			reply.Rcode = rcode
			return reply
		})
	}
	cut := nameserver(t, fakedns.Silence)
	cut.Handle(fakedns.Answer("www.example. 60 IN A 192.0.2.66"), fakedns.Cut(14))
	counts := nameserver(t, fakedns.Silence)
	counts.Handle(fakedns.Answer("www.example. 60 IN A 192.0.2.66"), func(_ fakedns.Request, packets []fakedns.Packet) []fakedns.Packet {
		for _, p := range packets {
			p.Bytes[7] = 9 // counts answers that are not there
		}
		return packets
	})
	for name, tc := range map[string]struct {
		bad   *fakedns.Server
		alone int
	}{
		"BADVERS":       {code(dns.RcodeBadVers), dns.RcodeBadVers},
		"BADCOOKIE":     {code(dns.RcodeBadCookie), dns.RcodeBadCookie},
		"a code of 35":  {code(35), 35}, // NXDOMAIN, by the four bits in the header
		"a cut record":  {cut, dns.RcodeServerFailure},
		"wrong numbers": {counts, dns.RcodeServerFailure},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, parallel := range []bool{false, true} {
				p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(tc.bad, good), Parallel: parallel, CacheSize: -1}})
				for range 5 {
					p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
				}
			}
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(tc.bad)}})
			resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
			if resp.Rcode != tc.alone {
				t.Errorf("alone: %s, want %s", dns.RcodeToString[resp.Rcode], dns.RcodeToString[tc.alone])
			}
			if e := ede(resp); tc.alone == dns.RcodeServerFailure && (e == nil || e.InfoCode != dns.ExtendedErrorCodeInvalidData) {
				t.Errorf("alone: it is not said why:\n%v", resp)
			}
		})
	}
}

// F18: a server behind a middlebox that drops EDNS is queried without EDNS, from the second
// time on at once.
func TestMiddleboxDropsEDNS(t *testing.T) {
	t.Parallel()
	answer := fakedns.Answer("www.example. 0 IN A 192.0.2.1")
	fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		if query.IsEdns0() != nil {
			return nil
		}
		return answer(query, network)
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
	fake.Reset()
	for range 5 {
		p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
	}
	if asked := fake.Queries(); len(asked) != 5 {
		t.Errorf("asked for five queries: %v", asked)
	}
}

// F2: if a nameserver's TCP is a black hole, the client gets the truncated UDP reply in
// time.
func TestTruncatedBlackHole(t *testing.T) {
	t.Parallel()
	fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		if network == "tcp" {
			return nil
		}
		reply := new(dns.Msg).SetReply(query)
		reply.Truncated = true
		return reply
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Timeout: wait.Limit}})
	for range 3 {
		began := time.Now()
		resp := p.ask(t, "www.example", dns.TypeA)
		if took := time.Since(began); !resp.Truncated || resp.Rcode != dns.RcodeSuccess || took > wait.Limit/2 {
			t.Errorf("after %s:\n%v", took, resp)
		}
	}
}
