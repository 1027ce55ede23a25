package test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// E13: 1,000 idle and 100 busy connections over restarts by systemd. All go on for the drain: what busy ones have
// sent arrives, whole and in order. Then each is reset, at both ends. Clients that come meanwhile wait for the next
// agent, and DNS is answered all the time.
func TestEgressBusyRestarts(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.serve(serverA+":7", greeter("one"))
	e.asService("127.0.0.1:"+egressPort, "[::1]:"+egressPort)
	const idle, busy, drain = 1000, 100, 5 * time.Second
	e.flags = append(e.flags, "--drain", drain.String())
	a := e.held(e.start())
	asker := e.askOften()
	for restart := range 2 {
		conns := make([]*openConn, 0, idle)
		for range idle {
			conns = append(conns, e.open())
		}
		ends := make(chan error, busy)
		var exchanged atomic.Int64
		for range busy {
			conn := e.open()
			go func() { ends <- conn.exchange(&exchanged) }()
		}
		wait.Until(t, "busy connections exchange data", func() bool { return exchanged.Load() > 10*busy })
		if err := a.Process.Signal(handOver); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		wait.Until(t, "the agent drains", func() bool { return strings.HasSuffix(e.get("/healthz/ready"), "draining\n") })
		waiting := []*openConn{{e.mustDial(vipA, "7"), e}, {e.mustDial(vipA, "7"), e}}
		before := exchanged.Load()
		wait.Until(t, "busy connections go on during the drain", func() bool { return exchanged.Load() > before+5*busy })
		conns[0].lives("the drain began")
		wait.For(t, "the agent ends", a.ended)
		if took := time.Since(began); took < drain {
			t.Errorf("restart %d: it took %v, want the drain of %v: connections were open", restart, took, drain)
		}
		for range busy {
			if err := wait.For(t, "a busy connection is reset", ends); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
				t.Errorf("restart %d: a busy connection: %v, want a reset", restart, err)
			}
		}
		for i, conn := range conns {
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Fatalf("restart %d: idle connection %d: %v, want a reset", restart, i, err)
			}
		}
		a = e.held(e.start())
		for _, conn := range waiting {
			greeting := make([]byte, len("220 one\n"))
			if _, err := io.ReadFull(conn, greeting); err != nil || string(greeting) != "220 one\n" {
				t.Errorf("restart %d: a client that waited: %q, %v", restart, greeting, err)
			}
			conn.Close()
		}
		wait.Until(t, "the next agent has no connections of the last one", func() bool { return e.metric("nametap_egress_open_connections") == 0 })
		asker.phase(fmt.Sprintf("restart %d", restart))
	}
}

// exchange sends blocks and reads their echo, some MB a second, until the connection fails. It returns the error.
func (c *openConn) exchange(exchanged *atomic.Int64) error {
	block, echo := make([]byte, 20_000), make([]byte, 20_000)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for n := 0; ; n++ {
		<-tick.C
		for i := range block {
			block[i] = byte(n + i/256)
		}
		if _, err := c.Write(block); err != nil {
			return err
		}
		if _, err := io.ReadFull(c, echo); err != nil {
			return err
		}
		if !bytes.Equal(block, echo) {
			return fmt.Errorf("block %d differs", n)
		}
		exchanged.Add(1)
	}
}
