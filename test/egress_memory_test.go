package test

import (
	"net"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// E5, E17: long beginnings of connections that say no name take a bounded amount of memory. Others are still
// carried.
func TestEgressLongBeginnings(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.serve(serverA+":443", greeter("one"))
	e.resolve("a.apps.example.org", serverA)
	e.capture()
	long := []byte("GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 60_000))
	const clients = 600
	refused := 0
	var open []net.Conn
	for range clients {
		conn := e.mustDial(vipWild, "443")
		_, _ = conn.Write(long) // which may fail, because the agent does not read all
		open = append(open, conn)
	}
	wait.Until(t, "the beginnings are refused or wait", func() bool {
		refused = int(e.refusals("limit"))
		return e.metric("nametap_egress_open_connections") <= 300
	})
	if refused == 0 || refused == clients {
		t.Errorf("%d of %d are refused", refused, clients)
	}
	conn := e.mustDial(vipWild, "443")
	if _, err := conn.Write(records(hello(t, "a.apps.example.org", 0), 16_384)); err != nil {
		t.Fatal(err)
	}
	greeting := make([]byte, 7)
	if _, err := conn.Read(greeting); err != nil || string(greeting) != "220 one" {
		t.Errorf("a short hello: %q, %v", greeting, err)
	}
	for _, conn := range open {
		conn.Close()
	}
	wait.Until(t, "long beginnings are read again", func() bool {
		conn := e.mustDial(vipWild, "443")
		defer conn.Close()
		if _, err := conn.Write(records(hello(t, "a.apps.example.org", 60_000), 16_384)); err != nil {
			return false
		}
		_, err := conn.Read(greeting)
		return err == nil && string(greeting) == "220 one"
	})
}
