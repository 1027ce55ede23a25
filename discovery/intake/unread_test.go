package intake

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

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

// A request has a number of bytes in a stream.
type request int

func (r request) Bytes() int { return int(r) }

// connect returns both sides of a connection of a client at an address.
func connect(t *testing.T, limit *connlimit.Limit, ip string) (*fakeConn, net.Conn) {
	t.Helper()
	raw := &fakeConn{address: net.TCPAddr{IP: net.ParseIP(ip), Port: 1}}
	place := func(net.Conn) *connlimit.Place { return limit.Enter(raw) }
	conn, _, err := Credentials(insecure.NewCredentials(), place).Clone().ServerHandshake(raw)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(raw, http2.ClientPreface)
	return raw, conn
}

// send sends n bytes of a request, which the server receives.
func send(t *testing.T, raw *fakeConn, conn net.Conn, n int) {
	t.Helper()
	if err := http2.NewFramer(raw, nil).WriteData(1, false, make([]byte, n)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, conn); err != nil {
		t.Fatal(err)
	}
}

// connectionOf returns the connection of a stream.
func connectionOf(conn net.Conn) *Connection {
	return ConnectionOf(peer.NewContext(context.Background(), &peer.Peer{Addr: conn.RemoteAddr()}))
}

// D61: what has arrived and was not read is held. Beyond the bound, the address that holds most loses a connection.
func TestUnread(t *testing.T) {
	limit := connlimit.New("test", 10, 10_000)
	defer limit.Close()
	client := func(ip string) (*fakeConn, net.Conn) { return connect(t, limit, ip) }
	send := func(raw *fakeConn, conn net.Conn, n int) { send(t, raw, conn, n) }
	read := func(conn net.Conn, n int) {
		if err := connectionOf(conn).Receive(func(any) error { return nil }, request(n)); err != nil {
			t.Fatal(err)
		}
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
	read(large, 5500) // a handler may still have what it has received
	want(4300 + 2*frameCost)
	read(small, 4300)
	want(0)
	for range 20 { // each frame costs more than its byte
		send(rawSmall, small, 1)
	}
	want(20 + 20*frameCost)
	read(small, 10)
	want(10 + 10*frameCost)
	_ = small.Close()
	want(0)
}

// D62: a connection ends that has begun more streams than an agent does.
func TestStreams(t *testing.T) {
	limit := connlimit.New("test", 10, 10_000)
	defer limit.Close()
	raw, conn := connect(t, limit, "10.0.0.1")
	framer := http2.NewFramer(raw, nil)
	for i := range uint32(maxStreams + 1) {
		if _, err := io.Copy(io.Discard, conn); err != nil {
			t.Fatalf("after %d streams: %v", i, err)
		}
		if err := framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 2*i + 1, EndHeaders: true}); err != nil {
			t.Fatal(err)
		}
		if err := framer.WriteRSTStream(2*i+1, http2.ErrCodeCancel); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := io.Copy(io.Discard, conn); err == nil {
		t.Errorf("no error after %d streams", maxStreams+1)
	}
}

// TestWaiting lets memory run out. The client that has not sent the rest of its request loses its connection, and not one
// that waits for the server, which reviews its token or handles another request, although it has waited longer.
func TestWaiting(t *testing.T) { // D33, D61
	for receiving := range 2 {
		synctest.Test(t, func(t *testing.T) {
			limit := connlimit.New("test", 10, 10_000)
			defer limit.Close()
			ended := make(chan struct{})
			defer close(ended)
			receive := func(conn net.Conn) {
				go func() {
					_ = connectionOf(conn).Receive(func(any) error {
						<-ended
						return nil
					}, nil)
				}()
				synctest.Wait()
			}
			rawWaiting, waiting := connect(t, limit, "10.0.0.1")
			connectionOf(waiting).Begin()
			for range receiving {
				connectionOf(waiting).Begin()
				receive(waiting)
			}
			send(t, rawWaiting, waiting, 4000)
			time.Sleep(time.Millisecond) //nolint:forbidigo // of the bubble's clock
			rawAwaited, awaited := connect(t, limit, "10.0.0.2")
			connectionOf(awaited).Begin()
			receive(awaited)
			send(t, rawAwaited, awaited, 4000)
			time.Sleep(5 * time.Second) //nolint:forbidigo // of the bubble's clock
			rawLast, last := connect(t, limit, "10.0.0.3")
			send(t, rawLast, last, 3000)
			if rawWaiting.closed || !rawAwaited.closed || rawLast.closed {
				t.Errorf("beside %d streams: closed are the one that waits: %t, the one that is awaited: %t, the last one: %t",
					receiving, rawWaiting.closed, rawAwaited.closed, rawLast.closed)
			}
			connectionOf(waiting).End()
		})
	}
}
