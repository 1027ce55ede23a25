package egress

import (
	"errors"
	"log/slog"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// isReset reports whether a peer is told a reset.
func isReset(peer net.Conn) bool {
	_, err := peer.Read(make([]byte, 1))
	return errors.Is(err, syscall.ECONNRESET)
}

// E17, E18: a sweep ends what has been idle for the timeout, or after the end of one direction for a twelfth of it, and
// nothing else. At the limit, what has been idle longest gives way.
func TestSweep(t *testing.T) {
	t.Parallel()
	s := bare(t, 4)
	timeout := s.config.IdleTimeout
	idle, half := carries(t, s), carries(t, s)
	for _, c := range []*carried{idle, half} {
		c.copies()
		wait.Until(t, "both directions wait", func() bool { return c.toHost.reading.Load() && c.toClient.reading.Load() })
	}
	if err := half.peer.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := half.far.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Fatal(n, err)
	}
	wait.Until(t, "one direction has ended", half.halfClosed)
	began := time.Now()
	busy := carries(t, s)
	for _, step := range []struct {
		after time.Duration
		ended []*carried
	}{{timeout/12 - time.Minute, nil}, {timeout / 12, []*carried{half}}, {timeout - time.Minute, nil}, {timeout, []*carried{idle}}} {
		busy.place.Serve()
		open := s.metrics.open.Load()
		s.sweep(began.Add(step.after))
		for _, c := range step.ended {
			wait.For(t, "the connection ends", c.ended)
			if !isReset(c.peer) {
				t.Errorf("after %v: want a reset", step.after)
			}
		}
		wait.Until(t, "the connections have ended, and no other", func() bool { return s.metrics.open.Load() == open-int64(len(step.ended)) })
	}
	busy.place.Serve()
	first := carries(t, s)
	busy.place.Serve()
	for range 3 {
		carries(t, s)
	}
	if first.place.Hold(0) || !isReset(first.peer) || !busy.place.Hold(0) {
		t.Error("want that the idle connection gives way")
	}
}

// E9: a reset of the client is noticed although no direction reads from it: the host takes no more bytes.
func TestClientGone(t *testing.T) {
	t.Parallel()
	s := bare(t, 1)
	c := carries(t, s)
	c.copies()
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		for err := error(nil); err == nil; {
			_, err = c.peer.Write(make([]byte, 1<<20)) // until the reset
		}
	}()
	var before int64
	wait.Until(t, "the host takes no more", func() bool {
		now := c.counts.sent.Load()
		stalled := now > 0 && now == before && !c.toHost.reading.Load()
		before = now
		return stalled
	})
	reset(c.peer)
	wait.For(t, "the client has gone", stop)
	s.sweep(time.Now())
	wait.For(t, "the connection ends", c.ended)
}

// E1, E13, E17: a client of the listener itself is reset; the server ends, and closes its listener.
func TestRun(t *testing.T) {
	t.Parallel()
	cfg := DefaultConfig()
	cfg.Addr, cfg.Logger, cfg.Drain = "127.0.0.1:0", slog.New(slog.DiscardHandler), time.Hour
	s, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(t.Context()) }()
	client, err := net.Dial("tcp", s.Addrs()[0].String())
	if err == nil {
		defer client.Close()
		_, err = client.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a client of no VIP: %v, want a reset", err)
	}
	s.End(true)
	if err := wait.For(t, "the server ends", ended); err != nil {
		t.Error(err)
	}
}
