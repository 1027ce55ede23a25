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
			h.digs(d.want, over, "@"+d.server, d.name)
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
		h.digs("192.0.2.53", over, "@"+other, "www.example.org")
	}
	a.end(terminate)
	if n := strings.Count(a.log.String(), "CAP_NET_ADMIN"); n != 1 {
		t.Errorf("logged %d times:\n%s", n, a.log)
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
