package test

import (
	"io"
	"net"
	"testing"
	"time"
)

// dialMultipath connects over Multipath TCP (RFC 8684), which the other side may not have.
func dialMultipath(t *testing.T, addr string) (net.Conn, error) {
	t.Helper()
	dialer := net.Dialer{Timeout: patience}
	dialer.SetMultipathTCP(true)
	conn, err := dialer.DialContext(t.Context(), "tcp", addr)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { conn.Close() })
	return conn, conn.SetDeadline(time.Now().Add(patience))
}

// E1: a client of Multipath TCP reaches the host.
func TestEgressMultipath(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":7", greeter("one"))
	e.capture()
	for _, vip := range []string{vipA, vip6A} {
		var conn net.Conn
		var err error
		e.Run(func() { conn, err = dialMultipath(t, net.JoinHostPort(vip, "7")) })
		if err != nil {
			t.Fatal(err)
		}
		greeting := make([]byte, len("220 one\n"))
		if _, err := io.ReadFull(conn, greeting); err != nil || string(greeting) != "220 one\n" {
			t.Errorf("%s: %q, %v", vip, greeting, err)
		}
	}
}
