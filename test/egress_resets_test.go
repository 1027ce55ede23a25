package test

import (
	"errors"
	"syscall"
	"testing"
)

// E13: the rules stay until all connections that are left after the drain are reset. Without them, the kernel would
// not translate the resets, and clients would wait for ever.
func TestEgressDrainMany(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.serve(serverA+":7", greeter("one"))
	a := e.capture("--drain", "1s")
	var conns []*openConn
	for range 1500 { // four descriptors each, in this process
		conns = append(conns, e.open())
	}
	a.end(terminate)
	for i, conn := range conns {
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("client %d of %d: %v, want a reset", i, len(conns), err)
		}
	}
	if e.captured() {
		t.Error("rules are left")
	}
}
