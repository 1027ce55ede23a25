package iptables_test

import (
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// K8, K10: a TCP connection takes the path of the current rules, even if an earlier connection
// from the same port took another one.
func TestTCPPortReused(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]func(l *lab){
		"reset":    (*lab).resetByServer,
		"no reply": (*lab).withoutReply,
	} {
		t.Run(name, func(t *testing.T) {
			labs(t, diagonal(), func(l *lab) {
				netns.Need(l.t, "conntrack")
				l.agent()
				l.addForeign(l.backend) // without any rules there are no entries
				c := l.capture()
				for range 2 {
					before(l)
					apply(l.t, c)
					l.wantTCP("AU")
					l.flush()
				}
				apply(l.t, c)
				before(l)
				remove(l.t, c)
				l.wantTCP("U")
			})
		})
	}
}

// K10: a connection from before a repair that is reset after it.
func TestTCPResetAfterRepair(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		netns.Need(l.t, "conntrack")
		l.agent()
		l.addForeign(l.backend)
		l.sh("sysctl -qw net.netfilter.nf_conntrack_tcp_timeout_close=600") // longer than the test
		conn := l.tcpFrom(reusedPort)
		if reply, err := askOn(conn, "2o"); err != nil || reply != "2oU" {
			l.t.Fatalf("reply %q, %v", reply, err)
		}
		l.keep(l.apply(quick))
		l.resetConn(conn) // through the rules: the connection stays with its nameserver
		wait.Until(l.t, "the entry is dropped", func() bool { return l.tcpEntries() == "" })
		l.wantTCP("AU")
	})
}

// K8, K10: a TCP connection that the kernel begins to track in the middle, and that has ended
// unseen, does not give its path to the next one from the same port.
func TestTCPPickedUp(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		netns.Need(l.t, "conntrack")
		l.agent()
		c := l.apply()
		conn := l.tcpFrom(reusedPort)
		remove(l.t, c)
		// `nft flush ruleset` ends the translation of addresses, and drops such entries.
		l.sh("conntrack -D -f %s -p tcp --sport %d", strings.ToLower(l.family.String()), reusedPort)
		l.addForeign(l.backend)
		l.losePackets("-A")
		if _, err := io.WriteString(conn, "2o\n"); err != nil {
			l.t.Fatal(err)
		}
		wait.Until(l.t, "the connection is tracked", func() bool {
			got := l.tcpEntries()
			return strings.Contains(got, "ESTABLISHED") && strings.Contains(got, "[UNREPLIED]")
		})
		l.forget(conn)
		l.losePackets("-D")
		apply(l.t, c)
		l.wantTCP("AU")
		remove(l.t, c)
		l.wantTCP("U")
	})
}

// forget closes a connection without a packet to its peer, as a machine that crashes.
func (l *lab) forget(conn net.Conn) {
	l.t.Helper()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		l.t.Fatal(err)
	}
	var set error
	if err := raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_REPAIR, 1) }); err != nil || set != nil {
		l.t.Fatal(err, set)
	}
	if err := conn.Close(); err != nil {
		l.t.Fatal(err)
	}
}

// K8: connections that are open when rules are installed or removed go on, including
// half-closed ones.
func TestTCPConnectionGoesOn(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		l.agent()
		l.addForeign(l.backend)
		conns := []net.Conn{l.tcpFrom(reusedPort)}
		ways := []string{"U"}
		check := func() {
			l.t.Helper()
			for i, conn := range conns {
				if reply, err := askOn(conn, "2o"); err != nil || reply != "2o"+ways[i] {
					l.t.Errorf("connection %d: reply %q, %v, want %q", i, reply, err, "2o"+ways[i])
				}
			}
		}
		check()
		c := l.apply()
		conns, ways = append(conns, l.tcpFrom(reusedPort+1)), append(ways, "AU")
		check()
		l.flush()
		apply(l.t, c)
		check()
		remove(l.t, c)
		check()
		half := conns[1].(*net.TCPConn)
		if err := half.SetDeadline(time.Now().Add(patience)); err != nil {
			l.t.Fatal(err)
		}
		if _, err := io.WriteString(half, "2half\n"); err != nil {
			l.t.Fatal(err)
		}
		if err := half.CloseWrite(); err != nil {
			l.t.Fatal(err)
		}
		l.flush()
		apply(l.t, c)
		if got, err := io.ReadAll(half); err != nil || string(got) != "2halfAU\n" {
			l.t.Errorf("%q, %v", got, err)
		}
	})
}

// reusedPort is the port that connections are made from.
const reusedPort = 5454

// tcpFrom connects to nameserver 2 from a port.
func (l *lab) tcpFrom(port int) net.Conn {
	l.t.Helper()
	conn, err := l.dialFrom(port, patience)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// dialFrom tries to connect to nameserver 2 from a port, once the port is free: a process that is just being forked
// holds the socket of a connection that was closed, until it runs another program.
func (l *lab) dialFrom(port int, limit time.Duration) (conn net.Conn, err error) {
	l.t.Helper()
	wait.Until(l.t, "the port is free", func() bool {
		conn, err = openWithin(limit, "tcp", l.eth0(port), l.server('2'))
		return !errors.Is(err, syscall.EADDRINUSE)
	})
	return conn, err
}

// wantTCP queries nameserver 2 over TCP from reusedPort. The client resets the connection, so
// that the port is free at once.
func (l *lab) wantTCP(way string) {
	l.t.Helper()
	conn := l.tcpFrom(reusedPort)
	reply, err := askOn(conn, "2q")
	if err != nil || reply != "2q"+way {
		l.t.Errorf("reply %q, %v, want %q", reply, err, "2q"+way)
	}
	if err := errors.Join(conn.(*net.TCPConn).SetLinger(0), conn.Close()); err != nil {
		l.t.Error(err)
	}
}

// resetByServer makes a connection from the port, which the server resets.
func (l *lab) resetByServer() {
	l.t.Helper()
	l.resetConn(l.tcpFrom(reusedPort))
	if got := l.tcpEntries(); !strings.Contains(got, "CLOSE ") {
		l.t.Fatalf("conntrack has\n%s", got)
	}
}

// resetConn lets the server reset a connection.
func (l *lab) resetConn(conn net.Conn) {
	l.t.Helper()
	if _, err := askOn(conn, "2reset"); err != nil {
		l.t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		l.t.Fatalf("%d bytes, %v, want a reset", n, err)
	}
	_ = conn.Close()
}

// withoutReply makes a connection attempt from the port, whose SYN has no reply.
func (l *lab) withoutReply() {
	l.t.Helper()
	l.losePackets("-A")
	conn, err := l.dialFrom(reusedPort, 200*time.Millisecond)
	if err == nil {
		_ = conn.Close()
		l.t.Fatal("the server replied")
	}
	l.losePackets("-D")
	if got := l.tcpEntries(); !strings.Contains(got, "SYN_SENT") {
		l.t.Fatalf("conntrack has\n%s", got)
	}
}

// losePackets adds ("-A") or deletes ("-D") rules that lose what TCP clients send, before nametap's
// rules accept it.
func (l *lab) losePackets(action string) {
	l.t.Helper()
	for _, ns := range []*netns.NS{l.ns, l.servers} {
		ns.Exec(l.tool(""), "-w", "5", "-t", "mangle", action, "INPUT",
			"-p", "tcp", "-m", "multiport", "--dports", "53,15053", "-j", "DROP")
	}
}

// tcpEntries lists conntrack's entries of TCP from the port.
func (l *lab) tcpEntries() string {
	l.t.Helper()
	return l.sh("conntrack -L -f %s -p tcp --sport %d 2>/dev/null", strings.ToLower(l.family.String()), reusedPort)
}

// flush removes the jumps to the redirects, as other programs do. The other rules of the table
// remain: without any, the kernel would not translate addresses of open connections.
func (l *lab) flush() {
	l.t.Helper()
	l.sh("%s -w 5 -t nat -F OUTPUT", l.tool(""))
}
