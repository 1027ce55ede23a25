package dnsproxy_test

import (
	"fmt"
	"net"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// targets returns a handler that answers with n targets and seven addresses of each in the
// additional section; with referral the targets are nameservers.
func targets(n int, referral bool) fakedns.Handler {
	return func(query *dns.Msg, _ string) *dns.Msg {
		reply := new(dns.Msg).SetReply(query)
		reply.Compress = true
		for i := range n {
			target := fmt.Sprintf("target-%d.example.", i)
			hdr := dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeSRV, Class: dns.ClassINET, Ttl: 60}
			if referral {
				hdr.Name, hdr.Rrtype = "example.", dns.TypeNS
				reply.Ns = append(reply.Ns, &dns.NS{Hdr: hdr, Ns: target})
			} else {
				reply.Answer = append(reply.Answer, &dns.SRV{Hdr: hdr, Port: 80, Target: target})
			}
			hdr.Name, hdr.Rrtype = target, dns.TypeA
			for j := range 7 {
				reply.Extra = append(reply.Extra, &dns.A{Hdr: hdr, A: net.IPv4(192, 0, byte(i), byte(j))})
			}
		}
		return reply
	}
}

// Additional records that do not all fit are left out without TC, in a new reply or a relayed one. Glue
// that does not fit sets TC.
func TestAdditionalRecordsAreLeftOut(t *testing.T) { // A9, F2
	synctest.Test(t, func(t *testing.T) {
		for _, referral := range []bool{false, true} {
			fake := nameserver(t, targets(6, referral))
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
			for _, relayed := range []bool{false, true} {
				for range 2 { // from the nameserver, and from the cache
					req := question("_http._tcp.example", dns.TypeSRV)
					req.RecursionDesired = !relayed
					packet, err := req.Pack()
					if err != nil {
						t.Fatal(err)
					}
					wire := p.send(t, "udp", packet)
					resp := parse(t, wire)
					if whole := len(resp.Answer)+len(resp.Ns) == 6; resp.Truncated != referral || len(wire) > 512 || !whole {
						t.Errorf("relayed %t, referral %t: TC=%t, %d bytes:\n%v", relayed, referral, resp.Truncated, len(wire), resp)
					}
					if n := len(resp.Extra); n > 0 && !referral {
						t.Errorf("relayed %t: %d additional records, want none", relayed, n)
					}
					if whole := p.exchange(t, "tcp", req); len(whole.Extra) != 6*7 || whole.Truncated {
						t.Errorf("relayed %t: over TCP %d additional records", relayed, len(whole.Extra))
					}
				}
			}
		}
	})
}
