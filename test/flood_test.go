package test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// TestFloodOfNameservers sends queries to thousands of silent nameservers that resolv.conf
// does not name. The agent keeps free descriptors, logs at most one line a second, and
// answers other queries meanwhile. The rules have no lease: a slow machine can take longer than the lease for what waits
// in the socket, and then queries would go past the agent, as they should.
func TestFloodOfNameservers(t *testing.T) { // F20, F10, R6
	t.Parallel()
	netns.Need(t, "prlimit")
	v := newVM(t, "auto")
	v.Exec("ip", "route", "add", "default", "via", named) // which forwards nothing
	v.descriptors = 1024
	a := v.capture("--upstream-timeout", "30s", "--capture-fail-open=false") // which all queries of the flood wait
	before, began := len(a.log.String()), time.Now()
	const datagrams, connects = 3000, 60
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
	// nameserver that resolv.conf does not name. Then there are those of 512 sockets.
	v.asked(named, meshIP)
	wait.Until(t, "the agent has begun with all queries", func() bool {
		return v.unread() == 0 && v.metric("nametap_dns_inflight") <= 512
	})
	for range 5 {
		v.asked(named, meshIP)
		for n, over := range []string{"+notcp", "+tcp"} {
			v.digs(namedIP, over, "@"+named, fmt.Sprintf("www%d.example.org", n))
			// Another nameserver that resolv.conf does not name, which answers.
			v.digs(otherIP, over, "@"+other, fmt.Sprintf("www%d.example.org", n))
		}
	}
	if v.metric("nametap_dns_original_destination_total") < datagrams/10 {
		t.Error("few of the queries have arrived")
	}
	if n, seconds := strings.Count(a.log.String()[before:], "\n"), int(time.Since(began).Seconds()); n > 20+2*seconds {
		t.Errorf("%d lines of log in %d s", n, seconds)
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

// TestLostProbes drops half of the packets to the listeners, as a flood of queries does that fills their buffers. The
// agent still renews the lease of its rules, so no query goes past it.
func TestLostProbes(t *testing.T) { // K9, V2
	t.Parallel()
	v := newUnitVM(t)
	v.held(v.start())
	for _, tool := range []string{"iptables-nft", "ip6tables-nft"} {
		// A probe is sent ten times in a second, so all packets of a lease are lost in one of a million cases.
		v.Exec(tool, "-w", "-t", "mangle", "-A", "INPUT", "-p", "udp", "--dport", "15053", "-m", "statistic", "--mode", "random", "--probability", "0.5", "-j", "DROP")
	}
	v.Run(func() {
		conn, err := dns.Dial("udp", named+":53")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		past := 0
		for began := time.Now(); time.Since(began) < 4*iptables.LeaseTime; {
			asked := time.Now()
			got, err := askWithin(50*time.Millisecond, conn, mesh) // it may be dropped
			if err == nil && got == namedIP && !machine.excuses(t, asked, time.Now()) {
				past++
			}
		}
		if past > 0 {
			t.Errorf("%d queries for the mesh name went past the agent", past)
		}
	})
}

// TestNoPorts uses up the source ports for connections to a nameserver, as a client can: probes over TCP fail.
func TestNoPorts(t *testing.T) { // K9, R23
	t.Parallel()
	v := newVM(t, "auto")
	v.Exec("sysctl", "-w", "net.ipv4.ip_local_port_range=40000 40099")
	v.capture()
	v.Run(func() {
		for err := error(nil); !errors.Is(err, syscall.EADDRNOTAVAIL); {
			var conn net.Conn
			if conn, err = net.Dial("tcp4", named+":53"); err == nil {
				defer conn.Close()
			}
		}
		for began := time.Now(); time.Since(began) < 4*iptables.LeaseTime; {
			v.digs(meshIP, "+notcp", "@"+named, mesh)
			time.Sleep(50 * time.Millisecond) //nolint:forbidigo // between two queries
		}
	})
}
