package dnsproxy_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestListeners(t *testing.T) { // R3
	t.Parallel()
	for _, c := range []struct {
		addr  string
		hosts []string
	}{
		{"localhost:0", []string{"127.0.0.1", "::1"}},
		{":0", []string{"0.0.0.0", "::"}},
		{"127.0.0.1:0", []string{"127.0.0.1"}},
		{"[::1]:0", []string{"::1"}},
	} {
		logger, log := newLog()
		p := newProxy(t, dnsproxy.Config{Addr: c.addr, Logger: logger})
		if got := p.Addrs(); got != nil {
			t.Errorf("addresses before Ready: %v", got)
		}
		p = start(t, dnsproxy.Config{Addr: c.addr, Logger: logger, Forward: forward.Config{ResolvConf: resolvConf(t, "nameserver 192.0.2.53")}})
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
		if log.String() != "" {
			t.Errorf("%s: a warning:\n%s", c.addr, log)
		}
		_, port, err := net.SplitHostPort(p.addr("udp"))
		if err != nil {
			t.Fatal(err)
		}
		var want []dnsproxy.Addr
		for _, host := range c.hosts {
			for _, network := range []string{"udp", "tcp"} {
				want = append(want, dnsproxy.Addr{Network: network, Address: net.JoinHostPort(host, port)})
			}
		}
		if got := p.Addrs(); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: listens on %v, want %v", c.addr, got, want)
		}
		if got := p.count(t, "nametap_dns_listeners"); got != float64(len(want)) {
			t.Errorf("%v listeners are counted", got)
		}
		for _, a := range p.Addrs() {
			client := dns.Client{Net: a.Network, Timeout: wait.Limit}
			resp, _, err := client.Exchange(question("web", dns.TypeA), a.Address)
			if err != nil || outcome(resp) != "web. A 10.0.0.1" {
				t.Errorf("%v: %v, %v", a, resp, err)
			}
		}
	}
}

// A port that is free for UDP and taken for TCP is not used.
func TestFreePort(t *testing.T) { // R3
	t.Parallel()
	const sockets = 300 // enough for the kernel to offer a taken port
	for range sockets {
		taken, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer taken.Close()
	}
	for range sockets {
		if p := start(t, dnsproxy.Config{}); len(p.Addrs()) != 2 {
			t.Fatalf("listens on %v", p.Addrs())
		}
	}
}

func TestDegraded(t *testing.T) { // R3
	t.Parallel()
	taken, err := net.ListenPacket("udp6", "[::1]:0")
	if err != nil {
		t.Skipf("LEFT OUT: listeners with one missing family, they need IPv6: %v", err)
	}
	defer func() { taken.Close() }()
	for !portIsFreeElsewhere(taken) { // another test may use it for IPv4 or TCP
		taken.Close()
		if taken, err = net.ListenPacket("udp6", "[::1]:0"); err != nil {
			t.Fatal(err)
		}
	}
	port := taken.LocalAddr().(*net.UDPAddr).Port
	logger, log := newLog()
	p := start(t, dnsproxy.Config{Addr: fmt.Sprintf("localhost:%d", port), Logger: logger})
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	p.converse(t, []dialogue{{"web A", "web. A 10.0.0.1"}})
	if len(p.Addrs()) != 3 || !strings.Contains(log.String(), "degraded") ||
		!strings.Contains(log.String(), taken.LocalAddr().String()) {
		t.Errorf("listens on %v and logs\n%s", p.Addrs(), log)
	}
}

// portIsFreeElsewhere reports whether the port of a socket on [::1] is free on 127.0.0.1,
// and for TCP.
func portIsFreeElsewhere(socket net.PacketConn) bool {
	_, port, _ := net.SplitHostPort(socket.LocalAddr().String())
	udp, udpErr := net.ListenPacket("udp4", "127.0.0.1:"+port)
	if udpErr == nil {
		udp.Close()
	}
	for _, host := range []string{"127.0.0.1", "::1"} {
		tcp, err := net.Listen("tcp", net.JoinHostPort(host, port))
		if err != nil {
			return false
		}
		tcp.Close()
	}
	return udpErr == nil
}

func TestNoListener(t *testing.T) { // R3
	t.Parallel()
	running := start(t, dnsproxy.Config{})
	for _, addr := range []string{"example.com:53", "127.0.0.1", "127.0.0.1:65536", "127.0.0.1:dns", "[::1"} {
		if _, err := dnsproxy.New(dnsproxy.Config{Addr: addr}); err == nil || !strings.Contains(err.Error(), addr) {
			t.Errorf("%s: %v, want an error that names the address", addr, err)
		}
	}
	for _, addr := range []string{running.addr("udp"), "192.0.2.253:5353"} {
		p := newProxy(t, dnsproxy.Config{Addr: addr})
		if err := p.Run(t.Context()); err == nil || !strings.Contains(err.Error(), addr) {
			t.Errorf("%s: %v, want an error that names the address", addr, err)
		}
	}
}

// A listener that dies ends Run. Only the kernel can break a socket, so the test shuts it
// down without the server's knowledge.
func TestListenerDies(t *testing.T) { // R3
	t.Parallel()
	p := start(t, dnsproxy.Config{})
	addr := netip.MustParseAddrPort(p.addr("tcp"))
	descriptors, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	killed := false
	for _, entry := range descriptors {
		fd, err := strconv.Atoi(entry.Name())
		if err != nil {
			t.Fatal(err)
		}
		name, err := syscall.Getsockname(fd)
		in, ok := name.(*syscall.SockaddrInet4)
		if err != nil || !ok || uint16(in.Port) != addr.Port() {
			continue
		}
		if listens, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_ACCEPTCONN); err == nil && listens == 1 {
			killed = syscall.Shutdown(fd, syscall.SHUT_RDWR) == nil
		}
	}
	if !killed {
		t.Fatalf("no socket listens on %v", addr)
	}
	err = wait.For(t, "Run returns", p.ended)
	if err == nil || !strings.Contains(err.Error(), "tcp "+addr.String()+" failed") {
		t.Errorf("Run returned %v", err)
	}
}

// Queries in flight at the end are answered.
func TestShutdown(t *testing.T) { // R1
	t.Parallel()
	asked, release := make(chan struct{}, 100), make(chan struct{})
	answer := fakedns.Answer("www.example. 60 IN A 192.0.2.1")
	fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		asked <- struct{}{}
		<-release
		return answer(query, network)
	})
	ctx, cancel := context.WithCancel(t.Context())
	p := startIn(ctx, t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Timeout: wait.Limit}})
	p.load(t, hosts{})
	packet, err := question("www.example", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	udp, tcp, idle := p.dial(t, "udp"), p.dial(t, "tcp"), p.dial(t, "tcp")
	for _, conn := range []net.Conn{udp, tcp} {
		defer conn.Close()
		write(t, conn, packet)
	}
	defer idle.Close()
	<-asked
	<-asked
	cancel()
	wait.Until(t, "the listener is closed", func() bool {
		conn, err := net.Dial("tcp", p.addr("tcp"))
		if err == nil {
			_ = conn.Close()
		}
		return err != nil
	})
	select {
	case err := <-p.ended:
		t.Fatalf("Run returned %v with queries in flight", err)
	default:
	}
	close(release)
	for _, conn := range []net.Conn{udp, tcp} {
		if got := outcome(parse(t, read(t, conn))); got != "www.example. A 192.0.2.1" {
			t.Errorf("%s: %s", conn.LocalAddr().Network(), got)
		}
	}
	if err := <-p.ended; err != nil {
		t.Errorf("Run returned %v", err)
	}
}

// A held query is in flight, too, even if it is held for longer than the upstream timeout.
func TestShutdownWhileHeld(t *testing.T) { // R1, C6
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	p := startIn(ctx, t, dnsproxy.Config{BeforeSync: dnsproxy.BeforeSyncHold, Forward: forward.Config{Timeout: time.Millisecond}})
	packet, err := question("web", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	conn := p.dial(t, "udp")
	defer conn.Close()
	write(t, conn, packet)
	p.await(t, requestsMetric, 1)
	cancel()
	if got := outcome(parse(t, read(t, conn))); got != "SERVFAIL" {
		t.Errorf("a held query: %s", got)
	}
	if err := <-p.ended; err != nil {
		t.Errorf("Run returned %v", err)
	}
}

// Queries wait in the sockets of a service manager while there is no server, and the next
// server answers them.
func TestAdoptedSockets(t *testing.T) { // R1
	t.Parallel()
	for _, address := range []string{"127.0.0.1:0", "0.0.0.0:0", "[::]:0"} {
		tcp, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer tcp.Close()
		udp, err := net.ListenPacket("udp", tcp.Addr().String())
		if err != nil {
			t.Fatal(err) // the port was free for TCP a moment ago
		}
		defer udp.Close()
		_, port, _ := net.SplitHostPort(udp.LocalAddr().String())
		target := net.JoinHostPort("127.0.0.1", port)
		for range 2 {
			asked := make(chan error, 2)
			for _, network := range []string{"udp", "tcp"} {
				go func() {
					client := dns.Client{Net: network, Timeout: wait.Limit}
					resp, _, err := client.Exchange(question("web", dns.TypeA), target)
					if err == nil && len(resp.Answer) != 1 {
						err = fmt.Errorf("%s: %v", network, resp)
					}
					asked <- err
				}()
			}
			ctx, stop := context.WithCancel(t.Context())
			p := startIn(ctx, t, dnsproxy.Config{
				Addr: "localhost:" + port, Sockets: []*os.File{file(t, udp), file(t, tcp)}, BeforeSync: dnsproxy.BeforeSyncHold,
			})
			p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
			for range 2 {
				if err := <-asked; err != nil {
					t.Error(err)
				}
			}
			stop()
			if err := <-p.ended; err != nil {
				t.Error(err)
			}
		}
	}
}

// file duplicates a socket.
func file(t *testing.T, socket any) *os.File {
	t.Helper()
	duplicate, err := socket.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		t.Fatal(err)
	}
	return duplicate
}

func TestAdoptedSocketsRefused(t *testing.T) { // R3
	t.Parallel()
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	for want, socket := range map[string]*os.File{"want the port of localhost:1": file(t, udp), "want a UDP or a listening TCP socket": null} {
		p := newProxy(t, dnsproxy.Config{Addr: "localhost:1", Sockets: []*os.File{socket}})
		if err := p.Run(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
