package dnsproxy_test

import (
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// F3: a malformed reply, or a failure with an extended response code, does not win over an
// answer; alone it is a failure.
func TestBadRepliesMoveOn(t *testing.T) {
	t.Parallel()
	code := func(rcode int) fakedns.Handler {
		return func(query *dns.Msg, _ string) *dns.Msg {
			reply := new(dns.Msg).SetReply(query)
			reply.SetEdns0(1232, false)
			reply.Rcode = rcode
			return reply
		}
	}
	wrong := fakedns.Answer("www.example. 60 IN A 192.0.2.66")
	counts := func(_ fakedns.Request, packets []fakedns.Packet) []fakedns.Packet {
		for _, p := range packets {
			p.Bytes[7] = 9 // counts answers that are not there
		}
		return packets
	}
	for name, tc := range map[string]struct {
		handler fakedns.Handler
		effects []fakedns.Effect
		alone   int
	}{
		"BADVERS":       {code(dns.RcodeBadVers), nil, dns.RcodeBadVers},
		"BADCOOKIE":     {code(dns.RcodeBadCookie), nil, dns.RcodeBadCookie},
		"a code of 35":  {code(35), nil, 35}, // NXDOMAIN, by the four bits in the header
		"a cut record":  {wrong, []fakedns.Effect{fakedns.Cut(14)}, dns.RcodeServerFailure},
		"wrong numbers": {wrong, []fakedns.Effect{counts}, dns.RcodeServerFailure},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				good, bad := nameserver(t, anywhere("192.0.2.1")), nameserver(t, fakedns.Silence)
				bad.Handle(tc.handler, tc.effects...)
				for _, order := range []forward.Order{forward.OrderStrict, forward.OrderFastest} {
					p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(bad, good), Order: order, CacheSize: -1}})
					for range 5 {
						p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
					}
				}
				p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(bad)}})
				resp := p.exchange(t, "udp", withEDNS(question("www.example", dns.TypeA), 1232))
				if resp.Rcode != tc.alone {
					t.Errorf("alone: %s, want %s", dns.RcodeToString[resp.Rcode], dns.RcodeToString[tc.alone])
				}
				if e := ede(resp); tc.alone == dns.RcodeServerFailure && (e == nil || e.InfoCode != dns.ExtendedErrorCodeInvalidData) {
					t.Errorf("alone: it is not said why:\n%v", resp)
				}
			})
		})
	}
}

// F18, F8: a nameserver that refuses a query with EDNS for one name is queried again without EDNS. Its answer has no
// signatures, so a client that wants them gets it, but it is not cached for other clients. Other names are queried
// with EDNS as before.
func TestRefusalOfOneNameKeepsEDNS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var queries atomic.Int64
		answer := fakedns.Answer("odd.example. 600 IN A 192.0.2.1", "www.example. 600 IN A 192.0.2.2")
		fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
			edns, odd := query.IsEdns0() != nil, query.Question[0].Name == "odd.example."
			if edns && odd {
				return new(dns.Msg).SetRcode(query, dns.RcodeFormatError)
			}
			reply := answer(query, network)
			if edns {
				reply.SetEdns0(1232, query.IsEdns0().Do())
				queries.Add(1)
			}
			return reply
		})
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
		ask := func(name string, do bool) {
			t.Helper()
			query := question(name, dns.TypeA)
			query.SetEdns0(1232, do)
			if resp := p.exchange(t, "udp", query); resp.Rcode != dns.RcodeSuccess || len(resp.Answer) != 1 {
				t.Errorf("%s:\n%v", name, resp)
			}
		}
		ask("www.example", true)
		for range 3 {
			ask("odd.example", true)
		}
		if asked := fake.Queries(); len(asked) < 1+3*2 {
			t.Errorf("a client that wants signatures is answered from the cache: %v", asked)
		}
		ask("odd.example", false)
		fake.Reset()
		for range 2 {
			ask("odd.example", false)
		}
		wantAsked(t, 0, fake)
		before := queries.Load()
		ask("www.example", false)
		if queries.Load() == before {
			t.Error("another name is queried without EDNS")
		}
	})
}
