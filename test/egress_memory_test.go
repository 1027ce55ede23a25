package test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// E5, E17: long beginnings of connections that say no name take a bounded amount of memory. Others are still
// carried.
func TestEgressLongBeginnings(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.serve(serverA+":443", greeter("one"))
	e.resolve("a.apps.example.org", serverA)
	e.capture()
	long := []byte("GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 60_000))
	const clients = 600
	refused := 0
	var open []net.Conn
	for range clients {
		conn, err := e.dialTCP(vipWild, "443")
		if errors.Is(err, syscall.ECONNRESET) {
			continue // refused before the client has noticed that it was connected
		} else if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write(long) // which may fail, because the agent does not read all
		open = append(open, conn)
	}
	wait.Until(t, "the beginnings are refused or wait", func() bool {
		refused = int(e.refusals("limit"))
		return refused > 0 && e.metric("nametap_egress_open_connections") <= 300
	})
	if refused == 0 || refused == clients {
		t.Errorf("%d of %d are refused", refused, clients)
	}
	conn := e.mustDial(vipWild, "443")
	if _, err := conn.Write(records(hello(t, "a.apps.example.org", 0), 16_384)); err != nil {
		t.Fatal(err)
	}
	greeting := make([]byte, 7)
	if _, err := conn.Read(greeting); err != nil || string(greeting) != "220 one" {
		t.Errorf("a short hello: %q, %v", greeting, err)
	}
	for _, conn := range open {
		conn.Close()
	}
	wait.Until(t, "long beginnings are read again", func() bool {
		conn := e.mustDial(vipWild, "443")
		defer conn.Close()
		if _, err := conn.Write(records(hello(t, "a.apps.example.org", 60_000), 16_384)); err != nil {
			return false
		}
		_, err := conn.Read(greeting)
		return err == nil && string(greeting) == "220 one"
	})
}

// memoryCgroup makes a cgroup with a limit of memory in bytes, which the agent's user may enter. It skips the test where
// there is no memory controller.
func memoryCgroup(t *testing.T, limit int) (dir, usage string) {
	t.Helper()
	for root, files := range map[string][2]string{
		"/sys/fs/cgroup/memory": {"memory.limit_in_bytes", "memory.max_usage_in_bytes"}, "/sys/fs/cgroup": {"memory.max", "memory.peak"},
	} {
		dir := filepath.Join(root, fmt.Sprintf("nametap-test-%d", os.Getpid()))
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil || os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() {
			wait.Until(t, "the cgroup is empty", func() bool { return os.Remove(dir) == nil })
		})
		if os.WriteFile(filepath.Join(dir, files[0]), []byte(strconv.Itoa(limit)), 0) != nil {
			continue
		}
		if err := os.Chown(filepath.Join(dir, "cgroup.procs"), agentID, agentID); err != nil {
			t.Fatal(err)
		}
		return dir, filepath.Join(dir, files[1])
	}
	t.Skip("LEFT OUT: connections to VIPs in a cgroup, there is no memory controller of cgroups")
	return "", ""
}

// E17: in a cgroup of 192 MiB, as an injected agent has, as many connections are carried as its memory allows, and DNS is
// answered beside them. Further ones are reset.
func TestEgressCgroup(t *testing.T) {
	e := newEgressVM(t, "nft")
	e.serve(serverA+":7", greeter("one"))
	const limit = 192 << 20
	var usage string
	e.cgroup, usage = memoryCgroup(t, limit)
	a := e.capture()
	bytes := func() int {
		text, err := os.ReadFile(usage)
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := bytes()
	most := int(e.metric("nametap_egress_max_connections"))
	if most < 2000 || most > limit/2/20_000 {
		t.Fatalf("the limit is %d connections", most)
	}
	var conns []*openConn
	for range most {
		conns = append(conns, e.open())
	}
	if got := e.greeting(vipA, "7"); !strings.Contains(got, "reset") || e.refusals("limit") != 1 {
		t.Errorf("a connection too many: %q", got)
	}
	t.Logf("%d connections: %d KiB each, %d MiB in all", most, (bytes()-before)/most/1024, bytes()>>20)
	chunk := make([]byte, 32<<10)
	for _, conn := range conns { // all have been busy once
		if _, err := conn.Write(chunk); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(conn, chunk); err != nil {
			t.Fatal(err)
		}
	}
	for range 20 {
		if got := e.dig("@10.0.0.55", exactB); got != vipB {
			t.Errorf("a mesh name: %s", got)
		}
	}
	t.Logf("after 32 KiB each: %d KiB each, %d MiB in all", (bytes()-before)/most/1024, bytes()>>20)
	for _, conn := range conns {
		conn.lives("all connections were opened")
	}
	select {
	case <-a.ended:
		t.Error("the agent has ended")
	default:
	}
}
