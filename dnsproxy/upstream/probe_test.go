package upstream_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
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
			if !c.Load().Echo(wire.Name(query[12:end]), upstream.Arrival{}) {
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
		if _, from := ask(t, both, 0); from != well.spec().String() {
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
		if c.Echo(wire.Name(strings.TrimSuffix(name, "\x00")), upstream.Arrival{}) {
			t.Errorf("%q is an echo", name)
		}
	}
}

// F6: a probe that comes back from the client's own socket does not mean that the server loops. The
// socket is used no more.
func TestRedirectedProbe(t *testing.T) {
	t.Parallel()
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var logged testlog.Buffer
	c := client(t, upstream.Config{Logger: slog.New(slog.NewTextHandler(&logged, nil))})
	g := c.Group([]upstream.Spec{{Addr: conn.LocalAddr().(*net.UDPAddr).AddrPort()}}, upstream.Options{})
	reply := func(query []byte, to netip.AddrPort, rcode byte) {
		query[2] |= 0x80
		query[3] |= rcode
		if _, err := conn.WriteToUDPAddrPort(query, to); err != nil {
			t.Error(err)
		}
	}
	g.Suspect()
	probe := make([]byte, 1500)
	n, from, err := conn.ReadFromUDPAddrPort(probe)
	if err != nil {
		t.Fatal(err)
	}
	probe = probe[:n]
	if !c.Echo(wire.Name(probe[12:len(probe)-5]), upstream.Arrival{From: from}) {
		t.Errorf("the probe is not recognised: %q", probe)
	}
	reply(probe, from, 5)
	var serving sync.WaitGroup
	serving.Go(func() {
		buffer := make([]byte, 1500)
		for {
			n, source, err := conn.ReadFromUDPAddrPort(buffer)
			if err != nil {
				return
			}
			if source == from {
				t.Error("the socket is still used")
			}
			reply(buffer[:n], source, 3)
		}
	})
	for range 40 { // more than the number of sockets, of which each query takes one at random
		if _, _, err := g.Exchange(context.Background(), query(), 0); err != nil {
			t.Error(err)
		}
	}
	_ = conn.Close()
	serving.Wait()
	if st := c.Status()[0]; st.State != upstream.Up || st.LastError != "" || logged.String() != "" {
		t.Errorf("%+v, log:\n%s", st, &logged)
	}
}
