package egress

import (
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A carried is a pair of a server, and the other ends of its connections.
type carried struct {
	*pair

	client, host net.Conn
}

// carries returns a pair of a server, which copies.
func carries(t *testing.T, s *Server) *carried {
	t.Helper()
	client, near := connected(t)
	far, host := connected(t)
	p := s.copier.newPair(watched(t, s.loop, near), watched(t, s.loop, far), &counts{})
	s.metrics.open.Add(1)
	p.done = func() {
		delete(s.pairs, p)
		s.metrics.open.Add(-1)
	}
	s.pairs[p] = true
	return &carried{p, client, host}
}

// watched returns a connection as a socket of a loop, and closes it.
func watched(tb testing.TB, l *loop, conn *net.TCPConn) *socket {
	tb.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		tb.Fatal(err)
	}
	fd := -1
	if controlErr := raw.Control(func(from uintptr) { fd, err = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0) }); controlErr != nil || err != nil {
		tb.Fatal(controlErr, err)
	}
	if err := conn.Close(); err != nil {
		tb.Fatal(err)
	}
	s, err := l.watch(fd, eventsOfConn, nil)
	if err != nil {
		tb.Fatal(err)
	}
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

// sweeper returns a server with an idle timeout and without listeners.
func sweeper(t *testing.T, timeout time.Duration) *Server {
	t.Helper()
	l, err := newLoop()
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{config: Config{IdleTimeout: timeout}, loop: l, copier: &copier{loop: l}, pairs: map[*pair]bool{}, metrics: newMetrics()}
	t.Cleanup(func() {
		s.copier.closePipes()
		l.end()
	})
	return s
}

// A stillClock is the clock of a loop. It stands still unless a test moves it.
type stillClock struct {
	*loop

	time time.Time
}

// stand makes the clock of a loop stand still.
func stand(l *loop) *stillClock {
	c := &stillClock{l, l.now}
	l.clock = func() time.Time { return c.time }
	return c
}

// jump moves the clock to the next time for which a task waits.
func (c *stillClock) jump() {
	if c.nextTimer.After(c.time) {
		c.time = c.nextTimer
	}
}

// E18: a sweep ends what has been idle for the timeout, or after the end of one direction for a twelfth of it, and nothing
// else.
func TestSweep(t *testing.T) {
	t.Parallel()
	const timeout, interval = time.Hour, 5 * time.Second
	s := sweeper(t, timeout)
	clock := stand(s.loop)
	began := clock.time
	idle, half, busy := carries(t, s), carries(t, s), carries(t, s)
	if err := half.client.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	s.loop.start(s.sweep)
	ended := map[*carried]time.Duration{}
	var sent time.Time
	if err := s.loop.run(func() bool {
		for _, c := range []*carried{idle, half, busy} {
			if ended[c] == 0 && c.closed {
				ended[c] = s.loop.now.Sub(began)
			}
		}
		switch {
		case !half.toHost.atEOF:
		case !sent.Equal(clock.time):
			sent = clock.time
			sends(t, busy.client, []byte("x"))
		case busy.last.Equal(clock.time): // it was carried
			clock.jump()
		}
		return ended[idle] > 0
	}); err != nil {
		t.Fatal(err)
	}
	if took := ended[half]; took < timeout/12 || took > timeout/12+interval {
		t.Errorf("a half-closed connection ended after %v, want %v", took, timeout/12)
	}
	if took := ended[idle]; took < timeout || took > timeout+interval {
		t.Errorf("an idle connection ended after %v, want %v", took, timeout)
	}
	if took := ended[busy]; took > 0 || !s.Open() {
		t.Errorf("a busy connection ended after %v", took)
	}
	for _, conn := range []net.Conn{idle.client, idle.host, half.client} {
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%v, want a reset", err)
		}
	}
}

// E17: the connection that has been idle longest makes room, if it is still idle.
func TestMakeRoom(t *testing.T) {
	t.Parallel()
	s := sweeper(t, time.Minute) // a connection may be closed for another one after a second
	if s.makeRoom() {
		t.Error("there is room without connections")
	}
	var all []*carried
	for i, idle := range []time.Duration{3 * time.Second, 5 * time.Second, 4 * time.Second, -time.Hour} {
		all = append(all, carries(t, s))
		all[i].last = s.loop.now.Add(-idle)
	}
	clock := stand(s.loop)
	s.loop.start(s.sweep)
	if err := s.loop.run(func() bool { clock.jump(); return len(s.longIdle) > 0 }); err != nil {
		t.Fatal(err)
	}
	all[2].last = s.loop.now // it has sent something since the sweep
	for _, want := range []*carried{all[1], all[0]} {
		if !s.makeRoom() || !want.closed {
			t.Errorf("another connection than the one that has been idle longest made room")
		}
	}
	if s.makeRoom() || all[2].closed || all[3].closed {
		t.Error("a busy connection made room")
	}
}
