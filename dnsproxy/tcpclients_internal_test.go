package dnsproxy

import (
	"log/slog"
	"net"
	"testing"
)

// A connection that was accepted just before its listener stopped is served, because its query
// may be on the way, unless there is no room.
func TestAcceptedBeforeStop(t *testing.T) {
	clients := newTCPClients(1, slog.New(slog.DiscardHandler))
	t.Cleanup(clients.close)
	l := &tcpListener{clients: clients}
	clients.stop(l)
	for i, want := range []bool{true, false} {
		conn, other := net.Pipe()
		t.Cleanup(func() { _ = conn.Close(); _ = other.Close() })
		c := &tcpConn{listener: l, conn: conn}
		if got := clients.add(c); got != want || c.drained.IsZero() == want {
			t.Errorf("connection %d: added %t, draining %t, want %t", i+1, got, !c.drained.IsZero(), want)
		}
	}
}
