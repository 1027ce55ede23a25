package test

import (
	"cmp"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// E8: names that lead back to this host, to links, to metadata or to VIPs are refused.
func TestEgressForbidden(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	forbidden := map[string]string{ // addresses, as the errors name them
		"127.0.0.1": "", "::1": "", "0.0.0.0": "", "::": "", "169.254.169.254": "", "fe80::1": "", "fd00:ec2::254": "",
		"100.100.100.200": "", "224.0.0.1": "", "255.255.255.255": "", vipB: "", vip6B: "",
		"::ffff:127.0.0.1": "127.0.0.1", "64:ff9b::7f00:1": "", "64:ff9b::a9fe:a9fe": "", "2002:7f00:1::": "",
		"64:ff9b:1::a9fe:a9fe": "", "64:ff9b:1:a9fe:a9:fe00:808:808": "", "::ffff:0:7f00:1": "", "::7f00:1": "", "fd00:42::42": "", "fd00:c1::a9fe:a9fe": "", "fd00:a9fe:a9fe::1": "", "fd00:100::100:200": "",
	}
	forbidden["2001:db8:64::7f00:1"], forbidden["2001:db8:64::a9fe:a9fe"] = "", "" // by the NAT64 of this network
	e.resolve("ipv4only.arpa", "2001:db8:64::c000:aa")
	hosts := map[string][]string{exactA: {vipA}}
	for addr := range forbidden {
		name, vip := fmt.Sprintf("host-%d.example.com", len(hosts)), fmt.Sprintf("240.240.1.%d", len(hosts))
		hosts[name] = []string{vip}
		e.resolve(name, addr)
	}
	e.push(hosts)
	e.capture()
	for name, vips := range hosts {
		if name == exactA {
			continue
		}
		if got := e.greeting(vips[0], "80"); !strings.Contains(got, "reset") {
			t.Errorf("%v: %q, want a reset", e.zone[name], got)
		}
		addr := e.zone[name][0]
		want := name + " has only addresses that are refused: " + cmp.Or(forbidden[addr], addr) + " is "
		if status := e.get("/debug/status"); !strings.Contains(status, want) {
			t.Errorf("want %q in:\n%s", want, status)
		}
	}
	if got, want := e.refusals("address"), float64(len(forbidden)); got != want {
		t.Errorf("%v refusals, want %v", got, want)
	}
	e.resolve(exactA, self)
	if got := e.greeting(vipA, egressPort); !strings.Contains(got, "reset") {
		t.Errorf("the agent's own port: %q, want a reset", got)
	}
	if want := self + " port " + egressPort + " is this agent"; !strings.Contains(e.get("/debug/status"), want) {
		t.Errorf("want %q in:\n%s", want, e.get("/debug/status"))
	}
	if got := e.greeting("127.0.0.1", egressPort); !strings.Contains(got, "reset") || e.refusals("direct") != 1 {
		t.Errorf("a connection to the listener itself: %q", got)
	}
}

// E15: connections leave from an address, with a mark, or through an HTTP proxy.
func TestEgressSource(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.Exec("ip", "address", "add", "10.0.0.201/24", "dev", "eth0")
	e.net.Serve(serverA+":7", func(conn *net.TCPConn) { _, _ = fmt.Fprintf(conn, "from %s\n", conn.RemoteAddr().(*net.TCPAddr).IP) })
	e.Exec("iptables-nft", "-w", "-t", "mangle", "-A", "OUTPUT", "-p", "tcp", "-m", "mark", "--mark", "0x2a", "-j", "TTL", "--ttl-set", "9")
	a := e.capture("--egress-source", "10.0.0.201", "--egress-mark", "42")
	if got := e.greeting(vipA, "7"); got != "from 10.0.0.201" {
		t.Errorf("%q", got)
	}
	counted := e.Exec("iptables-nft", "-w", "-t", "mangle", "-L", "OUTPUT", "-n", "-v", "-x")
	if line := lastLine(counted); strings.HasPrefix(strings.TrimSpace(line), "0 ") {
		t.Errorf("no packet has the mark:\n%s", counted)
	}
	a.end(terminate)

	targets := make(chan string, 10)
	e.net.Serve(serverB+":3128", tunnel(targets))
	e.capture("--egress-proxy", serverB+":3128")
	conn := e.mustDial(vipA, "7")
	all, err := io.ReadAll(conn)
	if target := wait.For(t, "the proxy is asked", targets); target != exactA+":7" || err != nil || string(all) != "the host, by the proxy" {
		t.Errorf("CONNECT %s: %q, %v", target, all, err)
	}
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// tunnel returns a handler that answers CONNECT as if it were the host.
func tunnel(targets chan<- string) func(conn *net.TCPConn) {
	return func(conn *net.TCPConn) {
		if target, ok := readConnect(conn); ok {
			targets <- target
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\nthe host, by the proxy")
		}
	}
}

// readConnect reads a CONNECT request and returns its target.
func readConnect(conn *net.TCPConn) (target string, ok bool) {
	var head []byte
	for b := make([]byte, 1); !strings.HasSuffix(string(head), "\r\n\r\n"); head = append(head, b...) {
		if _, err := io.ReadFull(conn, b); err != nil {
			return "", false
		}
	}
	line, _, _ := strings.Cut(string(head), "\r\n")
	return strings.TrimSuffix(strings.TrimPrefix(line, http.MethodConnect+" "), " HTTP/1.1"), true
}
