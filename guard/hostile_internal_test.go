package guard

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestAgentsAreBounded connects more agents than the guard serves, and ends one. The guard is root
// and has to keep descriptors and memory for the removal. V2.
func TestAgentsAreBounded(t *testing.T) {
	t.Parallel()
	listener, err := listen(t.Context(), filepath.Join(t.TempDir(), "socket"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	events, done := make(chan event), make(chan struct{})
	go func() {
		defer close(done)
		accept(ctx, listener, events)
	}()
	t.Cleanup(func() {
		cancel()
		_ = listener.Close()
		wait.For(t, "it ends", done)
	})
	dial := func() net.Conn {
		conn, err := new(net.Dialer).DialContext(t.Context(), "unix", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		if _, err := conn.Write([]byte("{}\n")); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	first := dial()
	<-events
	for range maxAgents - 1 {
		dial()
		<-events
	}
	dial()
	_ = first.Close()
	if e := <-events; !e.ended {
		t.Errorf("the guard serves more than %d agents", maxAgents)
	}
	if e := <-events; e.ended {
		t.Error("the agent that waited is not served")
	}
}

// A hostile connection sends bytes, and ends. It takes all replies.
type hostile struct {
	net.Conn // nil
	bytes.Reader
}

func (h *hostile) Read(b []byte) (int, error)       { return h.Reader.Read(b) }
func (h *hostile) Write(b []byte) (int, error)      { return len(b), nil }
func (h *hostile) Close() error                     { return nil }
func (h *hostile) SetReadDeadline(time.Time) error  { return nil }
func (h *hostile) SetWriteDeadline(time.Time) error { return nil }

// FuzzMessages sends bytes to a guard. Whatever an agent says that does not answer, it keeps the
// rules for Patience at most. Nothing is left of it after its end. V2.
func FuzzMessages(f *testing.F) {
	own, err := netNS()
	if err != nil {
		f.Fatal(err)
	}
	for _, lines := range []string{
		`{"phase":"starting","failOpen":true,"netNS":"OWN"}` + "\n" + `{"phase":"answering","failOpen":true,"netNS":"OWN"}` + "\n",
		`{"phase":"ending","netNS":"OWN"}` + "\n" + `{"phase":"removed","netNS":"OWN"}` + "\n" + `{"phase":"?","netNS":"OWN"}`,
		`{"phase":"starting","netNS":"4:1"}` + "\n[[[[\n\x00\n",
		strings.Repeat("[", 70_000),
	} {
		f.Add([]byte(lines))
	}
	f.Fuzz(func(t *testing.T, lines []byte) {
		lines = bytes.ReplaceAll(lines, []byte("OWN"), []byte(own))
		conn := &hostile{Reader: *bytes.NewReader(lines)}
		s := &server{Config: Config{Patience: Patience, Log: slog.New(slog.DiscardHandler)}, agents: map[net.Conn]*agent{}}
		events := make(chan event)
		go read(t.Context(), conn, events)
		for ended := false; !ended; {
			e := <-events
			s.handle(e)
			if ended = e.ended; !s.answering() && s.end().After(time.Now().Add(Patience)) {
				t.Errorf("the rules stay until %v", s.end())
			}
		}
		if len(s.agents) > 0 {
			t.Errorf("agents are left: %v", s.agents)
		}
	})
}
