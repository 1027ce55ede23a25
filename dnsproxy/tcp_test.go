package dnsproxy_test

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy"
)

// slowProxy is a proxy whose nameserver replies when release is closed; web is a mesh name.
func slowProxy(t *testing.T, cfg dnsproxy.Config) (p *proxy, release chan struct{}) {
	t.Helper()
	release = make(chan struct{})
	holding, _ := held(anywhere("192.0.2.1"), release)
	cfg.Forward.Upstreams = servers(nameserver(t, holding))
	return startForwarder(t, cfg), release
}

// framed returns a query with an ID and a TCP length prefix.
func framed(t *testing.T, name string, id uint16) []byte {
	t.Helper()
	req := question(name, dns.TypeA)
	req.Id = id
	packet, err := req.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(packet))), packet...)
}

// A mesh name does not wait for earlier queries on its connection, however many of them
// wait for nameservers; queries beyond the bound are refused at once.
func TestOwnNameBehindSlowQueries(t *testing.T) { // A12
	synctest.Test(t, func(t *testing.T) {
		for _, slow := range []int{101, 2000} {
			p, release := slowProxy(t, dnsproxy.Config{})
			conn := p.dial(t, "tcp")
			var batch []byte
			for id := range slow {
				batch = append(batch, framed(t, "slow.example.", uint16(id))...)
			}
			const own = 65535
			if _, err := conn.Write(append(batch, framed(t, "web.", own)...)); err != nil {
				t.Fatal(err)
			}
			refused := 0
			for {
				got := parse(t, read(t, conn))
				if got.Id == own {
					break
				}
				if got.Rcode != dns.RcodeServerFailure {
					t.Fatalf("behind %d queries: before the mesh name came\n%v", slow, got)
				}
				refused++
			}
			if (refused > 0) != (slow == 2000) {
				t.Errorf("%d of %d queries are refused", refused, slow)
			}
			close(release)
			for range slow - refused {
				if got := parse(t, read(t, conn)); got.Rcode != dns.RcodeSuccess {
					t.Fatalf("a query that waited: %v", got)
				}
			}
			_ = conn.Close()
		}
	})
}

// Before the first table, too, queries beyond the bound are refused at once, and the others wait.
func TestManyQueriesBeforeSync(t *testing.T) { // A12, C6
	synctest.Test(t, func(t *testing.T) {
		p := start(t, dnsproxy.Config{BeforeSync: dnsproxy.BeforeSyncHold})
		conn := p.dial(t, "tcp")
		defer conn.Close()
		const queries = 1500
		var batch []byte
		for id := range queries {
			batch = append(batch, framed(t, "web.", uint16(id))...)
		}
		if _, err := conn.Write(batch); err != nil {
			t.Fatal(err)
		}
		got := map[string]int{}
		got[outcome(parse(t, read(t, conn)))]++ // all are read
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
		for range queries - 1 {
			got[outcome(parse(t, read(t, conn)))]++
		}
		if got["SERVFAIL"] == 0 || got[webAddress] < 900 || got["SERVFAIL"]+got[webAddress] != queries {
			t.Errorf("%v", got)
		}
	})
}

// An answer does not wait for the rest of the next query on the connection.
func TestAnswerBeforePartOfNextQuery(t *testing.T) { // A12
	t.Parallel()
	p := start(t, dnsproxy.Config{})
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	query := framed(t, "web.", 1)
	for _, part := range []int{1, 2, 10} {
		conn := p.dial(t, "tcp")
		if _, err := conn.Write(append(query[:len(query):len(query)], query[:part]...)); err != nil {
			t.Fatal(err)
		}
		read(t, conn)
		if _, err := conn.Write(query[part:]); err != nil {
			t.Fatal(err)
		}
		read(t, conn)
		_ = conn.Close()
	}
}

// closed fails the test unless the server has closed the connection.
func closed(t *testing.T, conn net.Conn) {
	t.Helper()
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection is not closed: %v", err)
	}
}

// All listeners share one bound. A new connection replaces the connection that has been idle the
// longest, and a connection whose query waits for a nameserver only if none is idle.
func TestConnectionLimit(t *testing.T) { // A12
	t.Parallel()
	p, release := slowProxy(t, dnsproxy.Config{Addr: "localhost:0", MaxTCPConns: 3})
	_, port, err := net.SplitHostPort(p.addr("tcp"))
	if err != nil {
		t.Fatal(err)
	}
	other := "127.0.0.1"
	if len(p.Addrs()) > 2 {
		other = "::1"
	}
	connect := func(host string) net.Conn {
		conn := dial(t, "tcp", net.JoinHostPort(host, port))
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	ask := func(conn net.Conn, name string) {
		t.Helper()
		if _, err := conn.Write(framed(t, name, 1)); err != nil {
			t.Fatal(err)
		}
	}
	busy, first, second := connect("127.0.0.1"), connect("127.0.0.1"), connect(other)
	for _, conn := range []net.Conn{busy, first, second} {
		ask(conn, "web.")
		read(t, conn)
	}
	ask(busy, "slow.example.")
	p.await(t, "nametap_dns_inflight", 1)
	ask(busy, "web.") // the answer to which does not mean that the client is awaited
	read(t, busy)
	third := connect(other)
	ask(third, "web.")
	read(t, third)
	closed(t, first)
	ask(second, "web.") // has now been idle for a shorter time than the third
	read(t, second)
	fourth := connect("127.0.0.1")
	ask(fourth, "web.")
	read(t, fourth)
	closed(t, third)

	// When all wait for answers, the connection that has waited the longest makes room.
	ask(second, "slow.example.")
	ask(fourth, "slow.example.")
	p.await(t, "nametap_dns_inflight", 3)
	fifth := connect("127.0.0.1")
	ask(fifth, "web.")
	read(t, fifth)
	closed(t, busy)
	close(release)
	for _, conn := range []net.Conn{second, fourth} {
		read(t, conn)
	}
}

// An error that a client causes, here by closing its port, neither ends a UDP listener nor
// loses an answer to another client.
func TestUDPErrorsPass(t *testing.T) { // R3
	t.Parallel()
	udp, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	raw, err := udp.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	controlErr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVERR, 1) })
	if err := errors.Join(err, controlErr); err != nil {
		t.Fatal(err)
	}
	logger, log := newLog()
	p := start(t, dnsproxy.Config{Addr: udp.LocalAddr().String(), Inherited: inherit(t, true, file(t, udp)), Logger: logger})
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	packet, err := question("web", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	until(t, "the kernel reports a closed port", func() bool {
		gone := p.dial(t, "udp")
		write(t, gone, packet)
		_ = gone.Close()
		p.converse(t, []dialogue{{"web A", webAddress}})
		return p.count(t, "nametap_dns_listener_errors_total") >= 3
	})
	if n := log.Count("reading from a listener failed"); n == 0 {
		t.Errorf("it is not logged:\n%s", log)
	}
}
