package test

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// redirect redirects the host's queries to the agent, except the agent's own.
func (h *host) redirect() {
	h.tb.Helper()
	for _, protocol := range []string{"udp", "tcp"} {
		h.Exec("iptables", "-w", "-t", "nat", "-A", "OUTPUT", "-p", protocol, "--dport", "53",
			"-m", "owner", "!", "--gid-owner", "1337", "-j", "REDIRECT", "--to-ports", "15053")
	}
}

func TestOriginalDestination(t *testing.T) { // F14
	t.Parallel()
	netns.Need(t, "iptables", "dig")
	h := newHost(t)
	h.start()
	h.redirect()
	for _, over := range []string{"+notcp", "+tcp"} {
		for _, d := range []struct{ server, name, want string }{
			{named, "web.shop.svc.cluster.local", "10.1.0.1"},
			{other, "web.shop.svc.cluster.local", "10.1.0.1"}, // a mesh name, for every nameserver
			{named, "www.example.org", "192.0.2.53"},
			{other, "www.example.org", "192.0.2.54"}, // and not from the cache
			{named, "www.example.org", "192.0.2.53"},
		} {
			if got := h.dig(over, "@"+d.server, d.name); got != d.want {
				t.Errorf("dig %s @%s %s: %s, want %s", over, d.server, d.name, got, d.want)
			}
		}
	}
	for _, q := range h.other.Queries() {
		if q.Name != "www.example.org." {
			t.Errorf("the other nameserver received a query for %s", q.Name)
		}
	}
}

// TestOriginalDestinationNotPermitted checks that without CAP_NET_ADMIN the nameservers of resolv.conf
// answer every query.
func TestOriginalDestinationNotPermitted(t *testing.T) { // F14
	t.Parallel()
	netns.Need(t, "iptables", "dig")
	h := newHost(t)
	h.capabilities = nil
	a := h.start()
	h.redirect()
	for _, over := range []string{"+notcp", "+tcp"} {
		if got := h.dig(over, "@"+other, "www.example.org"); got != "192.0.2.53" {
			t.Errorf("dig %s: %s", over, got)
		}
	}
	a.end(terminate)
	if n := strings.Count(a.log.String(), "CAP_NET_ADMIN"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, a.log)
	}
}

func TestOtherOpcodes(t *testing.T) { // A11
	t.Parallel()
	netns.Need(t, "iptables")
	h := newHost(t)
	h.start()
	h.redirect()
	for _, opcode := range []int{dns.OpcodeUpdate, dns.OpcodeNotify} {
		for _, network := range []string{"udp", "tcp"} {
			for _, server := range []string{named, other} {
				req := new(dns.Msg).SetQuestion("web.shop.svc.cluster.local.", dns.TypeSOA)
				req.Opcode = opcode
				var resp *dns.Msg
				var err error
				h.Run(func() {
					client := dns.Client{Net: network, Timeout: 10 * time.Second}
					resp, _, err = client.Exchange(req, net.JoinHostPort(server, "53"))
				})
				if err != nil || resp.Rcode != dns.RcodeSuccess || resp.Opcode != opcode || resp.Id != req.Id {
					t.Errorf("%s over %s to %s: %v, %v", dns.OpcodeToString[opcode], network, server, resp, err)
				}
			}
		}
	}
	if n, m := len(h.named.Queries()), len(h.other.Queries()); n != 4 || m != 4 {
		t.Errorf("the nameservers received %d and %d messages, want 4 and 4", n, m)
	}
}

// BenchmarkCaptured measures the time of one answer to a captured query.
func BenchmarkCaptured(b *testing.B) {
	netns.Need(b, "iptables")
	h := newHost(b)
	h.start()
	h.redirect()
	for what, name := range map[string]string{"table": "web.shop.svc.cluster.local.", "cache": "www.example.org."} {
		b.Run(what, func(b *testing.B) {
			var conn net.Conn
			var err error
			h.Run(func() { conn, err = net.Dial("udp", named+":53") })
			if err != nil {
				b.Fatal(err)
			}
			defer conn.Close()
			query, err := new(dns.Msg).SetQuestion(name, dns.TypeA).Pack()
			if err != nil {
				b.Fatal(err)
			}
			reply := make([]byte, dns.MaxMsgSize)
			for b.Loop() {
				if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
					b.Fatal(err)
				}
				if _, err := conn.Write(query); err != nil {
					b.Fatal(err)
				}
				if _, err := conn.Read(reply); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
