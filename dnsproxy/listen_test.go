package dnsproxy_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/listen"
)

// families returns the addresses that this machine has. The kernel may have IPv6, and so ::, but no address of it.
func families(addresses ...string) []string {
	return slices.DeleteFunc(addresses, func(a string) bool {
		probe, err := net.ListenPacket("udp", net.JoinHostPort(a, "0"))
		if err == nil {
			probe.Close()
		}
		return err != nil
	})
}

func TestListeners(t *testing.T) { // R3
	t.Parallel()
	for addr, hostsOf := range map[string][]string{
		"localhost:0": {"127.0.0.1", "::1"}, ":0": {"0.0.0.0", "::"}, "127.0.0.1:0": {"127.0.0.1"}, "[::1]:0": {"::1"},
	} {
		addresses := families(hostsOf...)
		if len(addresses) == 0 {
			continue
		}
		logger, log := newLog()
		cfg := dnsproxy.Config{Addr: addr, MaxTCPConns: 10, Logger: logger, Forward: forward.Config{ResolvConf: resolvConf(t, "nameserver 192.0.2.53")}}
		if got := newProxy(t, cfg).Addrs(); got != nil {
			t.Errorf("addresses before Ready: %v", got)
		}
		p := start(t, cfg)
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
		if strings.Contains(log.String(), "level=WARN") {
			t.Errorf("%s: a warning:\n%s", addr, log)
		}
		_, port, err := net.SplitHostPort(p.addr("udp"))
		if err != nil {
			t.Fatal(err)
		}
		var want []dnsproxy.Addr
		for _, host := range addresses {
			for _, network := range []string{"udp", "tcp"} {
				want = append(want, dnsproxy.Addr{Network: network, Address: net.JoinHostPort(host, port)})
			}
		}
		if got := p.Addrs(); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: listens on %v, want %v", addr, got, want)
		}
		if got := p.count(t, "nametap_dns_listeners"); got != float64(len(want)) {
			t.Errorf("%v listeners are counted", got)
		}
		for _, a := range p.Addrs() {
			if a.Address[0] == '[' && len(families("::1")) == 0 {
				continue
			}
			if got := outcome(exchange(t, a.Network, a.Address, question("web", dns.TypeA))); got != webAddress {
				t.Errorf("%v: %s", a, got)
			}
		}
	}
}

// heldSockets opens sockets over UDP and TCP, as another process does that holds them for the server.
func heldSockets(t *testing.T, host string) (port string, files []*os.File) {
	t.Helper()
	for {
		udp, err := net.ListenPacket("udp", net.JoinHostPort(host, "0"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { udp.Close() })
		_, port, _ = net.SplitHostPort(udp.LocalAddr().String())
		if tcp, err := net.Listen("tcp", net.JoinHostPort(host, port)); err == nil { // the port is free over TCP, too
			t.Cleanup(func() { tcp.Close() })
			return port, []*os.File{file(t, udp), file(t, tcp)}
		}
	}
}

func TestNoListener(t *testing.T) { // R3
	t.Parallel()
	running := start(t, dnsproxy.Config{})
	for _, addr := range []string{"example.com:53", "127.0.0.1", "127.0.0.1:65536", "127.0.0.1:dns", "[::1"} {
		if _, err := dnsproxy.New(dnsproxy.Config{Addr: addr}); err == nil || !strings.Contains(err.Error(), addr) {
			t.Errorf("%s: %v, want an error that names the address", addr, err)
		}
	}
	p := newProxy(t, dnsproxy.Config{Addr: running.addr("udp")})
	if err := p.Run(t.Context()); err == nil || !strings.Contains(err.Error(), running.addr("udp")) {
		t.Errorf("%v, want an error that names the address", err)
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
	err = <-p.ended
	if err == nil || !strings.Contains(err.Error(), "tcp "+addr.String()+" failed") {
		t.Errorf("Run returned %v", err)
	}
}

// Queries in flight at the end are answered.
func TestShutdown(t *testing.T) { // R1
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		holding, _ := held(anywhere("192.0.2.1"), release)
		fake := nameserver(t, holding)
		ctx, cancel := context.WithCancel(t.Context())
		p := startIn(ctx, t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
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
		p.await(t, "nametap_dns_inflight", 2)
		cancel()
		until(t, "the listener is closed", func() bool {
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
	})
}

// A held query is in flight, too.
func TestShutdownWhileHeld(t *testing.T) { // R1, C6
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		p := startIn(ctx, t, dnsproxy.Config{BeforeSync: dnsproxy.BeforeSyncHold})
		packet, err := question("web", dns.TypeA).Pack()
		if err != nil {
			t.Fatal(err)
		}
		conn := p.dial(t, "udp")
		defer conn.Close()
		write(t, conn, packet)
		p.await(t, requestsMetric, 1)
		cancel()
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
		if got := outcome(parse(t, read(t, conn))); got != webAddress {
			t.Errorf("a held query: %s", got)
		}
		if err := <-p.ended; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
}

// Queries wait in the sockets of a service manager while there is no server, and the next
// server answers them.
func TestInheritedSockets(t *testing.T) { // R1
	t.Parallel()
	for _, address := range families("127.0.0.1", "0.0.0.0", "::") {
		for range 2 {
			port, files := heldSockets(t, address)
			answers := make(chan string, 2)
			for _, network := range []string{"udp", "tcp"} {
				go func() {
					answers <- outcome(exchange(t, network, net.JoinHostPort("127.0.0.1", port), question("web", dns.TypeA)))
				}()
			}
			ctx, stop := context.WithCancel(t.Context())
			p := startIn(ctx, t, dnsproxy.Config{Addr: "localhost:" + port, Inherited: inherit(t, true, files...), BeforeSync: dnsproxy.BeforeSyncHold})
			p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
			for range 2 {
				if got := <-answers; got != webAddress {
					t.Error(got)
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

// inherit returns sockets of systemd, or else of the supervisor.
func inherit(t *testing.T, systemd bool, files ...*os.File) *listen.Inherited {
	t.Helper()
	inherited, err := listen.Inherit(files, systemd)
	if err != nil {
		t.Fatal(err)
	}
	return inherited
}
