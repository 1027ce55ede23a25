package test

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// stalled returns a handler that reads nothing until the test ends.
func stalled(t *testing.T) func(conn *net.TCPConn) {
	t.Helper()
	return func(conn *net.TCPConn) {
		_ = conn.SetReadBuffer(2048) // the kernel has a minimum
		<-t.Context().Done()
	}
}

// stall sends until the agent takes no more.
func stall(t *testing.T, conn net.Conn) {
	t.Helper()
	for chunk := make([]byte, 1<<20); ; {
		if err := conn.SetWriteDeadline(time.Now().Add(500 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(chunk); errors.Is(err, os.ErrDeadlineExceeded) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// E9, E13: a host that takes no more bytes holds up neither a client's reset nor the end of the agent.
func TestEgressStalled(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	for _, port := range []string{"7", "443"} {
		e.net.Serve(serverA+":"+port, stalled(t))
	}
	a := e.capture("--drain", "100ms")
	large := hello(t, "a.apps.example.org", 60_000)
	open := func() []*net.TCPConn {
		exact, wild := e.mustDial(vipA, "7"), e.mustDial(vipWild, "443")
		if _, err := wild.Write(records(large)); err != nil {
			t.Fatal(err)
		}
		stall(t, exact)
		stall(t, wild)
		return []*net.TCPConn{exact, wild}
	}
	for _, conn := range open() {
		_ = conn.SetLinger(0)
		conn.Close()
	}
	wait.Until(t, "the resets are noticed", func() bool { return e.metric("nametap_egress_open_connections") == 0 })
	conns := open()
	if err := a.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the agent ends", a.ended)
	for _, conn := range conns {
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%v, want a reset", err)
		}
	}
}
