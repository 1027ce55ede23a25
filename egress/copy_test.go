package egress

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A carried is a connection of a server, and the other ends of its sockets.
type carried struct {
	*conn

	peer, far *net.TCPConn // of the client and of the host
	copies    func()       // starts to copy
	ended     chan struct{}
}

// carries returns a connection of a server.
func carries(t *testing.T, s *Server) *carried {
	t.Helper()
	peer, client := connected(t)
	host, far := connected(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	c := &carried{&conn{Conn: client, client: client, cancel: cancel}, peer, far, nil, make(chan struct{})}
	c.place = s.limit.Enter(c.conn)
	c.place.Serve()
	c.join(host, &counts{all: &s.metrics.hosts})
	s.conns.Store(c.conn, nil)
	s.metrics.open.Add(1)
	c.copies = func() {
		go func() {
			defer close(c.ended)
			_ = c.copy(&s.buffers, nil)
			s.conns.Delete(c.conn)
			s.metrics.open.Add(-1)
			c.place.Leave()
		}()
	}
	t.Cleanup(func() { c.abort(ctx.Err()) })
	return c
}

// bare returns a server without listeners.
func bare(t *testing.T, conns int) *Server {
	t.Helper()
	s := &Server{config: DefaultConfig(), metrics: newMetrics(int64(conns), nil), buffers: sync.Pool{New: newBuffer}}
	s.limit = connlimit.New("egress", conns, maxBeginnings)
	t.Cleanup(s.limit.Close)
	return s
}

// connected returns both ends of a connection.
func connected(t *testing.T) (one, other *net.TCPConn) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	dialled, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dialled.Close() })
	accepted, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { accepted.Close() })
	return dialled.(*net.TCPConn), accepted.(*net.TCPConn)
}

// sends writes data, then a byte of urgent data if urgent is true.
func sends(t *testing.T, conn *net.TCPConn, data []byte, urgent bool) {
	t.Helper()
	if _, err := conn.Write(data); err != nil {
		t.Error(err)
	}
	raw, err := conn.SyscallConn()
	if err == nil && urgent {
		var sent error
		err = errors.Join(raw.Write(func(fd uintptr) bool {
			sent = unix.Sendto(int(fd), []byte("X"), unix.MSG_OOB, nil)
			return sent != unix.EAGAIN
		}), sent)
	}
	if err != nil {
		t.Error(err)
	}
}

// E9: what follows urgent data arrives, also if the direction is busy.
func TestUrgent(t *testing.T) {
	t.Parallel()
	for _, size := range []int{3, 200_000} {
		c := carries(t, bare(t, 1))
		c.copies()
		go func() {
			sends(t, c.peer, bytes.Repeat([]byte("a"), size), true)
			sends(t, c.peer, bytes.Repeat([]byte("b"), size), false)
			if err := c.peer.CloseWrite(); err != nil {
				t.Error(err)
			}
		}()
		if got, err := io.ReadAll(c.far); err != nil || len(got) != 2*size {
			t.Errorf("%d bytes, %v, want %d", len(got), err, 2*size)
		}
	}
}

// E9: what a host has sent before its reset arrives, although the end of the client's data cannot be passed on, and the
// reset then arrives, too.
func TestResetAfterAnswer(t *testing.T) {
	t.Parallel()
	c := carries(t, bare(t, 1))
	if err := c.peer.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	sends(t, c.far, []byte("answer"), false)
	reset(c.far)
	c.copies()
	if got, err := io.ReadAll(c.peer); string(got) != "answer" || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%q, %v", got, err)
	}
}

// E9: if a host ends its data, and resets what the client sends after that, the client gets all data of the host and its
// end.
func TestResetAfterEnd(t *testing.T) {
	t.Parallel()
	c := carries(t, bare(t, 1))
	sends(t, c.far, []byte("answer"), false)
	if err := c.far.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	reset(c.far)
	c.copies()
	got := make([]byte, len("answer"))
	if _, err := io.ReadFull(c.peer, got); err != nil || string(got) != "answer" {
		t.Errorf("%q, %v", got, err)
	}
	if n, err := c.peer.Read(got); n > 0 || !errors.Is(err, io.EOF) {
		t.Errorf("%d bytes, %v, want the end", n, err)
	}
	wait.For(t, "the connection ends", c.ended)
}

// E9: a reset that comes while a busy direction is copied, or whose error a write gets, is passed on as a reset, not as
// the end of the data.
func TestResetWhileBusy(t *testing.T) {
	t.Parallel()
	for name, ends := range map[string]func(*carried) (from, to *net.TCPConn){
		"client": func(c *carried) (from, to *net.TCPConn) { return c.peer, c.far },
		"host":   func(c *carried) (from, to *net.TCPConn) { return c.far, c.peer },
	} {
		for _, both := range []bool{false, true} {
			c := carries(t, bare(t, 1))
			from, to := ends(c)
			sends(t, from, bytes.Repeat([]byte("x"), 3*bufferSize), false)
			if both {
				sends(t, to, []byte("x"), false)
			}
			reset(from)
			c.copies()
			if got, err := io.ReadAll(to); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s: %d bytes, then %v, want a reset", name, len(got), err)
			}
			wait.For(t, "the connection ends", c.ended)
		}
	}
}
