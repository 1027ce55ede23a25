package dnsproxy_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// negative formats a response without answers: the response code and the owner of the SOA.
func negative(tb testing.TB, resp *dns.Msg) string {
	tb.Helper()
	if len(resp.Answer) > 0 || len(resp.Ns) != 1 {
		tb.Fatalf("want an SOA alone:\n%v", resp)
	}
	return dns.RcodeToString[resp.Rcode] + " " + resp.Ns[0].Header().Name
}

func TestLocalOnlyForOneClient(t *testing.T) { // F12
	synctest.Test(t, func(t *testing.T) {
		changes := map[string]func(*dns.Msg){
			"without RD": func(req *dns.Msg) { req.RecursionDesired = false },
			"with an option": func(req *dns.Msg) {
				req.SetEdns0(1232, false)
				req.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_NSID{Code: dns.EDNS0NSID}}
			},
			"signed": func(req *dns.Msg) { req.SetTsig("key.", dns.HmacSHA256, 300, time.Now().Unix()) },
		}
		world := nameserver(t, fakedns.Answer("nope.corp.example. 60 IN A 192.0.2.1"))
		p := start(t, dnsproxy.Config{
			Forward: forward.Config{ResolvConf: expandConf(t), Upstreams: servers(world)}, LocalOnly: []string{"svc.cluster.local"},
		})
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
		for change, edit := range changes {
			for _, network := range []string{"udp", "tcp"} {
				req := question("nope.shop.svc.cluster.local", dns.TypeA)
				edit(req)
				if resp := p.exchange(t, network, req); resp.Rcode != dns.RcodeNameError {
					t.Errorf("%s over %s: %v", change, network, resp)
				}
			}
		}
		for _, q := range world.Queries() {
			if dns.IsSubDomain("svc.cluster.local.", q.Name) {
				t.Errorf("%s left over %s", q.Name, q.Network)
			}
		}
	})
}
