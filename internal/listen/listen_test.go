package listen_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// spec returns the Spec of a Set over TCP that writes to log.
func spec(addr string, log *bytes.Buffer) listen.Spec {
	return listen.Spec{Name: "tests", Setting: "test-addr", Addr: addr, Networks: []string{"tcp"}, Log: slog.New(slog.NewTextHandler(log, nil))}
}

// opened returns a Set that is open.
func opened(t *testing.T, spec listen.Spec, inherited *listen.Inherited) *listen.Set {
	t.Helper()
	set, err := listen.New(spec, inherited)
	if err == nil {
		err = set.Open(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// files returns the sockets of a Set for another process.
func files(t *testing.T, set *listen.Set) []*os.File {
	t.Helper()
	held, err := set.Files()
	if err != nil {
		t.Fatal(err)
	}
	return held
}

// inherit returns sockets of another process.
func inherit(t *testing.T, systemd bool, files ...*os.File) *listen.Inherited {
	t.Helper()
	inherited, err := listen.Inherit(files, systemd)
	if err != nil {
		t.Fatal(err)
	}
	return inherited
}

// rareAddr is an address at which a port that is closed is hardly taken by another program.
const rareAddr = "127.77.53.98:0"

// TestHandOver hands the sockets of a process over to the next one, from which they differ in their settings. V1, K15, E13.
func TestHandOver(t *testing.T) {
	var log bytes.Buffer
	first := spec("127.0.0.1:0", &log)
	first.Networks = []string{"udp", "tcp"}
	set := opened(t, first, nil)
	if a := set.Addrs(); len(a) != 2 || a[0].Network != "udp" || a[0].Address != a[1].Address {
		t.Fatalf("listens on %v", a)
	}
	first.Addr = set.Addrs()[0].Address
	other := opened(t, spec(rareAddr, &log), nil)
	otherAddr := other.Addrs()[0].String()
	in := inherit(t, false, append(files(t, set), files(t, other)...)...)
	next := opened(t, first, in)
	if !next.Held() || !slices.Equal(next.Addrs(), set.Addrs()) {
		t.Errorf("has %v, want %v", next.Addrs(), set.Addrs())
	}
	if err := in.Close(first.Log); err != nil {
		t.Error(err)
	}
	for _, want := range []string{otherAddr, "test-addr=" + first.Addr, "another port"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("want %q in %s", want, &log)
		}
	}
	// Of a socket unit, the sockets at the port are all that there are, whatever their addresses.
	last := opened(t, spec("localhost:"+strings.Split(first.Addr, ":")[1], &log), inherit(t, true, files(t, next)[1]))
	if got := last.Addrs(); len(got) != 1 || got[0] != next.Addrs()[1] {
		t.Errorf("has %v", got)
	}
	files(t, last)
}

// TestHandOverRefused passes what is no socket, and a UDP socket at the port of no setting, whose clients would get no
// answer. R3, V1.
func TestHandOverRefused(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := listen.Inherit([]*os.File{null}, true); err == nil || !strings.Contains(err.Error(), "want a UDP socket") {
		t.Error(err)
	}
	udp := spec("127.0.0.1:0", new(bytes.Buffer))
	udp.Networks = []string{"udp"}
	in := inherit(t, true, files(t, opened(t, udp, nil))...)
	files(t, opened(t, spec("127.0.0.1:0", new(bytes.Buffer)), in))
	if err := in.Close(udp.Log); err == nil || !strings.Contains(err.Error(), "another port than test-addr=127.0.0.1:0") {
		t.Error(err)
	}
}

// TestExclusive checks that no other program can bind to the address of a UDP socket of systemd, where it would receive
// the captured queries. V1.
func TestExclusive(t *testing.T) {
	shared := func(address string) (*net.UDPConn, error) { // as systemd opens it
		config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
			return errors.Join(c.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
			}), err)
		}}
		conn, err := config.ListenPacket(t.Context(), "udp", address)
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn.(*net.UDPConn), nil
	}
	for _, address := range []string{"127.0.0.1:0", "0.0.0.0:0"} {
		systemds, err := shared(address)
		if err != nil {
			t.Fatal(err)
		}
		file, err := systemds.File()
		if err != nil {
			t.Fatal(err)
		}
		inherit(t, true, file)
		_, port, _ := net.SplitHostPort(systemds.LocalAddr().String())
		if _, err := shared("127.0.0.1:" + port); !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("%s: a second socket: %v, want %v", address, err, unix.EADDRINUSE)
		}
	}
}

// TestMissing opens a socket when its port is free, and again after it has failed; one that the process cannot do without
// is an error. R3.
func TestMissing(t *testing.T) {
	taken, err := net.Listen("tcp", rareAddr)
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	required := spec(taken.Addr().String(), &log)
	required.Required = true
	set, err := listen.New(required, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := set.Open(t.Context()); !errors.Is(err, unix.EADDRINUSE) || !strings.Contains(err.Error(), "test-addr \""+required.Addr) {
		t.Error(err)
	}
	later := make(chan []string, 1)
	optional := spec(required.Addr, &log)
	set = opened(t, optional, nil)
	if m := set.Missing(); len(m) != 1 || !errors.Is(m[0], unix.EADDRINUSE) || !strings.Contains(log.String(), "degraded") {
		t.Errorf("missing: %v, and the log has %s", m, &log)
	}
	_ = taken.Close()
	ctx, cancel := context.WithCancel(t.Context())
	served := 0
	err = set.Serve(ctx, func(_ context.Context, socket *listen.Socket) error {
		if served++; served == 1 {
			return errors.New("broken")
		}
		later <- []string{socket.Address, fmt.Sprint(set.Missing())}
		cancel()
		return nil
	})
	if got := <-later; err != nil || got[0] != required.Addr || got[1] != "[]" {
		t.Errorf("%v, %v", got, err)
	}
	failing := opened(t, required, nil)
	if err := failing.Serve(t.Context(), func(context.Context, *listen.Socket) error { return errors.New("broken") }); err == nil {
		t.Error("Serve has no error")
	}
}

// TestKept checks which sockets systemd is told to keep, and to close when a setting has changed. V1.
func TestKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "n")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer systemd.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	got := make(chan string, 16)
	go func() {
		for text, oob := make([]byte, 512), make([]byte, 128); ; {
			n, oobn, _, _, err := systemd.ReadMsgUnix(text, oob)
			if err != nil {
				return
			}
			got <- fmt.Sprintf("%s %t", strings.ReplaceAll(string(text[:n]), "\n", " "), oobn > 0)
		}
	}()
	kept := spec("127.0.0.1:0", new(bytes.Buffer))
	kept.Keep = true
	var in *listen.Inherited
	const store = "FDSTORE=1 FDNAME=kept-test-addr true"
	for _, messages := range [][]string{{store}, {store}, {"FDSTOREREMOVE=1 FDNAME=kept-test-addr false", store}} {
		set := opened(t, kept, in)
		for _, want := range messages {
			if text := wait.For(t, want, got); text != want {
				t.Errorf("%s, want %s", text, want)
			}
		}
		if at := set.Addrs()[0].Address; in != nil && kept.Addr != rareAddr && at != kept.Addr || !set.Held() {
			t.Errorf("listens on %s", at)
		}
		if kept.Addr = set.Addrs()[0].Address; in != nil {
			kept.Addr = rareAddr // a setting has changed
		}
		fd, err := syscall.Dup(int(files(t, set)[0].Fd()))
		if err != nil {
			t.Fatal(err)
		}
		in = inherit(t, true, os.NewFile(uintptr(fd), "kept-test-addr"))
	}
}

// TestWaiting checks that a signal is no client: for a client, a server may close another connection. R3, R23.
func TestWaiting(t *testing.T) {
	listener := files(t, opened(t, spec(rareAddr, new(bytes.Buffer)), nil))[0]
	defer listener.Close()
	thread, waiting := make(chan int, 1), make(chan bool)
	go func() {
		runtime.LockOSThread()
		thread <- unix.Gettid()
		waiting <- listen.Waiting(listener, time.Minute)
	}()
	for thread := <-thread; ; {
		select {
		case got := <-waiting:
			if got {
				t.Error("a client waits")
			}
			return
		case <-time.After(time.Millisecond):
			_ = unix.Tgkill(unix.Getpid(), thread, unix.SIGURG) // as the scheduler does
		}
	}
}
