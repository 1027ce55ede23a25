package test

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// TestFloodOfNameservers sends queries to thousands of silent nameservers that resolv.conf
// does not name. The agent keeps free descriptors, logs at most one line a second, and
// answers other queries meanwhile. The rules have no lease: with the race detector, a slow machine can take longer than
// the lease for what waits in the socket, and then queries would go past the agent, as they should.
func TestFloodOfNameservers(t *testing.T) { // F20, F10, R6
	t.Parallel()
	netns.Need(t, "prlimit")
	v := newVM(t, "auto")
	v.Exec("ip", "route", "add", "default", "via", named) // which forwards nothing
	v.descriptors = 1024
	a := v.capture("--upstream-timeout", "4s", "--capture-fail-open=false")
	before := len(a.log.String())
	const datagrams, connects = 9000, 60
	address := func(n int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(n >> 8), byte(n)}), 53)
	}
	packet := func(n int) []byte {
		packet, err := new(dns.Msg).SetQuestion(fmt.Sprintf("w%d.example.org.", n), dns.TypeA).Pack()
		if err != nil {
			t.Fatal(err)
		}
		return packet
	}
	var conns []net.Conn
	defer func() {
		for _, conn := range conns {
			conn.Close()
		}
	}()
	v.Run(func() {
		socket, err := net.ListenUDP("udp4", nil)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, socket)
		for n := range datagrams {
			if _, err := socket.WriteToUDPAddrPort(packet(n), address(n)); err != nil {
				t.Fatal(err)
			}
		}
		for n := range connects {
			conn, err := dns.Dial("tcp4", address(n).String())
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, conn)
			if _, err := conn.Write(packet(n)); err != nil {
				t.Fatal(err)
			}
		}
	})
	// Until the agent has begun with all queries, each of them may end an earlier one to another
	// nameserver that resolv.conf does not name. Then there are those of 512 sockets. On a busy machine, with
	// the race detector, beginning with all of them takes the agent several seconds.
	for _, over := range []string{"+notcp", "+tcp"} {
		if got := v.dig(over, "+timeout=20", "@"+named, mesh); got != meshIP {
			t.Errorf("dig %s: %s, want %s", over, got, meshIP)
		}
	}
	wait.Until(t, "the agent has begun with all queries", func() bool {
		return v.unread() == 0 && v.metric("nametap_dns_inflight") <= 512
	})
	for range 5 {
		v.asked(named, meshIP)
		for n, over := range []string{"+notcp", "+tcp"} {
			if got := v.dig(over, "@"+named, fmt.Sprintf("www%d.example.org", n)); got != namedIP {
				t.Errorf("dig %s: %s; %s", over, got, v.Exec("dig", over, "@"+named, fmt.Sprintf("www%d.example.org", n)))
			}
			// Another nameserver that resolv.conf does not name, which answers.
			if got := v.dig(over, "@"+other, fmt.Sprintf("www%d.example.org", n)); got != otherIP {
				t.Errorf("dig %s @%s: %s", over, other, got)
			}
		}
	}
	wait.Until(t, "nothing is in flight", func() bool { return v.metric("nametap_dns_inflight") == 0 })
	v.asked(named, meshIP)
	select {
	case <-a.ended:
		t.Fatal("the agent ended")
	default:
	}
	if v.metric("nametap_dns_original_destination_total") < datagrams/10 {
		t.Error("few of the queries have arrived")
	}
	if text := a.log.String()[before:]; len(text) > 10_000 {
		t.Errorf("%d bytes of log", len(text))
	}
}

// unread returns the number of bytes that wait in the agent's UDP socket on 127.0.0.1:15053 (3ACD).
func (v *vm) unread() (waiting uint64) {
	v.tb.Helper()
	for line := range strings.Lines(v.Exec("cat", "/proc/net/udp")) {
		fields := strings.Fields(line)
		if len(fields) < 5 || !strings.HasSuffix(fields[1], ":3ACD") {
			continue
		}
		_, text, _ := strings.Cut(fields[4], ":")
		n, err := strconv.ParseUint(text, 16, 64)
		if err != nil {
			v.tb.Fatal(err)
		}
		waiting += n
	}
	return waiting
}

// TestLostProbes drops most packets to the listeners, as a flood of queries does that fills their buffers. The
// agent still renews the lease of its rules, so no query goes past it.
func TestLostProbes(t *testing.T) { // K9, V2
	t.Parallel()
	v := newUnitVM(t)
	v.held(v.start())
	var past atomic.Int64
	v.named.Handle(func(query *dns.Msg, network string) *dns.Msg {
		if query.Question[0].Name == dns.Fqdn(mesh) {
			past.Add(1)
		}
		return anyName(namedIP)(query, network)
	})
	for _, tool := range []string{"iptables-nft", "ip6tables-nft"} {
		v.Exec(tool, "-w", "-t", "mangle", "-I", "INPUT", "-p", "udp", "--dport", "15053", "-m", "statistic", "--mode", "random", "--probability", "0.6", "-j", "DROP")
	}
	v.Run(func() {
		conn, err := dns.Dial("udp", named+":53")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		client := dns.Client{Timeout: 50 * time.Millisecond}
		for began := time.Now(); time.Since(began) < 5*iptables.LeaseTime; {
			_, _, _ = client.ExchangeWithConn(new(dns.Msg).SetQuestion(dns.Fqdn(mesh), dns.TypeA), conn) // it may be dropped
		}
	})
	if n := past.Load(); n > 0 {
		t.Errorf("%d queries for the mesh name went past the agent", n)
	}
}
