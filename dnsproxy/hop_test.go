package dnsproxy_test

import (
	"fmt"
	"net"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// neighbourOptions are the hop-by-hop options.
func neighbourOptions() []dns.EDNS0 {
	return []dns.EDNS0{
		&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0123456789abcdef"},
		&dns.EDNS0_TCP_KEEPALIVE{Code: dns.EDNS0TCPKEEPALIVE},
		&dns.EDNS0_PADDING{Padding: make([]byte, 20)},
	}
}

func otherOptions() []dns.EDNS0 {
	return []dns.EDNS0{
		&dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: net.IPv4(192, 0, 2, 0).To4()},
		&dns.EDNS0_LOCAL{Code: 65001, Data: []byte{1, 2}},
	}
}

// optionCodes lists the options of a message's OPT record.
func optionCodes(msg *dns.Msg) []uint16 {
	var codes []uint16
	if opt := msg.IsEdns0(); opt != nil {
		for _, option := range opt.Option {
			codes = append(codes, option.Option())
		}
	}
	return codes
}

// An OPT record is hop by hop, on every path of a message: only end-to-end options are
// passed on, and only in relayed messages.
func TestOPTIsHopByHop(t *testing.T) { // F19, A8, A11
	synctest.Test(t, func(t *testing.T) {
		const clientSize, serverSize = 4000, 3900
		got := make(chan *dns.Msg, 100)
		server := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
			got <- query.Copy()
			reply := new(dns.Msg).SetReply(query)
			reply.SetEdns0(serverSize, true)
			reply.IsEdns0().Option = slices.Concat(neighbourOptions(), otherOptions(), neighbourOptions())
			// Records after OPT, with a name compressed against another one.
			reply.Extra = append(reply.Extra, &dns.A{
				Hdr: dns.RR_Header{Name: "behind.example.", Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 5}, A: net.IPv4(192, 0, 2, 9),
			})
			reply.Compress = true
			return reply
		})
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(server), CacheSize: -1}})
		others := optionCodes((&dns.Msg{Extra: []dns.RR{&dns.OPT{Hdr: dns.RR_Header{Rrtype: dns.TypeOPT}, Option: otherOptions()}}}))
		for _, c := range []struct {
			name    string
			change  func(*dns.Msg)
			relayed bool
		}{
			{name: "query", change: func(req *dns.Msg) { req.IsEdns0().Option = neighbourOptions() }},
			{name: "with client subnet", change: func(*dns.Msg) {}, relayed: true},
			{name: "without RD", change: func(req *dns.Msg) { req.RecursionDesired = false }, relayed: true},
			{name: "notify", change: func(req *dns.Msg) { req.Opcode = dns.OpcodeNotify }, relayed: true},
			{name: "update", change: func(req *dns.Msg) { req.Opcode = dns.OpcodeUpdate }, relayed: true},
			{name: "record behind OPT", change: func(req *dns.Msg) {
				req.Extra = append(req.Extra, &dns.A{
					Hdr: dns.RR_Header{Name: "x.www.example.", Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(192, 0, 2, 8),
				})
			}, relayed: true},
		} {
			for _, network := range []string{"udp", "tcp"} {
				req := question("www.example", dns.TypeA).SetEdns0(clientSize, true)
				req.IsEdns0().Option = slices.Concat(neighbourOptions(), otherOptions())
				c.change(req)
				resp := p.exchange(t, network, req)
				sent := <-got
				var want []uint16
				if c.relayed {
					want = others
				}
				for side, msg := range map[string]*dns.Msg{"the nameserver": sent, "the client": resp} {
					if opt := msg.IsEdns0(); opt == nil || opt.UDPSize() != dnsproxy.DefaultEDNSUDPSize || !opt.Do() ||
						fmt.Sprint(optionCodes(msg)) != fmt.Sprint(want) {
						t.Errorf("%s over %s: %s got, want size %d, DO and options %v:\n%v", c.name, network, side, dnsproxy.DefaultEDNSUDPSize, want, msg)
					}
				}
				if !slices.ContainsFunc(resp.Extra, func(rr dns.RR) bool { return rr.Header().Name == "behind.example." }) {
					t.Errorf("%s over %s: a record behind OPT is lost:\n%v", c.name, network, resp)
				}
			}
		}
		// A client without EDNS gets no OPT record.
		req := question("www.example", dns.TypeA)
		req.RecursionDesired = false
		if resp := p.exchange(t, "udp", req); resp.IsEdns0() != nil || (<-got).IsEdns0() != nil {
			t.Errorf("want no OPT record:\n%v", resp)
		}
		// A client with EDNS gets an OPT record, whether the nameserver supports EDNS or not.
		old := nameserver(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1"))
		ignorant := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(old)}})
		req = withEDNS(question("www.example", dns.TypeA), clientSize)
		req.RecursionDesired = false
		if resp := ignorant.exchange(t, "udp", req); resp.IsEdns0() == nil || len(resp.Answer) != 1 {
			t.Errorf("want an answer with an OPT record:\n%v", resp)
		}
		// A signature is over the whole message.
		req = question("www.example", dns.TypeA).SetEdns0(clientSize, true)
		req.IsEdns0().Option = neighbourOptions()
		req.SetTsig("key.example.", dns.HmacSHA256, 300, 1_000_000_000)
		signed, _, err := dns.TsigGenerate(req, "c2VjcmV0", "", false)
		if err != nil {
			t.Fatal(err)
		}
		p.send(t, "udp", signed)
		if sent := <-got; sent.IsTsig() == nil || len(optionCodes(sent)) != 3 || sent.IsEdns0().UDPSize() != clientSize {
			t.Errorf("a signed message was changed:\n%v", sent)
		}
	})
}

// OPT records are hop by hop in each message of a zone transfer, too.
func TestOPTOfTransfersIsHopByHop(t *testing.T) { // F19
	synctest.Test(t, func(t *testing.T) {
		records := []string{
			"corp.example. 60 IN SOA ns.corp.example. root.corp.example. 1 60 60 60 60", "a.corp.example. 60 IN A 192.0.2.1",
			"corp.example. 60 IN SOA ns.corp.example. root.corp.example. 1 60 60 60 60",
		}
		server := nameserver(t, fakedns.Silence)
		server.Handle(fakedns.Silence, fakedns.Raw(func(packet []byte) (messages [][]byte) {
			for _, record := range records {
				rr, err := dns.NewRR(record)
				if err != nil {
					t.Error(err)
				}
				reply := new(dns.Msg).SetReply(parse(t, packet)).SetEdns0(3900, false)
				reply.Answer = []dns.RR{rr}
				reply.IsEdns0().Option = slices.Concat(neighbourOptions(), otherOptions())
				message, err := reply.Pack()
				if err != nil {
					t.Error(err)
				}
				messages = append(messages, message)
			}
			return messages
		}))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(server)}})
		packet, err := withEDNS(question("corp.example", dns.TypeAXFR), 4000).Pack()
		if err != nil {
			t.Fatal(err)
		}
		conn := p.dial(t, "tcp")
		defer conn.Close()
		write(t, conn, packet)
		for i := range records {
			msg := parse(t, read(t, conn))
			if opt := msg.IsEdns0(); len(msg.Answer) != 1 || opt == nil || opt.UDPSize() != dnsproxy.DefaultEDNSUDPSize || len(opt.Option) != len(otherOptions()) {
				t.Errorf("message %d:\n%v", i, msg)
			}
		}
	})
}
