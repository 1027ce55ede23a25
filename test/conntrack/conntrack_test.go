// Package conntrack_test tests package conntrack with a kernel, in network namespaces. Without root, the tests are skipped.
package conntrack_test

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) { wait.Main(m) }

// patience is how long a packet may take. The machine may stand still.
const patience = 5 * time.Minute

// natRules capture port 53. zoneRules put the original direction into a zone of its own.
const (
	natRules = `*nat
:X_OUT - [0:0]
-I OUTPUT 1 -p udp -m udp --dport 53 -j X_OUT
-I OUTPUT 1 -p tcp -m tcp --dport 53 -j X_OUT
-A X_OUT -p udp -j REDIRECT --to-ports 15053
-A X_OUT -p tcp -j REDIRECT --to-ports 15053
COMMIT
`
	zoneRules = `*raw
:X_RAW - [0:0]
-I OUTPUT 1 -p udp -m udp --dport 53 -j X_RAW
-I OUTPUT 1 -p tcp -m tcp --dport 53 -j X_RAW
-A X_RAW -j CT --zone-orig 53
COMMIT
`
)

// host is a network namespace with rules that capture port 53 and the sockets of an agent.
type host struct {
	ns      *netns.NS
	udp     net.PacketConn
	tcp     net.Listener
	lookups *conntrack.UDP
}

// newHost makes a host with these rules, whose agent listens on this address.
func newHost(t *testing.T, agent, restore, rules string) *host {
	t.Helper()
	netns.Need(t, "ip", restore)
	h := &host{ns: netns.New(t)}
	netns.Connect(
		netns.End{NS: h.ns, Name: "eth0", Addrs: []string{"10.0.0.1/24", "2001:db8::1/64"}},
		netns.End{NS: netns.New(t), Name: "eth0"},
	)
	h.ns.Pipe(rules, restore)
	var errs [3]error
	h.ns.Run(func() {
		h.udp, errs[0] = net.ListenPacket("udp", agent)
		h.tcp, errs[1] = net.Listen("tcp", agent)
		h.lookups, errs[2] = conntrack.OpenUDP()
	})
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(h.udp.Close(), h.tcp.Close(), h.lookups.Close()); err != nil {
			t.Error(err)
		}
	})
	return h
}

// client opens an unconnected UDP socket on a free port.
func (h *host) client(t *testing.T, network string) net.PacketConn {
	t.Helper()
	var client net.PacketConn
	var err error
	h.ns.Run(func() { client, err = net.ListenPacket(network, ":0") })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	_ = client.SetDeadline(time.Now().Add(patience))
	return client
}

// query sends a packet to server, which the agent receives and replies to. The client gets the
// reply from the address of the server. It returns both ends as the agent sees them.
func (h *host) query(t *testing.T, client net.PacketConn, server string) (from, local netip.AddrPort) {
	t.Helper()
	want := netip.MustParseAddrPort(server)
	if _, err := client.WriteTo([]byte(server), net.UDPAddrFromAddrPort(want)); err != nil {
		t.Fatal(err)
	}
	_ = h.udp.SetDeadline(time.Now().Add(patience))
	buffer := make([]byte, 100)
	n, addr, err := h.udp.ReadFrom(buffer)
	if err != nil || string(buffer[:n]) != server {
		t.Fatalf("the agent read %q, %v; want %q", buffer[:n], err, server)
	}
	if _, err := h.udp.WriteTo(buffer[:n], addr); err != nil {
		t.Fatal(err)
	}
	if _, sender, err := client.ReadFrom(buffer); err != nil || netip.MustParseAddrPort(sender.String()) != want {
		t.Fatalf("the client has a reply from %v, %v; want %s", sender, err, server)
	}
	return netip.MustParseAddrPort(addr.String()), netip.MustParseAddrPort(h.udp.LocalAddr().String())
}

// connect connects to server and returns the result of [conntrack.OriginalTCP] for the
// connection that the agent accepts.
func (h *host) connect(t *testing.T, server string) (netip.AddrPort, bool) {
	t.Helper()
	var client net.Conn
	var err error
	h.ns.Run(func() { client, err = net.DialTimeout("tcp", server, patience) })
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	conn, err := h.tcp.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	original, ok, err := conntrack.OriginalTCP(conn.(*net.TCPConn))
	if err != nil {
		t.Fatal(err)
	}
	return original, ok
}

// family is what differs between IPv4 and IPv6.
type family struct {
	name, restore, agent, network string
	direct                        string    // the address of the agent
	servers                       [2]string // that are captured
}

func families() []family {
	servers4, servers6 := [2]string{"10.0.0.53:53", "10.0.0.54:53"}, [2]string{"[2001:db8::53]:53", "[2001:db8::54]:53"}
	return []family{
		{"IPv4", "iptables", "127.0.0.1:15053", "udp4", "127.0.0.1:15053", servers4},
		{"IPv6", "ip6tables", "[::1]:15053", "udp6", "[::1]:15053", servers6},
	}
}

// F14
func TestCaptured(t *testing.T) {
	t.Parallel()
	for _, f := range families() {
		for _, backend := range []string{"nft", "legacy"} {
			for zone, rules := range map[string]string{"without zone": natRules, "zone-orig": natRules + zoneRules} {
				t.Run(strings.Join([]string{f.name, backend, zone}, " "), func(t *testing.T) {
					t.Parallel()
					testCaptured(t, f, newHost(t, f.agent, f.restore+"-"+backend+"-restore", rules))
				})
			}
		}
	}
}

func testCaptured(t *testing.T, f family, h *host) {
	t.Helper()
	// One source port to both servers: the agent must see two clients.
	client := h.client(t, f.network)
	for range 2 {
		for _, server := range f.servers {
			original, ok, err := h.lookups.Lookup(h.query(t, client, server))
			if original.String() != server || !ok || err != nil {
				t.Errorf("UDP to %s: %v, %v, %v", server, original, ok, err)
			}
		}
	}
	if original, ok, err := h.lookups.Lookup(h.query(t, h.client(t, f.network), f.direct)); ok || err != nil {
		t.Errorf("UDP to %s: %v, %v, %v; want nothing", f.direct, original, ok, err)
	}
	for _, server := range f.servers {
		if original, ok := h.connect(t, server); original.String() != server || !ok {
			t.Errorf("TCP to %s: %v, %v", server, original, ok)
		}
	}
	if original, ok := h.connect(t, f.direct); ok {
		t.Errorf("TCP to %s: %v; want nothing", f.direct, original)
	}
}

// F14: a socket on [::] also has IPv4 clients, with IPv4-mapped addresses.
func TestMapped(t *testing.T) {
	t.Parallel()
	const server = "10.0.0.53:53"
	h := newHost(t, "[::]:15053", "iptables-nft-restore", natRules+zoneRules)
	if original, ok := h.connect(t, server); original.String() != server || !ok {
		t.Errorf("TCP: %v, %v", original, ok)
	}
	h = newHost(t, "127.0.0.1:15053", "iptables-nft-restore", natRules+zoneRules)
	client, local := h.query(t, h.client(t, "udp4"), server)
	mapped := func(a netip.AddrPort) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr().As16()), a.Port())
	}
	if original, ok, err := h.lookups.Lookup(mapped(client), mapped(local)); original.String() != server || !ok || err != nil {
		t.Errorf("UDP: %v, %v, %v", original, ok, err)
	}
	if _, _, err := h.lookups.Lookup(client, netip.MustParseAddrPort("[::1]:15053")); err == nil {
		t.Error("two families: no error")
	}
}

// TestReplyWithoutQuery checks that a query to the agent's own address does not count as captured
// after a reply has made an entry, because the query's entry was dropped. In that entry the original
// destination is the client.
func TestReplyWithoutQuery(t *testing.T) { // F14
	t.Parallel()
	for _, f := range families() {
		h := newHost(t, f.agent, f.restore+"-nft-restore", natRules)
		client := h.client(t, f.network)
		to := netip.AddrPortFrom(netip.MustParseAddrPort(f.agent).Addr(), netip.MustParseAddrPort(client.LocalAddr().String()).Port())
		if _, err := h.udp.WriteTo([]byte("reply"), net.UDPAddrFromAddrPort(to)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := client.ReadFrom(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
		if original, ok, err := h.lookups.Lookup(h.query(t, client, f.direct)); ok || err != nil {
			t.Errorf("%s: %v, %v, %v; want nothing", f.name, original, ok, err)
		}
	}
}

// K8: a kernel that does not reply does not block the caller forever.
func TestNoReply(t *testing.T) {
	t.Parallel()
	var err error
	netns.New(t).Run(func() { err = conntrack.Exchange(func([]byte) {}, conntrack.Request{Type: unix.NLMSG_NOOP}) })
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v, want %v", err, os.ErrDeadlineExceeded)
	}
}
