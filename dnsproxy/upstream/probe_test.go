package upstream_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// F6: a server whose queries come back is logged and no longer used; the others are.
func TestLoop(t *testing.T) {
	t.Parallel()
	var c atomic.Pointer[upstream.Client]
	var echoes atomic.Int64
	loops := serve(t, func(query []byte, _ string) [][]byte {
		// A forwarder in a loop would send this probe to the agent.
		if end := len(query) - 5; bytes.Contains(query, []byte("\x12nametap-loop-probe\x00")) {
			if !c.Load().Echo(wire.Name(query[12:end]), netip.AddrPort{}) {
				t.Errorf("the probe is not recognised: %q", query)
			}
			echoes.Add(1)
			refused := append([]byte(nil), query...)
			refused[2] |= 0x80
			refused[3] |= 5
			return [][]byte{refused}
		}
		return [][]byte{}
	})
	well := serve(t, func(query []byte, _ string) [][]byte {
		r := append([]byte(nil), query...)
		r[2] |= 0x80
		r[3] |= 3
		return [][]byte{r}
	})
	var logged testlog.Buffer
	c.Store(client(t, upstream.Config{Logger: slog.New(slog.NewTextHandler(&logged, nil))}))
	both := c.Load().Group(specs(loops, well), upstream.Options{})
	alone := c.Load().Group(specs(loops), upstream.Options{})
	inFlight := make(chan error)
	go func() {
		_, _, err := alone.Exchange(context.Background(), query(), 0)
		inFlight <- err
	}()
	wait.Until(t, "a query is in flight", func() bool { return len(loops.queries()) > 0 })
	for range 10 {
		both.Suspect()
	}
	if err := <-inFlight; !errors.Is(err, upstream.ErrLoop) {
		t.Errorf("in flight: %v", err)
	}
	wait.Until(t, "the loop is found", func() bool {
		for _, st := range c.Load().Status() {
			if st.Spec == loops.spec() && st.State == upstream.Looping {
				return st.LastError != ""
			}
		}
		return false
	})
	before := len(loops.queries())
	for range 10 {
		if _, from := ask(t, both, 0); from != well.spec() {
			t.Errorf("answered by %v", from)
		}
	}
	if n := len(loops.queries()); n != before || echoes.Load() != 1 {
		t.Errorf("it is still asked: %d times, %d echoes", n-before, echoes.Load())
	}
	if text := logged.String(); strings.Count(text, loops.addr.String()) != 1 {
		t.Errorf("log:\n%s", text)
	}
	if _, _, err := alone.Exchange(context.Background(), query(), 0); !errors.Is(err, upstream.ErrLoop) {
		t.Error(err)
	}
	for _, st := range c.Load().Status() {
		if st.Spec == well.spec() && st.State != upstream.Up {
			t.Errorf("%+v", st)
		}
	}
}

// F6: only probes that the client has sent are echoes.
func TestEcho(t *testing.T) {
	t.Parallel()
	c := client(t, upstream.Config{})
	for _, name := range []string{
		"", "\x00", "\x03www\x07example\x00", "\x12nametap-loop-probe\x00",
		"\x20" + strings.Repeat("0", 32) + "\x12nametap-loop-probe\x00",
		"\x20" + strings.Repeat("x", 32) + "\x12nametap-loop-probe\x00",
	} {
		if c.Echo(wire.Name(strings.TrimSuffix(name, "\x00")), netip.AddrPort{}) {
			t.Errorf("%q is an echo", name)
		}
	}
}
