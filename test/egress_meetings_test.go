package test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// An openConn is a connection through the agent to a server that echoes.
type openConn struct {
	*net.TCPConn
	e *egressVM
}

// open opens a connection to vipA, behind which a [greeter] is called one, and reads the greeting.
func (e *egressVM) open() *openConn {
	e.tb.Helper()
	conn := e.mustDial(vipA, "7")
	greeting := make([]byte, len("220 one\n"))
	if _, err := io.ReadFull(conn, greeting); err != nil {
		e.tb.Fatal(err)
	}
	return &openConn{conn, e}
}

// lives reports an error unless the server echoes.
func (c *openConn) lives(after string) {
	c.e.tb.Helper()
	if err := c.echoes(); err != nil {
		c.e.tb.Errorf("after %s: %v", after, err)
	}
}

// echoes sends a byte and receives it.
func (c *openConn) echoes() error {
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

// E12, E13, E14: open connections live while the table and resolv.conf change, while capture is switched off and on, and
// while IPv6 goes away. New ones follow the change.
func TestEgressChanges(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	for addr, name := range map[string]string{serverA: "one", serverB: "two"} {
		e.net.Serve(addr+":7", greeter(name))
	}
	mesh := e.write("mesh", meshConfig(true))
	e.capture("--mesh-config", mesh, "--cache-size", "0")
	conn := e.open()

	e.push(map[string][]string{exactB: {vipA, vip6A}})
	wait.Until(t, "the VIP is of the other host", func() bool { return e.greeting(vipA, "7") == "220 two" })
	conn.lives("a push")
	e.push(map[string][]string{exactA: {vipA, vip6A}})
	wait.Until(t, "the VIP is of the host again", func() bool { return e.greeting(vipA, "7") == "220 one" })

	// Another nameserver has another address for the name.
	e.resolve(exactA, serverA)
	e.net.Exec("ip", "address", "add", "10.0.0.56/24", "dev", "eth0")
	nameserver(t, e.net, "10.0.0.56", serverB)
	e.replace("resolv.conf", "nameserver 10.0.0.56\n")
	wait.Until(t, "the new nameserver is asked", func() bool { return e.greeting(vipA, "7") == "220 two" })
	conn.lives("a change of resolv.conf")

	e.replace("mesh", meshConfig(false))
	wait.Until(t, "capture is off", func() bool { return !e.captured() })
	conn.lives("the end of capture")
	e.replace("mesh", meshConfig(true))
	wait.Until(t, "capture is on", func() bool { return e.captured() && e.greeting(vipA, "7") == "220 two" })
	conn.lives("capture was on again")

	e.Exec("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
	wait.Until(t, "IPv4 is carried", func() bool { return e.greeting(vipA, "7") == "220 two" })
	conn.lives("IPv6 was switched off")
}

// E13: with a supervisor, connections wait while the agent restarts; those of a killed agent are reset.
func TestEgressSupervised(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":7", greeter("one"))
	if r := e.root(e.args("apply")...); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	a := e.supervised()
	conn := e.open()
	killed := a.killChild()
	wait.Until(t, "the agent is gone", func() bool { return child(a.Process.Pid) != killed })
	if got := e.greeting(vipA, "7"); got != "220 one" {
		t.Errorf("while the agent restarts: %q", got)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("a connection of the killed agent goes on")
	}
}

// E13: at the end, open connections go on for --drain.
func TestEgressDrain(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":7", greeter("one"))
	a := e.capture("--drain", "10m")
	short, long := e.open(), e.open()
	if err := a.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the rules are removed", func() bool { return !e.captured() })
	short.lives("the agent began to end")
	long.lives("the agent began to end")
	for _, conn := range []*openConn{short, long} {
		if err := conn.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if rest, err := io.ReadAll(conn); err != nil || len(rest) > 0 {
			t.Errorf("%q, %v", rest, err)
		}
	}
	a.end(terminate) // cuts the drain short
}

// F12, E1: hosts of local-only and of bypassed suffixes are found when a client connects to their VIPs.
func TestEgressSuffixes(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	for addr, name := range map[string]string{serverA: "one", serverB: "two"} {
		e.net.Serve(addr+":7", greeter(name))
	}
	e.capture("--local-only", exactA, "--bypass", exactB)
	if got := e.greeting(vipA, "7"); got != "220 one" {
		t.Errorf("a local-only name: %q", got)
	}
	if got := e.greeting(vipB, "7"); got != "220 two" {
		t.Errorf("a bypassed name: %q", got)
	}
}

// TestEgressIdle checks that idle connections take two descriptors each, and that bytes arrive unchanged in
// both directions at once.
func TestEgressIdle(t *testing.T) { // E17, E9
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":7", greeter("one"))
	a := e.capture()
	before := a.openFiles()
	var conns []*openConn
	for range 50 {
		conns = append(conns, e.open())
	}
	wait.Until(t, "50 idle connections have two descriptors each", func() bool { return a.openFiles()-before <= 2*50+4 })
	data := make([]byte, 8<<20)
	for i := range data {
		data[i] = byte(i>>16 ^ i>>8 ^ i)
	}
	failed := make(chan error, len(conns))
	for _, conn := range conns[:4] {
		go func() { _, _ = conn.Write(data) }() // the echo shows what has failed
		go func() {
			echo := make([]byte, len(data))
			_, err := io.ReadFull(conn, echo)
			if err == nil && !bytes.Equal(echo, data) {
				err = errors.New("the echo differs")
			}
			failed <- err
		}()
	}
	for range 4 {
		if err := wait.For(t, "a stream is echoed", failed); err != nil {
			t.Error(err)
		}
	}
}

// E10, F11: while nameservers are silent, a host whose addresses have expired is reached by the old ones, another
// one is refused in time, and mesh names are answered.
func TestEgressOutage(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	for addr, name := range map[string]string{serverA: "one", serverB: "two"} {
		e.net.Serve(addr+":7", greeter(name))
	}
	e.resolve(exactA, serverA)
	e.capture("--serve-stale", "1h")
	if got := e.greeting(vipA, "7"); got != "220 one" {
		t.Fatal(got)
	}
	e.silence()
	for range 4 { // the TTL is 1 s: the last ones find expired addresses
		if got := e.greeting(vipA, "7"); got != "220 one" {
			t.Errorf("a host that was resolved before: %q", got)
		}
		if got := e.greeting(vipB, "7"); !strings.Contains(got, "reset") {
			t.Errorf("a host that was not resolved before: %q, want a reset", got)
		}
	}
	e.digs(vipB, "@10.0.0.55", exactB)
	if e.refusals("resolution")+e.refusals("connect") < 4 {
		t.Error("the refusals are not counted")
	}
}

// E13, V1: if systemd holds the listeners for VIPs, open connections go on for the drain in a restart, while DNS is
// answered. New ones wait for the next agent.
func TestEgressHeldListeners(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":7", greeter("one"))
	e.asService("127.0.0.1:"+egressPort, "[::1]:"+egressPort)
	e.flags = append(e.flags, "--drain", "10m")
	first := e.held(e.start())
	conn := e.open()
	if err := first.Process.Signal(handOver); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the agent drains", func() bool { return strings.HasSuffix(e.get("/healthz/ready"), "draining\n") })
	conn.lives("the hand-over began")
	e.digs(vipB, "@10.0.0.55", exactB)
	waiting := e.mustDial(vipA, "7")
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(conn); err != nil || len(rest) > 0 {
		t.Errorf("%q, %v", rest, err)
	}
	wait.For(t, "the agent ends with its last connection", first.ended)
	e.held(e.start())
	greeting := make([]byte, len("220 one\n"))
	if _, err := io.ReadFull(waiting, greeting); err != nil || string(greeting) != "220 one\n" {
		t.Errorf("a connection that waited: %q, %v", greeting, err)
	}
}
