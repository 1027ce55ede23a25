package test

import (
	"bufio"
	bytesOf "encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	agentpkg "github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A guardVM is an egressVM with a policy and with a look at what leaves it.
type guardVM struct {
	*egressVM
	policy string // the path of the policy

	mu   sync.Mutex
	left map[string]int // packets that have left, as text: see describe
	mark int            // counts the packets of settle
}

// settlePort is a port of the nameserver in direct of every policy.
const settlePort = 4000

// newGuardVM makes a guardVM whose policy has more lines.
func newGuardVM(tb testing.TB, backend string, lines ...string) *guardVM {
	tb.Helper()
	g := &guardVM{egressVM: newEgressVM(tb, backend), left: map[string]int{}}
	g.setPolicy(lines...)
	g.flags = append(g.flags, "--guard", g.policy)
	for _, addr := range []string{serverA, serverB, "[" + server6A + "]"} {
		g.net.Serve(addr+":443", greeter(addr))
		g.net.Serve(addr+":22", greeter(addr))
	}
	g.watch()
	return g
}

// setPolicy writes the policy.
func (g *guardVM) setPolicy(lines ...string) {
	g.tb.Helper()
	direct := fmt.Sprintf("direct: [%q]\n", netip.AddrPortFrom(netip.MustParseAddr(named), settlePort))
	if slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, "direct:") }) {
		direct = ""
	}
	g.policy = g.replace("guard.yaml", direct+strings.Join(lines, "\n")+"\n")
}

// watch notes each packet that leaves through eth0, until the test ends.
func (g *guardVM) watch() {
	g.tb.Helper()
	var socket int
	var err error
	g.net.Run(func() {
		if socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return
		}
		link, linkErr := net.InterfaceByName("eth0")
		if err = linkErr; err == nil {
			all := bytesOf.BigEndian.Uint16(bytesOf.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL))
			err = unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Index})
		}
	})
	if err == nil {
		err = errors.Join(unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50_000}),
			unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 256<<20))
	}
	if err != nil {
		g.tb.Fatal(err)
	}
	ended, context := make(chan struct{}), g.tb.Context()
	g.tb.Cleanup(func() {
		<-ended
		if lost, err := unix.GetsockoptTpacketStats(socket, unix.SOL_PACKET, unix.PACKET_STATISTICS); err != nil || lost.Drops > 0 {
			g.tb.Errorf("packets were not seen: %+v, %v", lost, err)
		}
		unix.Close(socket)
	})
	go func() {
		defer close(ended)
		packet := make([]byte, 1<<16)
		for context.Err() == nil {
			n, from, err := unix.Recvfrom(socket, packet, 0)
			if link, ok := from.(*unix.SockaddrLinklayer); err == nil && ok && link.Pkttype != unix.PACKET_OUTGOING {
				text := describe(packet[:n])
				g.mu.Lock()
				g.left[text]++
				g.mu.Unlock()
			}
		}
	}()
}

// describe returns the protocol, the address and the port of the destination of a packet.
func describe(packet []byte) string {
	if len(packet) < 20 {
		return "short"
	}
	to, protocol, rest := netip.Addr{}, packet[9], []byte(nil)
	switch packet[0] >> 4 {
	case 4:
		to, rest = netip.AddrFrom4([4]byte(packet[16:20])), packet[packet[0]&15*4:]
		if bytesOf.BigEndian.Uint16(packet[6:])&0x1fff != 0 {
			return "fragment " + to.String()
		}
	case 6:
		to, protocol, rest = netip.AddrFrom16([16]byte(packet[24:40])), packet[6], packet[40:]
	default:
		return "ARP"
	}
	switch {
	case protocol == unix.IPPROTO_TCP && len(rest) > 13 && rest[13]&0x12 == 2:
		return fmt.Sprintf("SYN %s", netip.AddrPortFrom(to, bytesOf.BigEndian.Uint16(rest[2:])))
	case protocol == unix.IPPROTO_TCP:
		return fmt.Sprintf("tcp %s", to)
	case protocol == unix.IPPROTO_UDP && len(rest) > 4:
		return fmt.Sprintf("udp %s", netip.AddrPortFrom(to, bytesOf.BigEndian.Uint16(rest[2:])))
	}
	return fmt.Sprintf("protocol %d %s", protocol, to)
}

// settle returns when all packets that have left before are noted. It sends one packet, which direct allows.
func (g *guardVM) settle() {
	g.tb.Helper()
	to := netip.AddrPortFrom(netip.MustParseAddr(named), settlePort).String()
	g.mark++
	if err := g.send("udp", to); err != nil {
		g.tb.Fatal(err)
	}
	wait.Until(g.tb, "a packet of direct has left", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.left["udp "+to] >= g.mark
	})
}

// forget forgets the packets that have left.
func (g *guardVM) forget() {
	g.tb.Helper()
	g.settle()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.left, g.mark = map[string]int{}, 0
}

// noneLeft checks that no packet has left whose description has one of the texts, but those of open connections.
func (g *guardVM) noneLeft(texts ...string) {
	g.tb.Helper()
	g.settle()
	g.mu.Lock()
	defer g.mu.Unlock()
	for found, n := range g.left {
		if !strings.HasPrefix(found, "tcp ") && slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(found, text) }) {
			g.tb.Errorf("%d packets have left: %s", n, found)
		}
	}
}

// send sends a packet over a socket with options.
func (g *guardVM) send(network, to string, options ...func(fd int) error) error {
	dialer := net.Dialer{Timeout: patience, Control: func(_, _ string, conn syscall.RawConn) (err error) {
		return errors.Join(conn.Control(func(fd uintptr) {
			for _, option := range options {
				err = errors.Join(err, option(int(fd)))
			}
		}), err)
	}}
	var err error
	g.Run(func() {
		var conn net.Conn
		if conn, err = dialer.Dial(network, to); err == nil {
			_, err = conn.Write([]byte("a secret"))
			_ = conn.Close()
		}
	})
	return err
}

// raw sends a packet of a protocol over a raw socket. Without a payload, it is the whole packet with its header.
func (g *guardVM) rawPacket(protocol int, to string, payload []byte, header bool) error {
	addr, domain := netip.MustParseAddr(to), unix.AF_INET
	var sockaddr unix.Sockaddr = &unix.SockaddrInet6{Addr: addr.As16()}
	if addr.Is6() {
		domain = unix.AF_INET6
	} else {
		sockaddr = &unix.SockaddrInet4{Addr: addr.As4()}
	}
	var err error
	g.Run(func() {
		var socket int
		if socket, err = unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol); err != nil {
			return
		}
		defer unix.Close(socket)
		if header {
			err = unix.SetsockoptInt(socket, unix.IPPROTO_IP, unix.IP_HDRINCL, 1)
		}
		if err == nil {
			err = unix.Sendto(socket, payload, 0, sockaddr)
		}
	})
	return err
}

// device binds a socket to eth0.
func device(fd int) error { return unix.BindToDevice(fd, "eth0") }

// hops returns an option that sets the TTL.
func hops(n int) func(fd int) error {
	return func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, n) }
}

// broadcast lets a socket send to all hosts.
func broadcast(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1) }

// A bypass is an attempt to send something past the guard. By default, TCP has to be reset, and sending anything else has
// to fail.
type bypass struct {
	name string
	to   string // what no packet may have left to
	try  func(g *guardVM) error
	want error
}

// bypasses lists attempts that the kernel has to refuse, for root in the namespace with all capabilities.
func bypasses() []bypass {
	over := func(network, to string, options ...func(fd int) error) func(g *guardVM) error {
		return func(g *guardVM) error { return g.send(network, to, options...) }
	}
	raw := func(protocol int, to string, payload []byte) func(g *guardVM) error {
		return func(g *guardVM) error { return g.rawPacket(protocol, to, payload, false) }
	}
	tcp, rest := unix.ECONNREFUSED, unix.EPERM
	syn := slices.Concat([]byte{0x30, 0x39, 1, 187}, make([]byte, 8), []byte{0x50, 2}, make([]byte, 6))
	fragment := func(g *guardVM) error { // the second fragment of a UDP datagram, without its first
		packet := slices.Concat([]byte{0x45, 0, 0, 28, 0, 1, 0, 2, 64, unix.IPPROTO_UDP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 11}, make([]byte, 8))
		return g.rawPacket(unix.IPPROTO_RAW, serverA, packet, true)
	}
	return []bypass{
		{"the real address", "SYN " + serverA + ":443", over("tcp4", serverA+":443"), tcp},
		{"the real address over IPv6", "SYN [" + server6A + "]:443", over("tcp6", "["+server6A+"]:443"), tcp},
		{"another port", "SYN " + serverA + ":22", over("tcp4", serverA+":22"), tcp},
		{"DoT by address", "SYN " + other + ":853", over("tcp4", other+":853"), tcp},
		{"DoH by address", "SYN " + other + ":443", over("tcp4", other+":443"), tcp},
		{"DoQ by address", "udp " + other + ":853", over("udp4", other+":853"), rest},
		{"DoT to the nameserver", "SYN [" + named6 + "]:853", over("tcp6", "["+named6+"]:853"), tcp},
		{"QUIC", "udp " + serverA + ":443", over("udp4", serverA+":443"), rest},
		{"QUIC over IPv6", "udp [" + server6A + "]:443", over("udp6", "["+server6A+"]:443"), rest},
		{"IPv4-mapped", "SYN " + serverB + ":443", over("tcp", "[::ffff:"+serverB+"]:443"), tcp},
		{"bound to the interface", "SYN " + serverB + ":22", over("tcp4", serverB+":22", device), tcp},
		{"loopback through the interface", "SYN 127.0.0.1:443", over("tcp4", "127.0.0.1:443", device), tcp},
		{"the TTL of the agent's probes", "udp " + serverA + ":1217", over("udp4", serverA+":1217", hops(217)), rest},
		{"the TTL that is tried", "SYN " + serverA + ":4431", over("tcp4", serverA+":4431", hops(1)), tcp},
		{"multicast", "udp 224.0.0.251:5353", over("udp4", "224.0.0.251:5353"), rest},
		{"broadcast", "udp 255.255.255.255:67", over("udp4", "255.255.255.255:67", broadcast), rest},
		{"the other machine's broadcast", "udp 10.0.0.255:9", over("udp4", "10.0.0.255:9", broadcast), rest},
		{"ping", "protocol 1 " + serverA, raw(unix.IPPROTO_ICMP, serverA, []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}), rest},
		{"ping over IPv6", "protocol 58 " + server6A, raw(unix.IPPROTO_ICMPV6, server6A, []byte{128, 0, 0, 0, 0, 0, 0, 0}), rest},
		{"SCTP", "protocol 132 " + serverA, raw(unix.IPPROTO_SCTP, serverA, make([]byte, 12)), rest},
		{"GRE over IPv6", "protocol 47 " + server6A, raw(unix.IPPROTO_GRE, server6A, make([]byte, 8)), rest},
		{"a SYN of a raw socket", "SYN " + serverB + ":443", raw(unix.IPPROTO_TCP, serverB, syn), rest},
		{"a fragment", "fragment " + serverA, fragment, nil}, // the kernel keeps it for the first one
	}
}

// refuses tries all bypasses.
func (g *guardVM) refuses() {
	g.tb.Helper()
	g.forget()
	for _, b := range bypasses() {
		if err := b.try(g); !errors.Is(err, b.want) {
			g.tb.Errorf("%s: %v, want %v", b.name, err, b.want)
		}
	}
	for _, b := range bypasses() {
		g.noneLeft(b.to)
	}
}

// connects waits until TCP connections to an address are carried to its server, or are refused.
func (g *guardVM) connects(to string, want bool) {
	g.tb.Helper()
	wait.Until(g.tb, fmt.Sprintf("connections to %s are made: %v", to, want), func() bool {
		err := g.send("tcp", to)
		return want && err == nil || !want && errors.Is(err, unix.ECONNREFUSED)
	})
}

// guardVMs runs a subtest for each backend of iptables.
func guardVMs(t *testing.T, test func(g *guardVM), lines ...string) {
	t.Helper()
	for _, backend := range []string{"nft", "legacy"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			test(newGuardVM(t, backend, lines...))
		})
	}
}

// G9, G10: nothing leaves that the policy does not have, while the agent runs, after it was killed, and while the next one
// runs. capture remove opens the host.
func TestGuardRefuses(t *testing.T) {
	t.Parallel()
	guardVMs(t, func(g *guardVM) {
		a := g.capture()
		g.refuses()
		for _, server := range []string{other, named6} { // redirected to the agent
			g.digs(vipA, "@"+server, exactA)
			g.dig("@"+server, exactA, "TXT") // the agent's nameservers are asked, and not that one (F14)
		}
		g.noneLeft(other+":53", "["+named6+"]:53")
		rules := g.Rules()
		a.end(syscall.SIGKILL)
		if after := g.Rules(); after != rules {
			g.tb.Errorf("rules after a kill:\n%s\nbefore:\n%s", after, rules)
		}
		g.refuses()
		for _, server := range []string{"10.0.0.55", other, "fd00::55"} { // the agent's own way to its nameservers
			for _, network := range []string{"udp", "tcp"} {
				_ = g.send(network, net.JoinHostPort(server, "53")) // UDP may be sent to the closed port of the agent
			}
			g.noneLeft(net.JoinHostPort(server, "53"))
		}
		if status := g.root(g.args("status")...); status.code == 0 || !strings.Contains(status.stdout, "guard: enforce") {
			g.tb.Errorf("status without an agent: %+v", status)
		}
		g.capture().end(syscall.SIGKILL)
		if r := g.root("capture", "remove"); r.code != 0 {
			g.tb.Errorf("%+v", r)
		}
		if err := g.send("tcp4", serverA+":443"); err != nil {
			g.tb.Error(err)
		}
	})
}

// G9, G12: direct and mode follow the file. Connections that are open go on, also those that were open before the guard.
func TestGuardFollowsPolicy(t *testing.T) {
	t.Parallel()
	guardVMs(t, func(g *guardVM) {
		before := g.mustDial(serverB, "22")
		a := g.capture()
		g.connects(serverA+":443", false)
		g.setPolicy(fmt.Sprintf("direct: [%q, %q, %q]", serverA, "["+server6A+"]:443", netip.AddrPortFrom(netip.MustParseAddr(named), settlePort)))
		g.connects(serverA+":443", true)
		g.connects("["+server6A+"]:443", true)
		g.connects("["+server6A+"]:22", false)
		open := g.mustDial(serverA, "22")
		g.setPolicy()
		g.connects(serverA+":443", false)
		g.setPolicy("mode: enforced")
		wait.Until(g.tb, "the broken policy is logged", func() bool { return a.log.Count("the settings stay unchanged") > 0 })
		g.connects(serverA+":443", false)
		for _, conn := range []*net.TCPConn{before, open} {
			echoes(g.tb, conn)
		}
		if n := a.log.Count("had drifted"); n > 0 {
			g.tb.Errorf("changes count as repairs:\n%s", a.log)
		}
	})
}

// echoes checks that a connection to a greeter goes on.
func echoes(tb testing.TB, conn *net.TCPConn) {
	tb.Helper()
	lines := bufio.NewReader(conn)
	if _, err := lines.ReadString('\n'); err != nil { // the greeting
		tb.Error(err)
	}
	if _, err := fmt.Fprintln(conn, "still here"); err != nil {
		tb.Error(err)
	}
	if line, err := lines.ReadString('\n'); line != "still here\n" {
		tb.Errorf("%q, %v", line, err)
	}
}

// G10: rules that another program flushes come back, in nft at once.
func TestGuardFlushed(t *testing.T) {
	t.Parallel()
	g := newGuardVM(t, "nft")
	a := g.capture()
	for _, command := range []string{"iptables-nft -F", "nft flush ruleset", "iptables-nft -I OUTPUT 1 -j ACCEPT", "iptables-nft -D NAMETAP_GUARD 1"} {
		repairs := a.log.Count("had drifted")
		g.Exec("sh", "-c", command)
		wait.Until(t, "the rules are repaired after "+command, func() bool { return a.log.Count("had drifted") > repairs })
		g.connects(serverA+":443", false)
	}
	g.refuses()
}

// G9: a family that the agent does not listen on is guarded, too.
func TestGuardWithoutListener(t *testing.T) {
	t.Parallel()
	g := newGuardVM(t, "nft")
	g.flags = append(g.flags, "--dns-addr", "127.0.0.1:15053")
	g.capture()
	g.refuses()
	if err := g.send("udp6", "["+named6+"]:53"); !errors.Is(err, unix.EPERM) {
		t.Errorf("a query over IPv6: %v", err)
	}
}

// G10, V4: a stop leaves the rules, and so does the unit that removes them elsewhere.
func TestGuardStopped(t *testing.T) {
	t.Parallel()
	g := newGuardVM(t, "nft")
	a := g.capture()
	rules := g.Rules()
	a.end(terminate)
	kept := g.environment
	for _, setting := range []string{"NAMETAP_GUARD=" + g.policy, "NAMETAP_CONFIG=/nonexistent", "NAMETAP_GUARDS=" + g.policy} { // whatever the settings say
		g.environment = append(slices.Clip(kept), setting)
		if r := g.root("capture", "remove", "--after-agent"); r.code != 0 || g.Rules() != rules {
			t.Errorf("%s: %+v, rules:\n%s\nbefore:\n%s", setting, r, g.Rules(), rules)
		}
	}
	g.refuses()
}

// G10: in a pod, the init step applies the rules, and the agent has no capability. It observes whether they hold.
func TestGuardApplied(t *testing.T) {
	t.Parallel()
	guardVMs(t, func(g *guardVM) {
		g.capabilities = nil
		g.environment = append(g.environment, "KUBERNETES_SERVICE_HOST=10.96.0.1")
		a := g.start()
		g.problem("guard_open", true)
		if r := g.root(g.args("apply")...); r.code != 0 || !strings.Contains(r.stdout, "192.0.2.1:9: refused") {
			g.tb.Fatalf("%+v", r)
		}
		g.problem("guard_open", false)
		a.end(syscall.SIGKILL)
		g.refuses()
		g.start()
		g.refuses()
		if r := g.root(g.args("apply", "--capture-enabled=false")...); r.code != 2 || !strings.Contains(r.stderr, "guard") {
			g.tb.Errorf("apply with capture off: %+v", r)
		}
	})
}

// problem waits until the agent has a problem, or none, with a code, of which it knows.
func (g *guardVM) problem(code string, want bool) {
	g.tb.Helper()
	wait.Until(g.tb, fmt.Sprintf("the problem %s: %v", code, want), func() bool {
		var status agentpkg.Status
		_, body, _ := strings.Cut(g.get("/debug/status"), "\r\n\r\n")
		if err := json.Unmarshal([]byte(body), &status); err != nil {
			g.tb.Fatal(err)
		}
		for _, c := range status.Conditions {
			if string(c.Code) == code {
				return c.Unknown == "" && len(c.Problems)+len(c.Suspected) > 0 == want
			}
		}
		return false
	})
}

// G11: an audit refuses nothing. It redirects connections to the agent and counts what else leaves.
func TestGuardAudits(t *testing.T) {
	t.Parallel()
	guardVMs(t, func(g *guardVM) {
		a := g.capture()
		if err := g.send("udp4", serverA+":443"); err != nil {
			g.tb.Error(err)
		}
		if status := g.root(g.args("status")...); status.code != 0 || !strings.Contains(status.stdout, "guard: audit (packets not in the policy: 0 tcp, 1 udp, 0 others)") {
			g.tb.Errorf("%+v", status)
		}
		for _, to := range []string{serverA, server6A} { // as without a guard, but through the agent
			if text := g.greeting(to, "443"); text != "220 "+strings.Trim(net.JoinHostPort(to, ""), ":") {
				g.tb.Errorf("a connection to %s: %s", to, text)
			}
		}
		if status := g.root(g.args("status")...); !strings.Contains(status.stdout, "0 tcp") {
			g.tb.Errorf("connections were not redirected: %+v", status)
		}
		a.end(terminate)
		if g.captured() || strings.Contains(g.Rules(), "NAMETAP") {
			g.tb.Errorf("rules are left:\n%s", g.Rules())
		}
	}, "mode: audit")
}

// G6, G10: an allowed name is carried, over both families. While agents are killed in the middle of connects and queries, and
// others follow, nothing leaves but what the agents send.
func TestGuardKilled(t *testing.T) {
	t.Parallel()
	guardVMs(t, func(g *guardVM) {
		g.resolve("api.example.org", serverA)
		a := g.capture()
		vips := []string{g.vip("A"), g.vip("AAAA")}
		for _, vip := range vips {
			if text := g.greeting(vip, "443"); text != "220 "+serverA {
				g.tb.Errorf("the name at %s: %s", vip, text)
			}
			if text := g.greeting(vip, "22"); !strings.Contains(text, "reset") {
				g.tb.Errorf("another port of %s: %s", vip, text)
			}
		}
		end, ended := make(chan struct{}), make(chan struct{})
		var tried atomic.Int64
		go func() {
			defer close(ended)
			for {
				select {
				case <-end:
					return
				default:
				}
				for _, vip := range vips {
					_ = g.send("tcp", net.JoinHostPort(vip, "443"))
				}
				_ = g.send("tcp4", serverB+":443")
				_ = g.send("udp4", other+":53")
				_ = g.send("udp6", "["+named6+"]:53")
				tried.Add(1)
			}
		}()
		for range 3 {
			n := tried.Load()
			wait.Until(g.tb, "there were more attempts", func() bool { return tried.Load() > n+20 })
			a.end(syscall.SIGKILL)
			n = tried.Load()
			wait.Until(g.tb, "there were attempts without an agent", func() bool { return tried.Load() > n+20 })
			a = g.capture()
		}
		close(end)
		<-ended
		g.noneLeft(serverB, " 240.", "2001:2:", other+":53", named6)
	}, "private: allow", "allow:", "- names: [api.example.org]")
}

// vip returns the VIP of the name api.example.org.
func (g *guardVM) vip(qtype string) string {
	g.tb.Helper()
	vip := strings.TrimSpace(g.Exec("dig", "+short", "+tries=1", "@"+named, "api.example.org", qtype))
	if addr, err := netip.ParseAddr(vip); err != nil || !guard.IsVIP(addr) {
		g.tb.Fatalf("%s: %q", qtype, vip)
	}
	return vip
}

// G9: what a container sends through a virtual interface is refused, too, except to VIPs and direct.
func TestGuardContainer(t *testing.T) {
	t.Parallel()
	guardVMs(t, func(g *guardVM) {
		container := netns.New(g.tb)
		netns.Connect(
			netns.End{NS: g.NS, Name: "docker0", Addrs: []string{"172.17.0.1/24", "fd17::1/64"}},
			netns.End{NS: container, Name: "eth0", Addrs: []string{"172.17.0.2/24", "fd17::2/64"}},
		)
		container.Exec("ip", "route", "add", "default", "via", "172.17.0.1")
		container.Exec("ip", "-6", "route", "add", "default", "via", "fd17::1")
		g.Exec("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
		g.net.Exec("ip", "route", "add", "172.17.0.0/24", "via", self)
		g.net.Exec("ip", "-6", "route", "add", "fd17::/64", "via", self6)
		g.resolve("api.example.org", serverA)
		inside := &egressVM{vm: &vm{host: &host{NS: container, tb: g.tb}}}
		if text := inside.greeting(serverA, "443"); text != "220 "+serverA {
			g.tb.Fatalf("without the guard: %s", text)
		}
		g.capture("--dns-addr", ":15053", "--egress-addr", ":"+egressPort, "--capture-virtual-interface", "docker0")
		if text := inside.greeting(g.vip("A"), "443"); text != "220 "+serverA {
			g.tb.Errorf("the name: %s", text)
		}
		if text := inside.greeting(serverB, "22"); text != "220 "+serverB {
			g.tb.Errorf("direct: %s", text)
		}
		g.forget()
		for _, to := range []string{serverB, server6A, named6} {
			for _, port := range []string{"443", "853"} {
				if text := inside.greeting(to, port); !strings.Contains(text, "refused") {
					g.tb.Errorf("%s port %s: %s", to, port, text)
				}
			}
			if err := inside.sendUDP(to); !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.EACCES) {
				g.tb.Errorf("UDP to %s: %v", to, err)
			}
		}
		raw := guardVM{egressVM: inside} // of a container that has CAP_NET_RAW
		ack := slices.Concat([]byte{0x30, 0x39, 1, 187}, make([]byte, 8), []byte{0x50, 0x10}, make([]byte, 6))
		for _, err := range []error{
			raw.rawPacket(unix.IPPROTO_ICMPV6, server6A, []byte{133, 0, 0, 0, 0, 0, 0, 0}, false),
			raw.rawPacket(unix.IPPROTO_ICMPV6, server6A, []byte{143, 0, 0, 0, 0, 0, 0, 0}, false),
			raw.rawPacket(unix.IPPROTO_TCP, server6B, ack, false),
		} {
			if err != nil {
				g.tb.Error(err)
			}
		}
		g.noneLeft(serverB, server6A, named6)
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.left["tcp "+server6B] > 0 {
			g.tb.Error("a segment without a connection has left")
		}
	}, "private: allow", fmt.Sprintf("direct: [\"%s:22\", \"%s:%d\"]", serverB, named, settlePort), "allow:", "- names: [api.example.org]")
}

// G10: while the rules are replaced again and again, by other settings and by other policies, nothing leaves.
func TestGuardReplaced(t *testing.T) {
	t.Parallel()
	guardVMs(t, func(g *guardVM) {
		if r := g.root(g.args("apply")...); r.code != 0 {
			g.tb.Fatalf("%+v", r)
		}
		end, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			for {
				select {
				case <-end:
					return
				default:
				}
				_ = g.send("tcp4", serverA+":443")
				_ = g.send("tcp6", "["+server6A+"]:443")
				_ = g.send("udp4", serverB+":443")
				_ = g.send("udp4", other+":53")
			}
		}()
		for n := range 5 {
			g.setPolicy(fmt.Sprintf("direct: [\"10.%d.0.0/16\", \"%s:%d\"]", 96+n, named, settlePort))
			if r := g.root(g.args("apply", "--capture-exclude-uid", strconv.Itoa(1000+n))...); r.code != 0 {
				g.tb.Errorf("%+v", r)
			}
		}
		close(end)
		<-ended
		g.noneLeft(serverA, serverB, server6A, other+":53")
	})
}

// G11, G12: a change of the mode. In an audit, the rules end with the agent, also one that is killed; afterwards, they stay.
func TestGuardModes(t *testing.T) {
	t.Parallel()
	guardVMs(t, func(g *guardVM) {
		a := g.capture()
		g.connects(serverA+":443", true)
		a.end(syscall.SIGKILL)
		g.becomes(named, namedIP)
		g.connects(serverA+":443", true)
		a = g.capture()
		g.setPolicy("mode: enforce")
		g.connects(serverA+":443", false)
		g.connects("["+server6A+"]:443", false)
		g.refuses()
		a.end(syscall.SIGKILL)
		g.refuses()
		g.setPolicy("mode: audit")
		g.capture()
		g.connects(serverA+":443", true)
		g.connects("["+server6A+"]:443", true)
		if n := strings.Count(g.Rules(), "REJECT --reject-with tcp-reset"); n > 0 {
			g.tb.Errorf("an audit with rules that refuse:\n%s", g.Rules())
		}
	}, "mode: audit")
}
