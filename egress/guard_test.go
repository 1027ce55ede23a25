package egress

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A guardedServer is a server with a policy, and a host to which all names lead.
type guardedServer struct {
	*Server

	guard *guard.Guard
	host  *net.TCPListener // at an address of loopback, which the server may dial
	mu    sync.Mutex
	addrs map[string][]string // of names; the last addresses stay
}

// guards returns a server with guardPolicy.
func guards(t *testing.T) *guardedServer {
	t.Helper()
	g := &guardedServer{Server: bare(t, 100), guard: guard.New("key"), addrs: map[string][]string{}}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	g.host = listener.(*net.TCPListener)
	g.use(t, guardPolicy)
	g.config.Guard, g.config.Resolve, g.log = g.guard, g.resolve, slog.New(slog.DiscardHandler)
	f := newFence(&g.config)
	delete(f.ranges, netip.MustParsePrefix("127.0.0.0/8")) // where the host is
	g.dialer = &dialer{&g.config, f, &g.running}
	return g
}

// use makes a policy the one in use; PORT stands for the port of the host.
func (g *guardedServer) use(t *testing.T, text string) {
	t.Helper()
	_, port, _ := net.SplitHostPort(g.host.Addr().String())
	p, err := guard.Parse("policy.yaml", []byte(strings.ReplaceAll(text, "PORT", port)))
	if err != nil {
		t.Fatal(err)
	}
	g.guard.Use(p)
}

// resolve returns the addresses of a name: 127.0.0.1 for names without others. Each lookup takes the next ones.
func (g *guardedServer) resolve(_ context.Context, name string, f family.Family, _ bool) (addrs []netip.Addr, known bool, err error) {
	if f == family.IPv6 {
		return nil, true, errors.New("no records")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	texts := g.addrs[name]
	if len(texts) == 0 {
		return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, true, nil
	}
	if len(texts) > 1 {
		g.addrs[name] = texts[1:]
	}
	return []netip.Addr{netip.MustParseAddr(texts[0])}, true, nil
}

func (g *guardedServer) vip(t *testing.T, name string) netip.Addr {
	t.Helper()
	n, err := wire.ParseHostname(name)
	if err != nil {
		t.Fatal(err)
	}
	return g.guard.VIPs(n).V4
}

// A client is a client of a guarded server.
type client struct {
	*net.TCPConn

	ended chan struct{}
	err   error // why the connection was refused
}

// connects connects a client to a VIP and a port; 0 is the port of the host.
func (g *guardedServer) connects(t *testing.T, vip netip.Addr, port uint16) *client {
	t.Helper()
	if port == 0 {
		port = g.host.Addr().(*net.TCPAddr).AddrPort().Port()
	}
	peer, accepted := connected(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	c := &conn{Conn: accepted, client: accepted, cancel: cancel}
	c.place = g.limit.Enter(c)
	to := &client{TCPConn: peer, ended: make(chan struct{})}
	go func() {
		defer close(to.ended)
		if to.err = g.carryTo(ctx, c, netip.AddrPortFrom(vip, port)); to.err != nil {
			g.reject(accepted, to.err)
		}
		c.place.Leave()
	}()
	t.Cleanup(func() {
		c.abort(nil)
		<-to.ended
	})
	return to
}

// accept returns the next connection that the host gets.
func (g *guardedServer) accept(t *testing.T) *net.TCPConn {
	t.Helper()
	conn, err := g.host.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// wantRefused waits until the connection is refused for a reason. The text must be in the error.
func (c *client) wantRefused(t *testing.T, reason Reason, text string) {
	t.Helper()
	wait.For(t, "the connection is refused", c.ended)
	if r, ok := errors.AsType[*refusal](c.err); !ok || r.reason != reason || !strings.Contains(c.err.Error(), text) {
		t.Errorf("%v, want %s: %s", c.err, reason, text)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("the client sees %v, want a reset", err)
	}
}

const guardPolicy = `
allow:
- names: [api.example.com, other.example.com]
  ports: [PORT, 8443]
- names: ["*.pkg.example.net"]
  ports: [PORT]
- names: [text.example.com]
  types: [TXT]
deny:
- names: [bad.pkg.example.net]
`

// tlsTo returns a ClientHello for a name.
func tlsTo(t *testing.T, name string) string {
	t.Helper()
	return string(clientHello(t, &tls.Config{ServerName: name}))
}

// G6, G8: what a client may send first to a name of the guard reaches the host as it was sent, in any segments.
func TestGuardCarries(t *testing.T) {
	t.Parallel()
	g := guards(t)
	for name, first := range map[string]string{
		"TLS":             tlsTo(t, "api.example.com"),
		"TLS, upper case": tlsTo(t, "API.example.com"),
		"TLS, no name":    tlsTo(t, ""),
		"a warning first": "\x15\x03\x01\x00\x02\x01\x5a" + tlsTo(t, "api.example.com"),
		"HTTP":            "GET / HTTP/1.1\r\nHost: api.example.com:8443\r\n\r\nbody",
		"HTTP/1.0":        "GET / HTTP/1.0\r\n\r\n",
		"HTTP/0.9":        "GET /\r\n",
		"SSH":             "SSH-2.0-OpenSSH_9.2p1\r\n",
		"SMTP":            "EHLO there\r\n",
		"XMPP":            "<?xml version='1.0'?><stream:stream to='other.example.com'",
		"JSON":            `{"method": "GET"`,
		"bytes":           "\x00\x00\x00\x08\x04\xd2\x16\x2f",
		"nothing":         "",
		"a line":          "no newline",
	} {
		for _, size := range []int{1, 1 << 20} {
			c := g.connects(t, g.vip(t, "api.example.com"), 0)
			host := g.accept(t)
			for rest := []byte(first); len(rest) > 0; rest = rest[min(size, len(rest)):] {
				if _, err := c.Write(rest[:min(size, len(rest))]); err != nil {
					t.Fatal(name, err)
				}
			}
			if err := c.CloseWrite(); err != nil {
				t.Fatal(name, err)
			}
			if got, err := io.ReadAll(host); err != nil || string(got) != first {
				t.Errorf("%s in segments of %d bytes: %q, %v", name, size, got, err)
			}
			host.Close()
			if wait.For(t, "the connection ends", c.ended); c.err != nil {
				t.Errorf("%s: %v", name, c.err)
			}
		}
	}
	if _, counts := g.guard.Counts(); counts != (guard.Counts{Allowed: 28, Denied: 0}) {
		t.Errorf("%v", counts)
	}
}

// G8: the host may speak first.
func TestGuardHostSpeaksFirst(t *testing.T) {
	t.Parallel()
	g := guards(t)
	c := g.connects(t, g.vip(t, "api.example.com"), 0)
	host := g.accept(t)
	for _, line := range []string{"0\x0c\x02\x01\x01`\x07\x02\x01\x03\x04\x00\x80\x00", "SSH-2.0-two\r\n"} { // LDAP has no lines
		from, to := net.Conn(host), net.Conn(c)
		for range 2 {
			got := make([]byte, len(line))
			if _, err := from.Write([]byte(line)); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(to, got); err != nil || string(got) != line {
				t.Fatal(string(got), err)
			}
			from, to = to, from
		}
	}
	reset(host)
	if !isReset(c) {
		t.Error("the reset of the host does not reach the client")
	}
}

// G8: a client that says another name is refused, and nothing of it reaches the host.
func TestGuardOtherName(t *testing.T) {
	t.Parallel()
	g := guards(t)
	long := clientHello(t, &tls.Config{ServerName: "api.example.com"})
	long = append(bytes.Clone(long[:5]), append([]byte{1, 1, 0x86, 0xa0}, make([]byte, 100_000)...)...) // of 100,000 bytes
	for name, test := range map[string]struct {
		first  string
		reason Reason
		text   string
	}{
		"SNI":              {tlsTo(t, "other.example.com"), ReasonOtherName, `the client said "other.example.com"`},
		"SNI, one byte":    {string(resplit([]byte(tlsTo(t, "other.example.com")), 1)), ReasonOtherName, "other.example.com"},
		"a warning first":  {"\x15\x03\x01\x00\x02\x01\x5a" + tlsTo(t, "other.example.com"), ReasonOtherName, "other.example.com"},
		"data first":       {"\x17\x03\x03\x00\x01\x00" + tlsTo(t, "other.example.com"), ReasonProtocol, "needs TLS"},
		"a cipher first":   {"\x14\x03\x03\x00\x01\x01" + tlsTo(t, "other.example.com"), ReasonProtocol, "needs TLS"},
		"Host":             {"GET / HTTP/1.1\r\nHost: other.example.com\r\n\r\n", ReasonOtherName, "other.example.com"},
		"another method":   {"get / http/1.1\r\nHost: other.example.com\r\n\r\n", ReasonProtocol, "malformed HTTP version"},
		"lower case":       {"get / HTTP/1.1\r\nHost: other.example.com\r\n\r\n", ReasonOtherName, "other.example.com"},
		"bytes in the URL": {"GET /\xff\x00\x01 HTTP/1.1\r\nHost: other.example.com\r\n\r\n", ReasonOtherName, "other.example.com"},
		"an empty line":    {"\r\n\r\nGET / HTTP/1.1\r\nHost: other.example.com\r\n\r\n", ReasonProtocol, "malformed HTTP"},
		"tabs":             {"\tGET\t/\tHTTP/1.1\r\nHost: other.example.com\r\n\r\n", ReasonProtocol, "malformed HTTP"},
		"bare CR":          {"GET / HTTP/1.1\rHost: other.example.com\r\r\n", ReasonProtocol, "malformed HTTP"},
		"two hosts":        {"GET / HTTP/1.1\r\nHost: api.example.com\r\nHost: other.example.com\r\n\r\n", ReasonProtocol, "too many Host"},
		"the target":       {"GET http://other.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n", ReasonProtocol, "its target is at other.example.com"},
		"not the target":   {"GET http://api.example.com/ HTTP/1.1\r\nHost: other.example.com\r\n\r\n", ReasonProtocol, "its Host field says other.example.com"},
		"both":             {"GET http://other.example.com/ HTTP/1.1\r\nHost: other.example.com\r\n\r\n", ReasonOtherName, "other.example.com"},
		"CONNECT":          {"CONNECT other.example.com:443 HTTP/1.1\r\n\r\n", ReasonOtherName, "other.example.com"},
		"HTTP/2":           {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ReasonProtocol, "HTTP/2 without TLS"},
		"100 KB":           {string(long), ReasonProtocol, "exceeds maximum"},
		"a long line":      {"GET /" + strings.Repeat("a", 100_000), ReasonProtocol, "no name within"},
		"not a hello":      {"\x16\x03\x01\x00\x04\x00\x00\x00\x00", ReasonProtocol, "unexpected handshake"},
	} {
		c := g.connects(t, g.vip(t, "api.example.com"), 0)
		host := g.accept(t)
		_, _ = c.Write([]byte(test.first)) // it may be reset meanwhile
		if got, err := io.ReadAll(host); len(got) > 0 || err == nil {
			t.Errorf("%s: the host gets %q, %v", name, got, err)
		}
		c.wantRefused(t, test.reason, test.text)
	}
	c := g.connects(t, g.vip(t, "api.example.com"), 0)
	host := g.accept(t)
	if _, err := c.Write([]byte(tlsTo(t, "api.example.com")[:40])); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(host); len(got) > 0 || err == nil {
		t.Errorf("of a part of a hello, the host gets %q, %v", got, err)
	}
	c.wantRefused(t, ReasonClosed, "ended its data after 40 bytes")
}

// G6: names and ports that the policy does not allow are refused, and nothing is dialled. A change of the policy counts for
// new connections; open ones keep their way (G12).
func TestGuardRefuses(t *testing.T) {
	t.Parallel()
	g := guards(t)
	api, pkg, bad := g.vip(t, "api.example.com"), g.vip(t, "x.pkg.example.net"), g.vip(t, "bad.pkg.example.net")
	open := g.connects(t, api, 0)
	host := g.accept(t)
	g.connects(t, api, 22).wantRefused(t, ReasonPort, "api.example.com port 22: guard: policy.yaml:3 allows only the ports 8443, ")
	g.connects(t, bad, 0).wantRefused(t, ReasonDenied, "guard: denied by policy.yaml:10")
	g.connects(t, g.vip(t, "text.example.com"), 0).wantRefused(t, ReasonPort, "allows only the ports 443")
	g.use(t, "deny:\n- names: [api.example.com]")
	gone := g.connects(t, api, 0)
	if _, err := gone.Write([]byte(tlsTo(t, "api.example.com"))); err != nil {
		t.Fatal(err)
	}
	gone.wantRefused(t, ReasonDenied, "guard: denied by policy.yaml:2")
	g.connects(t, pkg, 0).wantRefused(t, ReasonDenied, "guard: no rule of policy.yaml allows it")
	if _, err := open.Write([]byte("hello\n")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 6)
	if _, err := io.ReadFull(host, got); err != nil || string(got) != "hello\n" {
		t.Errorf("an open connection: %q, %v", got, err)
	}
	if _, counts := g.guard.Counts(); counts != (guard.Counts{Allowed: 1, Denied: 5}) {
		t.Errorf("%v", counts)
	}
}

// G6: an allowed name does not lead to forbidden addresses, nor to private ones unless the policy says so. The address that
// was checked is the one that is dialled.
func TestGuardAddresses(t *testing.T) {
	t.Parallel()
	g := guards(t)
	api := g.vip(t, "api.example.com")
	for _, addr := range []string{
		"169.254.169.254", "100.100.100.200", "10.0.0.1", "172.31.0.1", "192.168.1.1", "100.64.0.1", "240.64.0.1", "240.240.0.1", "0.0.0.0",
		"fd12::1", "fe80::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2001:2:0:6775::1", "fd00:ec2::254",
	} {
		g.addrs["api.example.com"] = []string{addr}
		g.connects(t, api, 0).wantRefused(t, ReasonAddress, "api.example.com has only addresses that are refused")
	}
	g.addrs["api.example.com"] = []string{"127.0.0.1", "169.254.169.254"} // a second lookup has another address
	g.connects(t, api, 0)
	g.accept(t)
	g.connects(t, api, 0).wantRefused(t, ReasonAddress, "169.254.169.254 is link-local")
	g.use(t, guardPolicy+"private: allow\n")
	g.addrs["api.example.com"] = []string{"127.0.0.1"}
	if r, _, err := routeGuarded(netip.AddrPortFrom(api, 8443), g.guard, g.guard.Policy()); err != nil || r.reach() != normally {
		t.Errorf("%v: private addresses are refused", err)
	}
}

// G7: a VIP that is not known any more leads to the name that the client says, if it is one of its own and allowed.
func TestGuardAfterRestart(t *testing.T) {
	t.Parallel()
	before := guards(t)
	one, two, bad := before.vip(t, "one.pkg.example.net"), before.vip(t, "two.pkg.example.net"), before.vip(t, "bad.pkg.example.net")
	g := guards(t)
	for first, want := range map[string]string{
		tlsTo(t, "one.pkg.example.net"):                               "",
		"GET / HTTP/1.1\r\nHost: one.pkg.example.net\r\n\r\n":         "",
		tlsTo(t, "two.pkg.example.net"):                               "other_name",
		tlsTo(t, "api.example.com"):                                   "other_name",
		tlsTo(t, ""):                                                  "no_name",
		"SSH-2.0-OpenSSH_9.2p1\r\n":                                   "protocol",
		"GET / HTTP/1.1\r\nHost: attacker.test\r\nX: one.pkg\r\n\r\n": "other_name",
	} {
		c := g.connects(t, one, 0)
		if _, err := c.Write([]byte(first)); err != nil {
			t.Fatal(err)
		}
		if want != "" {
			c.wantRefused(t, Reason(want), one.String())
			continue
		}
		got := make([]byte, len(first))
		if _, err := io.ReadFull(g.accept(t), got); err != nil || string(got) != first {
			t.Errorf("%q, %v", got, err)
		}
	}
	for vip, text := range map[netip.Addr]string{two: "two.pkg.example.net", bad: "bad.pkg.example.net"} {
		c := g.connects(t, vip, 8443)
		if _, err := fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", text); err != nil {
			t.Fatal(err)
		}
		if vip == bad {
			c.wantRefused(t, ReasonDenied, "guard: denied by")
		} else {
			c.wantRefused(t, ReasonPort, "port 8443: guard: policy.yaml:5 allows only the ports")
		}
	}
}

// G11, G13: in audit nothing is refused: connections to addresses are made there, also to forbidden ones, and recorded for
// the name that the client says, or else for the name that had the address, or for the address.
func TestGuardAudits(t *testing.T) {
	t.Parallel()
	g := guards(t)
	vip := g.vip(t, "bad.pkg.example.net")
	g.use(t, "mode: audit\n"+guardPolicy)
	n, err := wire.ParseHostname("answered.example.com")
	if err != nil {
		t.Fatal(err)
	}
	loopback := netip.MustParseAddr("127.0.0.1")
	port := g.host.Addr().(*net.TCPAddr).Port
	exchange := func(vip netip.Addr, first string) {
		t.Helper()
		c := g.connects(t, vip, 0)
		if _, err := c.Write([]byte(first)); err != nil {
			t.Fatal(err)
		}
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		host := g.accept(t)
		if got, err := io.ReadAll(host); err != nil || string(got) != first {
			t.Errorf("%q, %v, want %q", got, err, first)
		}
		host.Close()
		wait.For(t, "the connection ends", c.ended)
	}
	exchange(loopback, "SSH-2.0-client\r\n")
	g.guard.Answered(n, loopback)
	exchange(loopback, "SSH-2.0-client\r\n")
	exchange(loopback, tlsTo(t, "api.example.com"))
	exchange(loopback, "GET / HTTP/1.1\r\nHost: said.example.com\r\n\r\n")
	exchange(loopback, "\x16\x03\x01\x00\x04\x00\x00\x00\x00") // a hello that is malformed
	exchange(vip, tlsTo(t, "other.example.com"))
	var got []string
	for _, r := range g.guard.Records().Names {
		got = append(got, fmt.Sprint(r.Name, " ", r.Verdict, " ", r.Rule, " ", r.Ports))
	}
	ports := fmt.Sprintf("[%d]", port)
	if want := strings.Join([]string{
		"127.0.0.1 denied  " + ports, "answered.example.com denied  " + ports, "api.example.com allowed policy.yaml:4 " + ports,
		"bad.pkg.example.net denied policy.yaml:11 " + ports, "said.example.com denied  " + ports,
	}, "\n"); strings.Join(got, "\n") != want {
		t.Errorf("%s\nwant\n%s", strings.Join(got, "\n"), want)
	}
	if _, counts := g.guard.Counts(); counts != (guard.Counts{Allowed: 1, Denied: 5}) {
		t.Errorf("%v", counts)
	}
	g.use(t, guardPolicy)
	if _, found, _ := routeGuarded(netip.AddrPortFrom(loopback, 1), g.guard, g.guard.Policy()); found {
		t.Error("in enforce, a connection to an address is carried")
	}
}
