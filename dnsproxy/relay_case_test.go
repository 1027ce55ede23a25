package dnsproxy_test

import (
	"bytes"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// F11, A11: relayed messages arrive unchanged, signatures stay valid, and the
// reply of a server that changes the case of the question is relayed unchanged. A query is answered in its own case.
func TestRelayedCase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const key, secret = "key.", "c2VjcmV0LXNlY3JldC1zZWNyZXQ="
		var mu sync.Mutex
		var got [][]byte
		fake := nameserver(t, fakedns.Silence)
		fake.Handle(func(query *dns.Msg, _ string) *dns.Msg {
			reply := new(dns.Msg).SetReply(query)
			reply.Question[0].Name = strings.ToLower(reply.Question[0].Name)
			return reply
		}, func(r fakedns.Request, packets []fakedns.Packet) []fakedns.Packet {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, r.Wire)
			return packets
		})
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
		unsigned := question("wWw.A-long-Name-with-many-Letters.eXample", dns.TypeA)
		unsigned.RecursionDesired = false
		update := new(dns.Msg).SetUpdate("eXample.")
		signed := question("sIgned.A-long-Name-with-many-Letters.eXample", dns.TypeA)
		signed.SetTsig(key, dns.HmacSHA256, 300, time.Now().Unix())
		for name, req := range map[string]*dns.Msg{"without RD": unsigned, "update": update, "signed": signed} {
			packet, err := req.Pack()
			if name == "signed" {
				packet, _, err = dns.TsigGenerate(req, secret, "", false)
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, network := range []string{"udp", "tcp"} {
				mu.Lock()
				got = nil
				mu.Unlock()
				resp := parse(t, p.send(t, network, packet))
				want := req.Question[0].Name
				if name != "without RD" {
					want = strings.ToLower(want)
				}
				if resp.Rcode != dns.RcodeSuccess || resp.Question[0].Name != want {
					t.Errorf("%s over %s: want the question %s:\n%v", name, network, want, resp)
				}
				mu.Lock()
				if len(got) != 1 || !bytes.Equal(got[0][2:], packet[2:]) {
					t.Errorf("%s over %s:\n got %x\nwant %x", name, network, got, packet)
				} else if name == "signed" && dns.TsigVerify(got[0], secret, "", false) != nil {
					t.Errorf("%s over %s: the signature is spoilt", name, network)
				}
				mu.Unlock()
			}
		}
	})
}
