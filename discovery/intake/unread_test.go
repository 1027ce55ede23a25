package intake

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"

	"github.com/nametap/nametap/internal/connlimit"
)

// fakeConn is a connection of a client at an address.
type fakeConn struct {
	net.Conn
	bytes.Buffer
	address net.TCPAddr
	closed  bool
}

func (c *fakeConn) Read(p []byte) (int, error)  { return c.Buffer.Read(p) }
func (c *fakeConn) Write(p []byte) (int, error) { return c.Buffer.Write(p) }
func (c *fakeConn) RemoteAddr() net.Addr        { return &c.address }
func (c *fakeConn) Close() error {
	c.closed = true
	return nil
}

// D61: what has arrived and was not read is held. Beyond the bound, the address that holds most loses a connection.
func TestUnread(t *testing.T) {
	limit := connlimit.New("test", 10, 10_000)
	defer limit.Close()
	client := func(ip string) (*fakeConn, net.Conn) {
		raw := &fakeConn{address: net.TCPAddr{IP: net.ParseIP(ip), Port: 1}}
		place := func(net.Conn) *connlimit.Place { return limit.Enter(raw) }
		conn, _, err := Credentials(insecure.NewCredentials(), place).Clone().ServerHandshake(raw)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(raw, http2.ClientPreface)
		return raw, conn
	}
	send := func(raw *fakeConn, conn net.Conn, n int) {
		if err := http2.NewFramer(raw, nil).WriteData(1, false, make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, conn); err != nil {
			t.Fatal(err)
		}
	}
	read := func(raw *fakeConn, conn net.Conn, n int) {
		connection := ConnectionOf(peer.NewContext(context.Background(), &peer.Peer{Addr: conn.RemoteAddr()}))
		if got := connection.Address().String(); got != raw.address.IP.String() {
			t.Errorf("the address is %s, want %v", got, raw.address.IP)
		}
		connection.Read(n)
	}
	want := func(n int64) {
		t.Helper()
		if got := limit.Held(); got != n {
			t.Errorf("%d bytes are held, want %d", got, n)
		}
	}
	rawSmall, small := client("10.0.0.1")
	raw, large := client("10.0.0.2")
	send(rawSmall, small, 4000)
	send(raw, large, 5500)
	want(9500 + 2*frameCost)
	send(rawSmall, small, 300)
	if rawSmall.closed || !raw.closed {
		t.Error("the connection that holds more is open")
	}
	_ = large.Close()
	read(raw, large, 5500) // a handler may still have what it has received
	want(4300 + 2*frameCost)
	read(rawSmall, small, 4300)
	want(0)
	for range 20 { // each frame costs more than its byte
		send(rawSmall, small, 1)
	}
	want(20 + 20*frameCost)
	read(rawSmall, small, 10)
	want(10 + 10*frameCost)
	_ = small.Close()
	want(0)
}
