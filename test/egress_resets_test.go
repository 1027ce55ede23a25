package test

import (
	"errors"
	"io"
	"net"
	"sync"
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

// E9: a host's reset is passed on as a reset, whenever it comes, so that no client takes what it has for whole.
func TestEgressResetsMany(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.serve(serverA+":7", func(conn *net.TCPConn) {
		for range 24 {
			if _, err := conn.Write(make([]byte, 50_000)); err != nil {
				return
			}
		}
		_ = conn.SetLinger(0)
	})
	e.capture()
	var clients sync.WaitGroup
	for range 60 {
		clients.Go(func() {
			for range 30 {
				conn, err := e.dialTCP(vipA, "7")
				switch {
				case errors.Is(err, syscall.ECONNRESET): // it came before the client saw that it was connected
					continue
				case err != nil:
					t.Error(err)
					return
				}
				if n, err := io.Copy(io.Discard, conn); err == nil {
					t.Errorf("the data ended after %d bytes, want a reset", n)
				}
				conn.Close()
			}
		})
	}
	clients.Wait()
}
