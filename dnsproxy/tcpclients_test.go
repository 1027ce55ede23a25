package dnsproxy_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// slowProxy is a proxy whose nameserver replies when release is closed; web is a mesh name.
func slowProxy(t *testing.T, cfg dnsproxy.Config) (p *proxy, release chan struct{}) {
	t.Helper()
	release = make(chan struct{})
	up := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
		select {
		case <-release:
		case <-t.Context().Done(): // the test has failed
		}
		return new(dns.Msg).SetReply(query)
	})
	cfg.Forward.Upstreams, cfg.Forward.Timeout = servers(up), wait.Limit
	p = start(t, cfg)
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	return p, release
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
	t.Parallel()
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
}

// Before the first table no query can be refused; queries beyond the bound wait.
func TestManyQueriesBeforeSync(t *testing.T) { // A12, C6
	t.Parallel()
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
	wait.Until(t, "about 1,000 queries wait", func() bool { return p.count(t, "nametap_dns_inflight") > 1000 })
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	for range queries {
		// On a machine that is too slow the queries time out.
		if got := outcome(parse(t, read(t, conn))); got != "web. A 10.0.0.1" && got != "SERVFAIL" {
			t.Fatal(got)
		}
	}
}

// An answer does not wait for the rest of the next query on the connection.
func TestAnswerBeforePartOfNextQuery(t *testing.T) { // A12
	t.Parallel()
	p := start(t, dnsproxy.Config{})
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	query := framed(t, "web.", 1)
	for _, part := range []int{1, 2, 10} {
		conn := p.dial(t, "tcp")
		began := time.Now()
		if _, err := conn.Write(append(query[:len(query):len(query)], query[:part]...)); err != nil {
			t.Fatal(err)
		}
		read(t, conn)
		// This is less than the idle timeout, even on a busy machine.
		if took := time.Since(began); took > 9*time.Second {
			t.Errorf("with %d bytes of the next query: answered after %v", part, took)
		}
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
	dial := func(host string) net.Conn {
		t.Helper()
		_, port, err := net.SplitHostPort(p.addr("tcp"))
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.Dial("tcp", net.JoinHostPort(host, port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if err := conn.SetDeadline(time.Now().Add(wait.Limit)); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	ask := func(conn net.Conn, name string) {
		t.Helper()
		if _, err := conn.Write(framed(t, name, 1)); err != nil {
			t.Fatal(err)
		}
	}
	busy, first, second := dial("127.0.0.1"), dial("127.0.0.1"), dial("::1")
	for _, conn := range []net.Conn{busy, first, second} {
		ask(conn, "web.")
		read(t, conn)
	}
	ask(busy, "slow.example.")
	p.await(t, "nametap_dns_inflight", 1)
	third := dial("::1")
	ask(third, "web.")
	read(t, third)
	closed(t, first)
	ask(second, "web.") // has now been idle for a shorter time than the third
	read(t, second)
	fourth := dial("127.0.0.1")
	ask(fourth, "web.")
	read(t, fourth)
	closed(t, third)

	// When all wait for answers, the connection that has waited the longest makes room.
	ask(second, "slow.example.")
	ask(fourth, "slow.example.")
	p.await(t, "nametap_dns_inflight", 3)
	fifth := dial("127.0.0.1")
	ask(fifth, "web.")
	read(t, fifth)
	closed(t, busy)
	close(release)
	for _, conn := range []net.Conn{second, fourth} {
		read(t, conn)
	}
}

// TestUnreadAnswers opens connections whose clients ask for more than the kernel takes and read nothing. While that
// is little, all get their answers when they read; if it is too much, connections are closed. The next client
// is answered in either case.
func TestUnreadAnswers(t *testing.T) { // A12
	t.Parallel()
	// Of each, the agent holds an answer of 48 kB or more, and 350 of these are more than 16 MiB.
	const few, many, enough = 20, 600, 350
	for name, relayed := range map[string]bool{"from the table": false, "relayed": true} {
		t.Run(name, func(t *testing.T) {
			fake := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
				reply := new(dns.Msg).SetReply(query)
				for _, addr := range addrs(1, 3000) {
					reply.Answer = append(reply.Answer, &dns.A{
						Hdr: dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.ParseIP(addr),
					})
				}
				reply.Compress = true
				return reply
			})
			p := start(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
			p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", addrs(1, 3000)...), "small.example.com": external("192.0.2.1")})
			query := framed(t, map[bool]string{false: "web.", true: "www.example.net."}[relayed], 1)
			if relayed {
				query[2+2] &^= 1 // RD: it is not cached
			}
			for _, clients := range []int{few, many, few} { // what the many held is free again
				got := p.unread(t, bytes.Repeat(query, answers), clients)
				t.Logf("%d of %d clients get their answers", got, clients)
				if got < few || got > enough {
					t.Errorf("%d of %d clients get their answers", got, clients)
				}
			}
		})
	}
}

// unread sends queries over a number of connections, and reads the answers, of which there are several for each
// connection, only when most clients have left some unread. It returns how many clients get all of theirs.
func (p *proxy) unread(t *testing.T, queries []byte, clients int) (whole int) {
	t.Helper()
	before := p.count(t, requestsMetric)
	var conns []net.Conn
	for range clients {
		conn := p.dial(t, "tcp")
		defer conn.Close()
		if _, err := conn.Write(queries); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	wait.Until(t, "most clients leave answers unread", func() bool {
		return p.count(t, requestsMetric)-before >= float64(clients*3/2) && p.count(t, "nametap_dns_inflight") == 0
	})
	if got := outcome(p.exchange(t, "tcp", question("small.example.com", dns.TypeA))); got != "small.example.com. A 192.0.2.1" {
		t.Errorf("the next client gets %s", got)
	}
	for _, conn := range conns {
		n, err := 0, error(nil)
		for err == nil && n < answers {
			if _, err = (&dns.Conn{Conn: conn}).Read(make([]byte, dns.MaxMsgSize)); err == nil {
				n++
			}
		}
		if n == answers {
			whole++
		}
	}
	return whole
}

// answers is the number of queries that each client of TestUnreadAnswers sends.
const answers = 8

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
	p := start(t, dnsproxy.Config{Addr: udp.LocalAddr().String(), Sockets: []*os.File{file(t, udp)}, Logger: logger})
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	packet, err := question("web", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the kernel reports a closed port", func() bool {
		gone := p.dial(t, "udp")
		write(t, gone, packet)
		_ = gone.Close()
		p.converse(t, []dialogue{{"web A", "web. A 10.0.0.1"}})
		return p.count(t, "nametap_dns_listener_errors_total") >= 3
	})
	if n := log.Count("reading from a listener failed"); n == 0 {
		t.Errorf("it is not logged:\n%s", log)
	}
}
