package guard_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/guard"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) {
	wait.Together()
	goleak.VerifyTestMain(m)
}

// A running is a guard or a client that runs.
type running struct {
	end  func()
	done chan struct{}
}

// run runs f until end is called or the test ends.
func run(t *testing.T, f func(ctx context.Context)) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{done: make(chan struct{})}
	r.end = func() {
		cancel()
		wait.For(t, "it ends", r.done)
	}
	go func() {
		defer close(r.done)
		f(ctx)
	}()
	t.Cleanup(r.end)
	return r
}

// start starts a guard, which sends each removal.
func start(t *testing.T, path string, removals chan<- struct{}, sockets ...*os.File) *running {
	t.Helper()
	listening := make(chan struct{})
	g := run(t, func(ctx context.Context) {
		if err := guard.Run(ctx, guard.Config{
			Path: path, Patience: guard.Patience, FailOpen: true, Log: testlog.New(t).Logger(),
			Listening: func() { close(listening) }, Sockets: sockets,
			Remove: func(context.Context) error {
				removals <- struct{}{}
				return nil
			},
		}); err != nil {
			t.Error(err)
		}
	})
	wait.For(t, "agents can connect", listening)
	return g
}

// TestClient checks that an agent is connected to each of two guards in succession, and that
// rules are removed after its end.
func TestClient(t *testing.T) {
	t.Parallel()
	path, log := filepath.Join(t.TempDir(), "socket"), testlog.New(t)
	removals := make(chan struct{}, 10)
	first := start(t, path, removals)
	c := guard.NewClient(path, log.Logger())
	c.SetFailOpen(true)
	client := run(t, c.Run)
	c.Enter(guard.Answering)
	c.Await(t.Context(), guard.Answering)
	first.end()
	wait.Until(t, "the client notices the end", func() bool { return !c.Held() && c.Waits() })
	wait.Until(t, "the end of the guard is logged", func() bool { return log.Count("nametap-guard cannot be reached") == 1 })
	start(t, path, removals)
	wait.Until(t, "the client is connected again", c.Held)
	if c.Waits() || log.Count("nametap-guard cannot be reached") != 1 {
		t.Error("the client still waits, or logs the end of the guard twice")
	}
	client.end()
	if len(removals) > 0 {
		t.Error("rules were removed while the agent was connected")
	}
	wait.For(t, "rules are removed", removals)
}

// TestSocketIsDeleted deletes the socket of a guard. The guard ends, and leaves the rules because
// an agent answers, so that systemd starts another one. V2.
func TestSocketIsDeleted(t *testing.T) {
	t.Parallel()
	path, log := filepath.Join(t.TempDir(), "socket"), testlog.New(t).Logger()
	listening, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- guard.Run(t.Context(), guard.Config{
			Path: path, Patience: guard.Patience, FailOpen: true, Log: log, Listening: func() { close(listening) },
			Remove: func(context.Context) error { return errors.New("the rules are removed") },
		})
	}()
	wait.For(t, "agents can connect", listening)
	c := guard.NewClient(path, log)
	run(t, c.Run)
	c.Enter(guard.Answering)
	c.Await(t.Context(), guard.Answering)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := wait.For(t, "the guard ends", ended); err == nil || !strings.Contains(err.Error(), "the socket was deleted") || strings.Contains(err.Error(), "the rules are removed") {
		t.Errorf("%v", err)
	}
}

// TestDrain checks that a guard that ends drops what waits in the sockets, so that systemd does
// not start the agent again.
func TestDrain(t *testing.T) {
	t.Parallel()
	packets, err := new(net.ListenConfig).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer packets.Close()
	conns, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conns.Close()
	var sockets []*os.File
	for _, socket := range []interface{ File() (*os.File, error) }{packets.(*net.UDPConn), conns.(*net.TCPListener)} {
		file, err := socket.File()
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		sockets = append(sockets, file)
	}
	var waiting []net.Conn
	for range 3 {
		for _, to := range []net.Addr{packets.LocalAddr(), conns.Addr()} {
			conn, err := new(net.Dialer).DialContext(t.Context(), to.Network(), to.String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.Write([]byte("query")); err != nil {
				t.Fatal(err)
			}
			waiting = append(waiting, conn)
		}
	}
	start(t, filepath.Join(t.TempDir(), "socket"), make(chan struct{}, 10), sockets...).end()
	for _, conn := range waiting {
		if _, ok := conn.(*net.TCPConn); ok {
			if _, err := conn.Read(make([]byte, 1)); err == nil {
				t.Error("a connection is still open")
			}
		}
	}
	raw, err := packets.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		if _, _, err := unix.Recvfrom(int(fd), make([]byte, 10), unix.MSG_DONTWAIT); !errors.Is(err, unix.EAGAIN) {
			t.Errorf("a packet waits: %v", err)
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// TestRelease checks that an agent without sockets of systemd can open its own where the guard still had
// the previous ones. V1.
func TestRelease(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "socket")
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	addr := conn.LocalAddr().(*net.UDPAddr)
	file, err := conn.File()
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	removals := make(chan struct{}, 1)
	start(t, path, removals, file)
	if other, err := net.ListenUDP("udp4", addr); err == nil {
		_ = other.Close()
		t.Fatal("the guard does not have the socket")
	}
	if err := guard.Release(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	own, err := net.ListenUDP("udp4", addr)
	if err != nil {
		t.Fatal(err)
	}
	if err := own.Close(); err != nil {
		t.Fatal(err)
	}
	if err := guard.Release(t.Context(), path); err != nil {
		t.Errorf("a second time: %v", err)
	}
	if err := guard.Release(t.Context(), path+".none"); err == nil {
		t.Error("no error without a guard")
	}
}
