package test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// redirect redirects the host's queries to the agent, except the agent's own. The kernel tracks neither those nor their
// replies: else a query from a port that the agent has used would pass unredirected, as part of that connection.
func (h *host) redirect() {
	h.tb.Helper()
	for _, protocol := range []string{"udp", "tcp"} {
		raw := []string{"-w", "-t", "raw", "-p", protocol, "-j", "CT", "--notrack"}
		h.Exec("iptables", append(raw, "-A", "OUTPUT", "--dport", "53", "-m", "owner", "--gid-owner", "1337")...)
		h.Exec("iptables", append(raw, "-A", "OUTPUT", "--sport", "53")...) // the nameservers are on this host
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
