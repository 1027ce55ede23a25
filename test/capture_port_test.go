package test

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// port is the source port of all queries in these tests.
const port = 5454

// TestSourcePort sends 2,000 queries from an application and from a socket of the agent's
// user, with the same source port to the same two nameservers. Each of them is the first in
// a part of the turns.
func TestSourcePort(t *testing.T) { // K5
	t.Parallel()
	netns.Need(t, "conntrack")
	vms(t, func(v *vm) {
		t := v.tb
		local, servers := self, []string{named, other}
		if v.backend == "legacy" {
			local, servers = self6, []string{named6, other6}
		}
		v.capture()
		from := netip.AddrPortFrom(netip.MustParseAddr(local), port)
		want := func(uid, n int, name, want string) {
			began := time.Now()
			got, err := askFrom(uid, from, servers[n%2], name)
			for errors.Is(err, syscall.EADDRINUSE) { // a process that was just forked has not closed its copies of the sockets yet
				got, err = askFrom(uid, from, servers[n%2], name)
			}
			if (err != nil || got != want) && !machine.excuses(t, began, time.Now()) {
				t.Fatalf("query %d of user %d, for %s to %s: %s %v, want %s, entries:\n%s", n, uid, name, servers[n%2], got, err, want, v.dnsEntries())
			}
		}
		captured := func(n int) {
			want(0, n, mesh, meshIP)
			if n%10 < 2 { // not in the cache
				want(0, n, strconv.Itoa(n)+".example.org", []string{namedIP, otherIP}[n%2])
			}
		}
		own := func(n int) { want(agentID, n, mesh, []string{namedIP, otherIP}[n%2]) }
		for i, order := range [][]func(int){{captured, own}, {own, captured}} {
			v.Exec("conntrack", "-F")
			v.Run(func() {
				for n := range 500 {
					for _, ask := range order {
						ask(1000*i + n)
					}
				}
			})
			v.noneUnreplied()
		}
	})
}

// noneUnreplied fails the test if conntrack has entries of DNS without a reply, or no
// entries of DNS.
func (v *vm) noneUnreplied() {
	v.tb.Helper()
	entries := v.dnsEntries()
	if entries == "" || strings.Contains(entries, "UNREPLIED") {
		v.tb.Errorf("entries of conntrack:\n%s", entries)
	}
}

// dnsEntries returns the entries of DNS over UDP that conntrack has, of both families.
func (v *vm) dnsEntries() string {
	v.tb.Helper()
	list := []string{"-L", "-p", "udp", "--dport", "53", "-f"}
	return v.Exec("conntrack", append(list, "ipv4")...) + v.Exec("conntrack", append(list, "ipv6")...)
}

// TestSourcePortIsNoLoop checks that the agent goes on using a nameserver if some of its own
// queries are captured: other programs have flushed table raw, so that without the zone they take
// over the entries of applications whose ports the agent's sockets have.
func TestSourcePortIsNoLoop(t *testing.T) { // F6, K5
	t.Parallel()
	netns.Need(t, "conntrack")
	v := newVM(t, "legacy") // whose changes the kernel does not announce
	const ports = 16
	a := v.capture("--upstream-timeout", "30s")                           // attempts enough for a port that is not captured
	v.Exec("sysctl", "-qw", "net.netfilter.nf_conntrack_udp_timeout=600") // entries outlive the test
	v.Exec("sysctl", "-qw", fmt.Sprintf("net.ipv4.ip_local_port_range=%d %d", port, port+4*ports-1))
	repairs := func() int { return a.log.Count("were repaired") }
	const enough, limit = 40, 1000
	captured, asked := 0.0, 0 // the captured queries of the agent, which picks its ports at random; those of a client
	for asked < limit && (captured <= 0 || asked < enough) {
		flushed := repairs()
		v.Exec("iptables-legacy", "-w", "-t", "raw", "-F")
		v.Run(func() {
			for n := range uint16(ports) {
				from := netip.AddrPortFrom(netip.MustParseAddr(self), port+n)
				got, err := askFrom(0, from, named, mesh)
				if got == namedIP || errors.Is(err, syscall.EADDRINUSE) {
					continue // the agent has or had the port, and the kernel has its entry
				}
				if err != nil || got != meshIP {
					t.Fatalf("from port %d: %s %v", from.Port(), got, err)
				}
			}
		})
		before := v.metric("istio_agent_dns_requests_total")
		for n := 1; asked < limit && captured <= 0 && repairs() == flushed || asked < enough; n++ { // until the rules are repaired
			v.digs(namedIP, "-p", "15053", "@127.0.0.1", fmt.Sprintf("www%d.example.org", asked))
			captured = max(captured, v.metric("istio_agent_dns_requests_total")-before-float64(n))
			asked++
		}
	}
	if captured <= 0 {
		t.Error("none of the agent's queries was captured")
	}
	t.Logf("%v of the agent's queries were captured", captured)
	if n := a.log.Count("its queries come back to this agent"); n > 0 {
		t.Errorf("the nameserver counts as a loop:\n%s", a.log)
	}
}
