package intake

import (
	"bytes"
	"context"
	"io"
	"net"
	"slices"
	"testing"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"
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

// fakeClient is a client of a budget.
type fakeClient struct {
	t    *testing.T
	raw  *fakeConn
	conn net.Conn
}

func newClient(t *testing.T, b *Budget, ip string) *fakeClient {
	t.Helper()
	c := &fakeClient{t: t, raw: &fakeConn{address: net.TCPAddr{IP: net.ParseIP(ip), Port: 1}}}
	var err error
	if c.conn, _, err = b.Credentials(insecure.NewCredentials()).Clone().ServerHandshake(c.raw); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(c.raw, http2.ClientPreface)
	return c
}

// send sends a frame of n bytes, and the server receives it.
func (c *fakeClient) send(n int) {
	c.t.Helper()
	if err := http2.NewFramer(c.raw, nil).WriteData(1, false, make([]byte, n)); err != nil {
		c.t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, c.conn); err != nil {
		c.t.Fatal(err)
	}
}

// read is a handler that reads n bytes.
func (c *fakeClient) read(n int) {
	connection := ConnectionOf(peer.NewContext(context.Background(), &peer.Peer{Addr: c.conn.RemoteAddr()}))
	if got := connection.Address().String(); got != c.raw.address.IP.String() {
		c.t.Errorf("the address is %s, want %v", got, c.raw.address.IP)
	}
	connection.Read(n)
}

// D61: beyond the budget, the address that holds most loses the connection that holds most. What was read is not held.
func TestBudget(t *testing.T) {
	var closed []string
	b := NewBudget(10_000, func(a net.Addr) { closed = append(closed, a.String()) })
	small, first, second := newClient(t, b, "10.0.0.1"), newClient(t, b, "10.0.0.2"), newClient(t, b, "10.0.0.2")
	small.send(4000)
	first.send(2000)
	second.send(3000)
	if len(closed) > 0 {
		t.Fatalf("closed within the budget: %v", closed)
	}
	small.send(900) // it holds more than each of the others, and less than both together
	if !second.raw.closed || first.raw.closed || small.raw.closed || !slices.Equal(closed, []string{"10.0.0.2:1"}) {
		t.Errorf("closed %v: first %v, second %v, small %v", closed, first.raw.closed, second.raw.closed, small.raw.closed)
	}
	second.read(3000) // a handler may still have what it has received
	small.read(4900)
	if got, want := b.Held(), 2000+frameCost; got != want {
		t.Errorf("%d bytes are held, want %d", got, want)
	}
	for range 20 { // each frame costs more than its byte
		first.send(1)
	}
	if got, want := b.Held(), 2020+21*frameCost; first.raw.closed || got != want {
		t.Errorf("%d bytes are held, want %d", got, want)
	}
	if first.read(1010); b.Held() != (2020+21*frameCost)/2 {
		t.Errorf("%d bytes are held", b.Held())
	}
	_, _ = first.conn.Close(), small.conn.Close()
	if b.Held() != 0 || len(b.addresses) != 0 {
		t.Errorf("%d bytes are held by %d addresses", b.Held(), len(b.addresses))
	}
}
