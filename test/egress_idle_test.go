package test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// E9: once data has ended in one direction, connection tracking forgets the connection after 60 s without a packet.
// The agent's probes come before that, so an answer that takes longer arrives.
func TestEgressHalfClosedIdle(t *testing.T) {
	t.Parallel()
	netns.Need(t, "ss")
	e := newEgressVM(t, "nft")
	release := make(chan struct{})
	e.net.Serve(serverA+":7", func(conn *net.TCPConn) {
		_, _ = io.Copy(io.Discard, conn)
		<-release
		_, _ = io.WriteString(conn, "answer")
	})
	e.capture()
	conn := e.mustDial(vipA, "7")
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	// Each side of the agent has a keep-alive timer: ss shows it as "timer:(keepalive,19sec,0)".
	for _, filter := range []string{"sport = " + egressPort, "dst " + serverA} {
		wait.Until(t, "probes are due in less than 60 s: "+filter, func() bool {
			lines := strings.Split(strings.TrimSpace(e.Exec("ss", "-tnoH", filter)), "\n")
			return len(lines) == 1 && regexp.MustCompile(`timer:\(keepalive,[0-9]{1,2}(\.[0-9]+)?sec,`).MatchString(lines[0])
		})
	}
	close(release)
	if got, err := io.ReadAll(conn); err != nil || string(got) != "answer" {
		t.Errorf("%q, %v", got, err)
	}
}

// E18: a connection that sends nothing in both directions is reset after the idle timeout, and a half-closed one after a
// twelfth of it. A busy one lives on, also if it is half-closed.
func TestEgressIdleTimeout(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":7", greeter("one"))
	e.net.Serve(serverA+":8", func(conn *net.TCPConn) { // goes on after the client's end
		_, _ = io.Copy(io.Discard, conn)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			if _, err := conn.Write([]byte("x")); err != nil {
				return
			}
			<-tick.C
		}
	})
	e.net.Serve(serverA+":9", func(conn *net.TCPConn) {
		_, _ = io.Copy(io.Discard, conn)
		_, _ = conn.Read(make([]byte, 1))
		<-t.Context().Done()
	})
	const timeout = 12 * time.Second
	e.capture("--egress-idle-timeout", timeout.String())
	began := time.Now()
	idle, busy := e.open(), e.open()
	half, talking := e.mustDial(vipA, "9"), e.mustDial(vipA, "8")
	for _, conn := range []*net.TCPConn{half, talking} {
		if err := conn.CloseWrite(); err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan string, 2)
	for name, conn := range map[string]net.Conn{"half-closed": half, "idle": idle} {
		go func() {
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				name += fmt.Sprintf(": %v, want a reset", err)
			}
			ended <- name
		}()
	}
	for len(ended) < 2 {
		err := busy.echoes()
		if err == nil {
			_, err = talking.Read(make([]byte, 1))
		}
		if err != nil && stoodStill(t) {
			return
		} else if err != nil {
			t.Fatalf("busy connections, while others are idle: %v", err)
		}
	}
	if first, second := <-ended, <-ended; first != "half-closed" || second != "idle" {
		t.Errorf("the first connection that ended is %s, the second one %s", first, second)
	}
	if got := e.metric("nametap_egress_idle_closed_total"); got != 2 {
		t.Errorf("%v idle connections were closed, want 2", got)
	}
	if took := time.Since(began); took < timeout {
		t.Errorf("the idle connection ended after %v, want %v", took, timeout)
	}
}

// E17: after a momentary lack of descriptors, the next clients are carried.
func TestEgressDescriptorsLater(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":7", greeter("one"))
	e.net.Serve("["+server6A+"]:7", greeter("one"))
	a := e.capture()
	for _, vip := range []string{vipA, vip6A} {
		if got := e.greeting(vip, "7"); got != "220 one" {
			t.Fatalf("%s: %q", vip, got)
		}
	}
	wait.Until(t, "the connections have ended", func() bool { return e.metric("nametap_egress_open_connections") == 0 })
	a.leave(0)
	for range 10 { // which take what is free
		if err := answered(e.connect()); err != nil {
			t.Error(err)
		}
	}
	for _, vip := range []string{vipA, vip6A} {
		if got := e.greeting(vip, "7"); !strings.Contains(got, "reset") {
			t.Errorf("%s without descriptors: %q", vip, got)
		}
	}
	a.limitFiles(10_000)
	for _, vip := range []string{vipA, vip6A} {
		if got := e.greeting(vip, "7"); got != "220 one" {
			t.Errorf("%s: %q, though there are descriptors again", vip, got)
		}
	}
}
