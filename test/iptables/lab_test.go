package iptables_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// lab is a machine: the network namespace of the test. It may have an interface eth0 with
// two nameservers behind it.
type lab struct {
	t           *testing.T
	ns          *netns.NS
	servers     *netns.NS // of the nameservers
	nameservers *peer
	dir         string           // scripts in place of tools
	backend     iptables.Backend // "" for both
	family      family.Family
	log         *testlog.Buffer
}

// kind is a backend and a family of a lab.
type kind struct {
	backend iptables.Backend
	family  family.Family
}

// all has every pair.
func all() []kind {
	return append(diagonal(), kind{iptables.NFT, family.IPv6}, kind{iptables.Legacy, family.IPv4})
}

// diagonal has each backend and each family once.
func diagonal() []kind {
	return []kind{{iptables.NFT, family.IPv4}, {iptables.Legacy, family.IPv6}}
}

// labs runs a test in labs with nameservers.
func labs(t *testing.T, kinds []kind, test func(l *lab)) {
	t.Helper()
	for _, k := range kinds {
		t.Run(fmt.Sprintf("%s/%s", k.backend, k.family), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, k)
			l.connect()
			l.ns.Run(func() { test(l) })
		})
	}
}

// backends runs a test for both backends, in labs without nameservers.
func backends(t *testing.T, test func(l *lab)) {
	t.Helper()
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			t.Parallel()
			l := newLab(t, kind{backend, family.IPv4})
			l.ns.Run(func() { test(l) })
		})
	}
}

// alone runs a test in one lab without nameservers, with any backend.
func alone(t *testing.T, test func(l *lab)) {
	t.Helper()
	l := newLab(t, kind{"", family.IPv4})
	l.ns.Run(func() { test(l) })
}

func newLab(t *testing.T, k kind) *lab {
	t.Helper()
	netns.Need(t, "ip", "iptables-nft-restore", "iptables-legacy-restore")
	return &lab{t: t, ns: netns.New(t), dir: t.TempDir(), backend: k.backend, family: k.family, log: new(testlog.Buffer)}
}

// connect adds eth0 and the nameservers.
func (l *lab) connect() {
	l.t.Helper()
	servers := netns.New(l.t)
	l.servers = servers
	netns.Connect(
		netns.End{NS: l.ns, Name: "eth0", Addrs: []string{"10.77.0.1/24", "fd77::1/64"}},
		netns.End{NS: servers, Name: "eth0", Addrs: []string{"10.77.0.2/24", "10.77.0.3/24", "fd77::2/64", "fd77::3/64"}},
	)
	l.nameservers = startPeer(l.t, servers)
	l.nameservers.do("serve U - 10.77.0.2:53 10.77.0.3:53 [fd77::2]:53 [fd77::3]:53")
}

// sh runs a shell script in the lab and returns what it prints.
func (l *lab) sh(format string, args ...any) string {
	l.t.Helper()
	return l.ns.Exec("sh", "-ec", fmt.Sprintf(format, args...))
}

// mount mounts a tmpfs that only the test and its children see.
func (l *lab) mount(target string, flags uintptr) {
	l.t.Helper()
	runtime.LockOSThread() // not undone: the thread ends with the test
	err := unix.Unshare(unix.CLONE_NEWNS)
	if err == nil {
		err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	}
	if err == nil {
		err = unix.Mount("tmpfs", target, "tmpfs", flags, "")
	}
	if err != nil {
		l.t.Fatalf("mounting on %s: %v", target, err)
	}
}

// saves returns the rules of both backends and both families.
func (l *lab) saves() string {
	l.t.Helper()
	return l.ns.Rules()
}

// eth0 returns an address of eth0.
func (l *lab) eth0(port int) string {
	return l.pick("10.77.0.1", "[fd77::1]") + fmt.Sprintf(":%d", port)
}

func (l *lab) pick(v4, v6 string) string {
	if l.family == family.IPv4 {
		return v4
	}
	return v6
}

// tool returns the name of a tool of the lab's backend and family: "" is iptables itself.
func (l *lab) tool(suffix string) string {
	return l.pick("iptables-", "ip6tables-") + string(l.backend) + suffix
}

// server returns the nameserver of a digit.
func (l *lab) server(digit byte) string { return nameserver(l.family == family.IPv4, digit) }

// agent starts an agent, as uid and gid 1337.
func (l *lab) agent() {
	l.t.Helper()
	a := startPeer(l.t, l.ns)
	a.do("user 1337 1337")
	a.do("serve A same 127.0.0.1:15053 [::1]:15053")
}

// other returns the other backend than the lab's.
func (l *lab) other() iptables.Backend {
	if l.backend == iptables.NFT {
		return iptables.Legacy
	}
	return iptables.NFT
}

// config returns the default configuration with the lab's backend and changes.
func (l *lab) config(changes ...func(*iptables.Config)) iptables.Config {
	cfg := iptables.DefaultConfig()
	cfg.Backend, cfg.ToolDir = l.backend, l.dir
	cfg.Settle = 100 * time.Millisecond // longer than queries of tests take
	cfg.FailClosed = true               // the namespace ends with the test
	for _, change := range changes {
		change(&cfg)
	}
	return cfg
}

// capture makes a Capture, which logs to the lab's log.
func (l *lab) capture(changes ...func(*iptables.Config)) *iptables.Capture {
	l.t.Helper()
	return l.with(l.config(changes...))
}

// with makes a Capture of a configuration.
func (l *lab) with(cfg iptables.Config) *iptables.Capture {
	l.t.Helper()
	if networkNamespace() == outside {
		l.t.Fatal("rules would be changed outside of the lab")
	}
	c, err := iptables.New(cfg, slog.New(slog.NewTextHandler(l.log, nil)))
	if err != nil {
		l.t.Fatal(err)
	}
	return c
}

// auto is a change of the configuration: the backend is chosen automatically.
func auto(c *iptables.Config) { c.Backend = iptables.Auto }

// apply makes a Capture and applies it.
func (l *lab) apply(changes ...func(*iptables.Config)) *iptables.Capture {
	l.t.Helper()
	c := l.capture(changes...)
	apply(l.t, c)
	return c
}

func apply(t *testing.T, c *iptables.Capture) {
	t.Helper()
	if err := c.Apply(t.Context()); err != nil {
		t.Fatalf("apply: %v", err)
	}
}

// applyOther applies another configuration.
func applyOther(ctx context.Context, c *iptables.Capture, cfg iptables.Config) error {
	if err := c.Set(iptables.Desired{On: true, Config: cfg}); err != nil {
		return err
	}
	return c.Apply(ctx)
}

// replace applies another configuration, and fails the test if that fails.
func replace(t *testing.T, c *iptables.Capture, cfg iptables.Config) {
	t.Helper()
	if err := applyOther(t.Context(), c, cfg); err != nil {
		t.Fatalf("apply: %v", err)
	}
}

func remove(t *testing.T, c *iptables.Capture) {
	t.Helper()
	if err := c.Remove(context.WithoutCancel(t.Context())); err != nil {
		t.Fatalf("remove: %v", err)
	}
}

// want queries nameserver 2 over UDP and TCP from new sockets, and compares the way in the
// reply.
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

// socket opens a UDP socket to nameserver 2, for several queries.
func (l *lab) socket() net.Conn {
	l.t.Helper()
	conn, err := open("udp", "-", l.server('2'))
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// wantOn sends a query on a socket, and compares the way in the reply.
func (l *lab) wantOn(conn net.Conn, way string) {
	l.t.Helper()
	if reply, err := askOn(conn, "2s"); err != nil || reply != "2s"+way {
		l.t.Errorf("reply %q, %v, want %q", reply, err, "2s"+way)
	}
}

// becomes waits until queries on a socket take this way.
func (l *lab) becomes(conn net.Conn, way string) {
	l.t.Helper()
	wait.Until(l.t, "the socket is captured", func() bool {
		reply, err := askOn(conn, "2s")
		return err == nil && reply == "2s"+way
	})
}

// askHeld sends a query on a socket. The nameserver replies when [lab.wantHeld] is called.
func (l *lab) askHeld(conn net.Conn) {
	l.t.Helper()
	if _, err := fmt.Fprintln(conn, "2held"); err != nil {
		l.t.Fatal(err)
	}
}

// wantHeld lets the nameservers send the replies that they hold, and checks the way in the reply
// that a socket receives.
func (l *lab) wantHeld(conn net.Conn, way string) {
	l.t.Helper()
	l.nameservers.do("release")
	buffer := make([]byte, 100)
	err := conn.SetDeadline(time.Now().Add(patience))
	n, readErr := conn.Read(buffer)
	if reply := string(buffer[:n]); errors.Join(err, readErr) != nil || reply != "2held"+way {
		l.t.Errorf("reply %q, %v, want %q", reply, errors.Join(err, readErr), "2held"+way)
	}
}
