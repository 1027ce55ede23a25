package egress

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// runs runs the loop of a server until a function in another goroutine has returned.
func runs(t *testing.T, s *Server, f func()) {
	t.Helper()
	ended := false
	go func() {
		f()
		s.loop.post(func() { ended = true })
	}()
	if err := s.loop.run(func() bool { return ended }); err != nil {
		t.Fatal(err)
	}
}

// receives returns what a peer receives until the end of the data.
func receives(t *testing.T, conn net.Conn) string {
	t.Helper()
	data, err := io.ReadAll(conn)
	if err != nil {
		t.Logf("after %d bytes: %v", len(data), err)
	}
	return string(data)
}

// sends writes data.
func sends(t *testing.T, conn net.Conn, data []byte) {
	t.Helper()
	if _, err := conn.Write(data); err != nil {
		t.Error(err)
	}
}

// urges sends a byte of urgent data.
func urges(t *testing.T, conn net.Conn) {
	t.Helper()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Error(err)
		return
	}
	var sent error
	err = raw.Write(func(fd uintptr) bool {
		sent = unix.Sendto(int(fd), []byte("X"), unix.MSG_OOB, nil)
		return sent != unix.EAGAIN
	})
	if err != nil || sent != nil {
		t.Error(err, sent)
	}
}

// E9: what follows urgent data arrives, although a read has ended before it.
func TestUrgent(t *testing.T) {
	t.Parallel()
	s := sweeper(t, time.Minute)
	c := carries(t, s)
	sends(t, c.client, []byte("abc"))
	urges(t, c.client)
	sends(t, c.client, []byte("def"))
	got := make([]byte, 6)
	runs(t, s, func() {
		if _, err := io.ReadFull(c.host, got); err != nil {
			t.Error(err)
		}
	})
	if string(got) != "abcdef" {
		t.Errorf("%q", got)
	}
}

// E9: a busy connection with urgent data is carried to its end.
func TestUrgentWhileBusy(t *testing.T) {
	t.Parallel()
	s := sweeper(t, time.Minute)
	c := carries(t, s)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		sends(t, c.client, bytes.Repeat([]byte("a"), 200_000))
		urges(t, c.client)
		sends(t, c.client, bytes.Repeat([]byte("b"), 100_000))
		if err := c.client.(*net.TCPConn).CloseWrite(); err != nil {
			t.Error(err)
		}
	}()
	runs(t, s, func() {
		if got := receives(t, c.host); len(got) != 300_000 {
			t.Errorf("%d bytes", len(got))
		}
	})
	<-sent
}

// E9: what a host has sent before its reset arrives, although the end of the client's data cannot be passed on.
func TestResetAfterAnswer(t *testing.T) {
	t.Parallel()
	s := sweeper(t, time.Minute)
	c := carries(t, s)
	if err := c.client.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	sends(t, c.host, []byte("answer"))
	if err := c.host.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	c.host.Close()
	runs(t, s, func() {
		if got := receives(t, c.client); got != "answer" {
			t.Errorf("%q", got)
		}
	})
}

// E9: a reset that comes while a busy direction is copied is passed on as a reset, not as the end of the data.
func TestResetWhileBusy(t *testing.T) {
	t.Parallel()
	for name, ends := range map[string]func(*carried) (from, to net.Conn, near *socket){
		"client": func(c *carried) (net.Conn, net.Conn, *socket) { return c.client, c.host, c.pair.client },
		"host":   func(c *carried) (net.Conn, net.Conn, *socket) { return c.host, c.client, c.pair.host },
	} {
		s := sweeper(t, time.Minute)
		c := carries(t, s)
		from, to, near := ends(c)
		data := bytes.Repeat([]byte("x"), 3*bufferSize)
		s.loop.post(func() {
			// The loop gets the event of the data. The reset comes before it reads them.
			sends(t, from, data)
			near.record(unix.EPOLLIN)
			if err := from.(*net.TCPConn).SetLinger(0); err != nil {
				t.Error(err)
			}
			from.Close()
			c.move()
		})
		runs(t, s, func() {
			if got, err := io.ReadAll(to); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s: %d of %d bytes, then %v, want a reset", name, len(got), len(data), err)
			}
		})
	}
}

// E13: the listeners are closed once: another part of the process may have their descriptors while connections drain.
func TestListenersClosedOnce(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Addr, cfg.Drain, cfg.Logger = "127.0.0.1:0", time.Hour, slog.New(slog.DiscardHandler)
	s, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	fd := s.listeners.opened[0].fd
	s.metrics.open.Add(1) // a connection that is drained
	ended := make(chan error, 1)
	go func() { ended <- s.Run(context.WithoutCancel(t.Context())) }()
	s.End(true)
	wait.Until(t, "the descriptor of the listener is free", func() bool {
		other, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, fd)
		if err != nil {
			t.Fatal(err)
		}
		if other != fd {
			_ = unix.Close(other)
		}
		return other == fd
	})
	s.loop.post(func() { s.metrics.open.Add(-1) })
	if err := wait.For(t, "the server ends", ended); err != nil {
		t.Error(err)
	}
	if err := unix.Close(fd); err != nil {
		t.Errorf("the descriptor of another part of the process: %v", err)
	}
}

// E17: a descriptor that was spent for a client, and that another part of the process has taken, is replaced when there
// are descriptors again.
func TestReserveRefilled(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig()
	cfg.Addr, cfg.Logger = "127.0.0.1:0", slog.New(slog.DiscardHandler)
	s, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if !s.reserve.Spend() {
		t.Fatal("there is no reserve")
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(context.WithoutCancel(t.Context())) }()
	client, err := net.Dial("tcp", s.Addrs()[0].String())
	if err == nil {
		defer client.Close()
		_, err = client.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a client of no VIP: %v, want a reset", err)
	}
	refilled := make(chan bool, 1)
	s.loop.post(func() { refilled <- s.reserve.Spend() })
	if !wait.For(t, "the reserve is looked at", refilled) {
		t.Error("the reserve stays empty")
	}
	s.End(false)
	if err := wait.For(t, "the server ends", ended); err != nil {
		t.Error(err)
	}
}

// E10: while nameservers do not say whether the network has NAT64, other connections go on, and all dials share a lookup.
func TestNAT64Silent(t *testing.T) {
	t.Parallel()
	s := sweeper(t, time.Minute)
	lookups, reply := 0, make(chan struct{})
	cfg := &Config{Resolve: func(context.Context, string, family.Family, bool) ([]netip.Addr, bool, error) {
		lookups++ // while the guard is locked
		<-reply
		return []netip.Addr{netip.MustParseAddr("2001:db8:64::c000:aa")}, true, nil
	}}
	d := &dialer{config: cfg, guard: newGuard(cfg), extra: 10}
	const dials = 5
	var failed []error
	for range dials {
		s.loop.start(func(tk *task) {
			target := endpoint{addr: netip.MustParseAddr("2001:db8:64::7f00:1"), port: 1} // 127.0.0.1 by that NAT64
			_, _, err := d.dial(tk, []endpoint{target}, false, tk.now.Add(time.Hour))
			failed = append(failed, err)
		})
	}
	s.loop.start(func(tk *task) {
		for range 3 {
			if err := tk.wait(tk.now.Add(time.Millisecond)); err != nil {
				t.Error(err)
			}
		}
		close(reply)
	})
	if err := s.loop.run(func() bool { return len(failed) == dials }); err != nil {
		t.Fatal(err)
	}
	for _, err := range failed {
		if err == nil || !strings.Contains(err.Error(), "loopback") || lookups != 1 {
			t.Errorf("%v, with %d lookups", err, lookups)
		}
	}
}

// E17: a connection whose client has reset it takes no place while its host is dialled.
func TestResetWhileDialled(t *testing.T) {
	t.Parallel()
	s := sweeper(t, time.Minute)
	cfg := &Config{Resolve: func(ctx context.Context, _ string, _ family.Family, onlyCached bool) ([]netip.Addr, bool, error) {
		if !onlyCached {
			<-ctx.Done()
		}
		return nil, !onlyCached, ctx.Err()
	}}
	d := &dialer{config: cfg, guard: newGuard(cfg), extra: 10}
	client, near := connected(t)
	var err error
	ended := false
	stand(s.loop)
	s.loop.start(func(tk *task) {
		tk.client = watched(t, s.loop, near)
		tk.client.handle = tk.wakeUp
		_, _, err = d.dial(tk, []endpoint{{name: "a.example.org", port: 7}}, false, tk.now.Add(time.Hour))
		ended = true
	})
	if err := client.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	client.Close()
	if err := s.loop.run(func() bool { return ended }); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, errGone) {
		t.Errorf("%v, want %q", err, errGone)
	}
}
