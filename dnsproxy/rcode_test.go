package dnsproxy_test

import (
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
)

// Extended response codes are counted under their names, on every path of an answer.
func TestExtendedRcodesAreCounted(t *testing.T) { // R4, A8
	synctest.Test(t, func(t *testing.T) {
		fake := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
			reply := new(dns.Msg).SetRcode(query, dns.RcodeBadCookie)
			return reply.SetEdns0(1232, false)
		})
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), CacheSize: -1}})
		req := withEDNS(question("web", dns.TypeA), 1232)
		req.IsEdns0().SetVersion(1)
		for _, network := range []string{"udp", "tcp"} {
			if resp := p.exchange(t, network, req); resp.Rcode != dns.RcodeBadVers {
				t.Errorf("over %s: %s, want BADVERS", network, dns.RcodeToString[resp.Rcode])
			}
		}
		notify := withEDNS(question("www.example", dns.TypeSOA), 1232)
		notify.Opcode = dns.OpcodeNotify
		unasked := withEDNS(question("unasked.example", dns.TypeA), 1232)
		unasked.RecursionDesired = false
		for _, req := range []*dns.Msg{withEDNS(question("www.example", dns.TypeA), 1232), notify, unasked} {
			if resp := p.exchange(t, "udp", req); resp.Rcode != dns.RcodeBadCookie {
				t.Errorf("%s, want BADCOOKIE for\n%v", dns.RcodeToString[resp.Rcode], req)
			}
		}
		// Without EDNS there is no room for the code.
		if resp := p.ask(t, "www.example", dns.TypeA); resp.Rcode != dns.RcodeServerFailure {
			t.Errorf("%s, want SERVFAIL", dns.RcodeToString[resp.Rcode])
		}
		for c, want := range map[[2]string]float64{
			{"other", "self"}: 2, {"SERVFAIL", "upstream"}: 1, {"other", "upstream"}: 3, {"NOERROR", "self"}: 0, {"NOERROR", "upstream"}: 0,
		} {
			if got := p.sum(t, "nametap_dns_queries_total", "rcode", c[0], "source", c[1]); got != want {
				t.Errorf("%s from %s: counted %v, want %v", c[0], c[1], got, want)
			}
		}
	})
}
