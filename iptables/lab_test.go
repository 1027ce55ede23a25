package iptables_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/iptables"
)

// lab is a machine (the namespace that the test is in) with an interface eth0,
// behind which two nameservers are.
type lab struct {
	t       *testing.T
	backend iptables.Backend
	family  iptables.Family
	servers *peer
	log     *logBuffer
}

func newLab(t *testing.T, backend iptables.Backend, family iptables.Family) *lab {
	t.Helper()
	l := &lab{t: t, backend: backend, family: family, log: new(logBuffer)}
	l.servers = startPeer(t, unix.CLONE_NEWNET)
	sh(t, `ip link set lo up
ip link add eth0 type veth peer name eth1
ip link set eth1 netns %d
ip addr add 10.77.0.1/24 dev eth0
ip addr add fd77::1/64 dev eth0 nodad
ip link set eth0 up`, l.servers.cmd.Process.Pid)
	l.servers.do("sh ip link set lo up; ip addr add 10.77.0.2/24 dev eth1; ip addr add 10.77.0.3/24 dev eth1; " +
		"ip addr add fd77::2/64 dev eth1 nodad; ip addr add fd77::3/64 dev eth1 nodad; ip link set eth1 up; " +
		"ip route add 10.78.0.0/24 via 10.77.0.1; ip route add fd78::/64 via fd77::1")
	l.servers.do("serve U - - 10.77.0.2:53 10.77.0.3:53 [fd77::2]:53 [fd77::3]:53")
	return l
}

// local returns an address of loopback, and of eth0.
func (l *lab) local(port int) string { return l.pick("127.0.0.1", "[::1]") + fmt.Sprintf(":%d", port) }
func (l *lab) eth0(port int) string {
	return l.pick("10.77.0.1", "[fd77::1]") + fmt.Sprintf(":%d", port)
}

func (l *lab) pick(v4, v6 string) string {
	if l.family == iptables.IPv4 {
		return v4
	}
	return v6
}

// server returns the nameserver of a digit.
func (l *lab) server(digit byte) string { return nameserver(l.family == iptables.IPv4, digit) }

// agent starts an agent, as uid and gid 1337.
func (l *lab) agent() *peer { return l.agentAs("1337 1337", "same", "-", 15053) }

func (l *lab) agentAs(uidAndGID, upstream, local string, port int) *peer {
	l.t.Helper()
	a := startPeer(l.t, 0)
	a.do("user %s", uidAndGID)
	a.do("serve A %s %s 127.0.0.1:%d [::1]:%d", upstream, local, port, port)
	return a
}

// config is the default with the lab's backend, after any changes.
func (l *lab) config(changes ...func(*iptables.Config)) iptables.Config {
	cfg := iptables.DefaultConfig()
	cfg.Backend = l.backend
	cfg.Settle = 100 * time.Millisecond // queries of tests take less
	for _, change := range changes {
		change(&cfg)
	}
	return cfg
}

// capture applies a configuration.
func (l *lab) capture(changes ...func(*iptables.Config)) *iptables.Capture {
	l.t.Helper()
	c := newCapture(l.t, l.config(changes...), l.log)
	apply(l.t, c)
	return c
}

// newCapture makes a Capture, but never for the machine's own namespace.
func newCapture(t *testing.T, cfg iptables.Config, log *logBuffer) *iptables.Capture {
	t.Helper()
	if !isolated(t) {
		t.Fatal("not in a namespace that the test made")
	}
	c, err := iptables.New(cfg, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func apply(t *testing.T, c *iptables.Capture) {
	t.Helper()
	if err := c.Apply(t.Context()); err != nil {
		t.Fatalf("apply: %v", err)
	}
}

func remove(t *testing.T, c *iptables.Capture) {
	t.Helper()
	if err := c.Remove(context.WithoutCancel(t.Context())); err != nil {
		t.Fatalf("remove: %v", err)
	}
}

// want asks nameserver 2 over UDP and TCP, from new sockets, and compares the
// way that the reply tells.
func (l *lab) want(way string) {
	l.t.Helper()
	l.wantFrom(l.server('2'), way)
}

func (l *lab) wantFrom(server, way string) {
	l.t.Helper()
	for _, network := range []string{"udp", "tcp"} {
		reply, err := ask(network, "-", server, "2q")
		if err != nil || reply != "2q"+way {
			l.t.Errorf("%s to %s: reply %q, %v, want %q", network, server, reply, err, "2q"+way)
		}
	}
}

// socket opens a UDP socket to nameserver 2, to be asked on more than once.
func (l *lab) socket() net.Conn {
	l.t.Helper()
	conn, err := open("udp", "-", l.server('2'))
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// wantOn asks on a socket.
func (l *lab) wantOn(conn net.Conn, way string) {
	l.t.Helper()
	if reply, err := askOn(conn, "2s"); err != nil || reply != "2s"+way {
		l.t.Errorf("reply %q, %v, want %q", reply, err, "2s"+way)
	}
}

// logBuffer is a log to look at.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// count counts lines that hold a text.
func (l *logBuffer) count(text string) int {
	n := 0
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}
