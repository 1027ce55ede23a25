package dnsproxy_test

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// everySection is a reply with records in every section.
func everySection(tb testing.TB, query *dns.Msg) *dns.Msg {
	tb.Helper()
	reply := new(dns.Msg).SetReply(query)
	reply.Authoritative, reply.RecursionAvailable = true, true
	reply.AuthenticatedData, reply.Zero = true, true
	for section, records := range map[*[]dns.RR][]string{
		&reply.Answer: {
			"Alias.example.org. 299 IN CNAME TARGET.example.org.",
			"TARGET.example.org. 1 IN A 192.0.2.1",
			"target.example.org. 0 IN AAAA 2001:db8::1",
			`target.example.org. 60 IN TXT "one" "" "\000\255\"three"`,
			"target.example.org. 60 IN MX 10 Mail.example.org.",
			"_http._tcp.example.org. 60 IN SRV 1 2 443 target.example.org.",
			`target.example.org. 60 IN CAA 128 issue "ca.example.net"`,
			"target.example.org. 60 IN HTTPS 1 . alpn=\"h2,h3\" ipv4hint=192.0.2.1 key65000=\"x\"",
			`target.example.org. 60 IN TYPE65280 \# 5 0001020304`,
			`target.example.org. 60 CLASS65281 TYPE65281 \# 0`,
			"target.example.org. 2147483647 IN NSEC Next.example.org. A MX RRSIG NSEC TYPE1234",
			"target.example.org. 60 IN RRSIG A 13 3 60 20300101000000 20260101000000 12345 example.org. AAAA",
		},
		&reply.Ns:    {"example.org. 60 IN NS ns1.example.org.", "example.org. 60 IN SOA ns1.example.org. h.example.org. 1 2 3 4 5"},
		&reply.Extra: {"ns1.example.org. 60 IN A 192.0.2.53"},
	} {
		for _, record := range records {
			rr, err := dns.NewRR(record)
			if err != nil {
				tb.Fatalf("%s: %v", record, err)
			}
			*section = append(*section, rr)
		}
	}
	reply.SetEdns0(1410, true)
	opt := reply.IsEdns0()
	opt.Option = append(opt.Option, &dns.EDNS0_LOCAL{Code: 65001, Data: []byte{1, 2}},
		&dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeStaleAnswer, ExtraText: "old"})
	return reply
}

func TestReplyIsUpstreams(t *testing.T) { // F1
	synctest.Test(t, func(t *testing.T) {
		for _, rcode := range []int{dns.RcodeSuccess, dns.RcodeNameError, dns.RcodeServerFailure, dns.RcodeBadCookie} {
			want := make(chan *dns.Msg, 100)
			fake := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
				reply := everySection(t, query)
				reply.Rcode = rcode
				want <- reply.Copy()
				return reply
			})
			p := startForwarder(t, dnsproxy.Config{
				Forward: forward.Config{ResolvConf: resolvConf(t, "options trust-ad"), Upstreams: servers(fake), CacheSize: -1},
			})
			for _, network := range []string{"udp", "tcp"} {
				req := question("aLiAs.example.org", dns.TypeANY)
				req.CheckingDisabled = true
				got := p.exchange(t, network, req.SetEdns0(4096, true))
				// Hop by hop: ID, AA, Z, EDNS except extended errors, the question's spelling.
				want := <-want
				want.Id, want.Zero, want.Authoritative, want.Question[0].Name = got.Id, false, false, "aLiAs.example.org."
				want.Answer[0].Header().Name = "aLiAs.example.org."
				opt := want.IsEdns0()
				opt.SetUDPSize(dnsproxy.DefaultEDNSUDPSize)
				opt.Option = opt.Option[1:]
				if got.String() != want.String() {
					t.Errorf("over %s\n got %s\nwant %s", network, got, want)
				}
			}
		}
	})
}

// manyTexts answers with n records of about 100 bytes, also over UDP, ignoring the client's
// size.
func manyTexts(n int) fakedns.Handler {
	return func(query *dns.Msg, _ string) *dns.Msg {
		reply := new(dns.Msg).SetReply(query)
		for i := range n {
			reply.Answer = append(reply.Answer, &dns.TXT{
				Hdr: dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET, Ttl: 9},
				Txt: []string{fmt.Sprintf("%04d", i) + strings.Repeat("x", 80)},
			})
		}
		reply.Compress = true
		return reply
	}
}

func TestLargeReplies(t *testing.T) { // F2
	synctest.Test(t, func(t *testing.T) {
		for _, n := range []int{6, 20, 45, 300, 600} { // 0.6 to 58 kB
			fake := nameserver(t, manyTexts(n))
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
			for _, edns := range []uint16{0, 1232} {
				req := question("big.example", dns.TypeTXT)
				limit := dns.MinMsgSize
				if edns > 0 {
					withEDNS(req, edns)
					limit = int(edns)
				}
				packet, err := req.Pack()
				if err != nil {
					t.Fatal(err)
				}
				short := p.send(t, "udp", packet)
				resp := parse(t, short)
				if fits := n == 6 && edns > 0; len(short) > limit || resp.Truncated == fits || resp.Rcode != dns.RcodeSuccess ||
					len(resp.Answer) == 0 {
					t.Errorf("%d records, EDNS %d: %d bytes, TC=%v, %s with %d records", n, edns, len(short),
						resp.Truncated, dns.RcodeToString[resp.Rcode], len(resp.Answer))
				}
				if whole := p.exchange(t, "tcp", req); whole.Truncated || len(whole.Answer) != n {
					t.Errorf("%d records, over TCP: %d, TC=%v", n, len(whole.Answer), whole.Truncated)
				}
			}
			for _, q := range fake.Queries() {
				if q.Network != "udp" {
					t.Errorf("%d records: a whole reply was asked for again over TCP", n)
				}
			}
		}
	})
}

// rawNameserver starts a nameserver without TCP that sends arbitrary packets.
func rawNameserver(t *testing.T, answer func(query *dns.Msg, reply func([]byte))) upstream.Spec {
	t.Helper()
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
	})
	go func() {
		defer close(done)
		buf := make([]byte, dns.MaxMsgSize)
		for {
			n, client, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			query := new(dns.Msg)
			if err := query.Unpack(buf[:n]); err != nil {
				t.Errorf("a query that cannot be parsed: %v", err)
				continue
			}
			answer(query, func(packet []byte) {
				_, _ = conn.WriteTo(packet, client) // at the end of a test it fails
			})
		}
	}()
	return upstream.Spec{Addr: netip.MustParseAddrPort(conn.LocalAddr().String())}
}
