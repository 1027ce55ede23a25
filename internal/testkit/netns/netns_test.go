package netns_test

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) { wait.Main(m) }

func TestConnect(t *testing.T) {
	netns.Need(t, "ip")
	a, b := netns.New(t), netns.New(t)
	netns.Connect(
		netns.End{NS: a, Name: "netnstest0", Addrs: []string{"192.0.2.1/24", "2001:db8::1/64"}},
		netns.End{NS: b, Name: "netnstest1", Addrs: []string{"192.0.2.2/24", "2001:db8::2/64"}},
	)
	for addr, ns := range map[string]*netns.NS{"192.0.2.1": a, "2001:db8::1": a, "192.0.2.2": b, "2001:db8::2": b} {
		if route := ns.Exec("ip", "route", "get", addr); !strings.HasPrefix(route, "local "+addr+" ") {
			t.Errorf("packets for the host's own address %s would leave the host: %s", addr, route)
		}
	}
	for _, addr := range []string{"192.0.2.2:53", "[2001:db8::2]:53"} {
		var listener net.Listener
		var err error
		b.Run(func() { listener, err = net.Listen("tcp", addr) })
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		// The listener's queue holds the connection with the text.
		var client net.Conn
		a.Run(func() { client, err = net.DialTimeout("tcp", addr, 5*time.Second) })
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(client, "hello"); err != nil {
			t.Fatal(err)
		}
		client.Close()
		server, err := listener.Accept()
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(server)
		if string(got) != "hello" || err != nil {
			t.Errorf("%s: read %q, %v", addr, got, err)
		}
		server.Close()
	}
	if link, err := net.InterfaceByName("netnstest0"); err == nil {
		t.Errorf("the interface is also outside: %+v", link)
	}
}

// After Run, the thread is in its old namespace, even if the test fails in Run.
func TestRunLeavesTheNamespace(t *testing.T) {
	netns.Need(t, "ip", "cat")
	home, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	ns := netns.New(t)
	var inside string
	left := make(chan struct{})
	go func() {
		defer close(left)
		ns.Run(func() {
			inside, err = os.Readlink("/proc/thread-self/ns/net")
			runtime.Goexit() // as FailNow does
		})
	}()
	<-left
	if err != nil || inside == home {
		t.Errorf("the namespace is %q, %v in Run, and %q outside", inside, err, home)
	}
	for range 100 {
		done := make(chan string)
		go func() {
			link, _ := os.Readlink("/proc/thread-self/ns/net")
			done <- link
		}()
		if got := <-done; got != home {
			t.Fatalf("a thread is still in %q, want %q", got, home)
		}
	}
}

func TestExec(t *testing.T) {
	netns.Need(t, "ip", "cat", "readlink")
	ns := netns.New(t)
	if got := ns.Exec("ip", "-o", "link", "show", "up"); !strings.HasPrefix(got, "1: lo:") || strings.Count(got, "\n") != 1 {
		t.Errorf("interfaces that are up: %q, want only lo", got)
	}
	if got := ns.Pipe("input", "cat"); got != "input" {
		t.Errorf("cat printed %q", got)
	}
	t.Cleanup(func() { ns.Exec("true") }) // the namespace still exists
	outside, err := exec.CommandContext(t.Context(), "readlink", "/proc/self/ns/net").Output()
	if err != nil {
		t.Fatal(err)
	}
	if inside := ns.Exec("readlink", "/proc/self/ns/net"); inside == string(outside) {
		t.Errorf("a command runs in %s, which is the outer namespace", inside)
	}
}

// A skipper notes why it is skipped.
type skipper struct {
	testing.TB
	why string
}

func (s *skipper) Skipf(format string, args ...any) { s.why = fmt.Sprintf(format, args...) }

func TestNeed(t *testing.T) {
	s := &skipper{TB: t}
	if netns.Need(s, "sh"); s.why != "" {
		t.Errorf("sh is missing: %s", s.why)
	}
	if netns.Need(s, "no-such-command"); !strings.Contains(s.why, "no-such-command") {
		t.Errorf("the test is skipped because of %q", s.why)
	}
}
