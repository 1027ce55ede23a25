package intake

import (
	"context"
	"net"
	"net/netip"
	"sync"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/nametap/nametap/internal/connlimit"
)

// frameCost is how many bytes gRPC needs for a frame besides its content: a client may send each byte in a frame of its
// own.
const frameCost = 128

// Credentials returns credentials like inner. A server that uses them counts the bytes of requests that have arrived but
// were not read yet, and that the place of a connection holds. Place returns the place of an accepted connection.
func Credentials(inner credentials.TransportCredentials, place func(net.Conn) *connlimit.Place) credentials.TransportCredentials {
	return counting{inner, place}
}

// counting are credentials of connections that are counted.
type counting struct {
	credentials.TransportCredentials
	place func(net.Conn) *connlimit.Place
}

// ServerHandshake does the handshake, and returns a connection that is counted.
func (c counting) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	inner, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	return &conn{Conn: inner, place: c.place(raw), address: AddressOf(raw.RemoteAddr()), frames: newFrames()}, info, nil
}

// Clone returns a copy.
func (c counting) Clone() credentials.TransportCredentials {
	return counting{c.TransportCredentials.Clone(), c.place}
}

// AddressOf returns the IP address of a network address; the zero Addr if it has none.
func AddressOf(a net.Addr) netip.Addr {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// conn is a connection whose unread requests are counted.
type conn struct {
	net.Conn
	place   *connlimit.Place
	address netip.Addr
	frames  frames // for the goroutine that reads

	mu     sync.Mutex
	unread int  // bytes that no handler has read, also of streams that have ended
	held   int  // bytes that the place holds
	closed bool // the connection is closed, and holds nothing any more
}

// Read reads, and counts what it has read. While a part of a request is unread, the rest of it is awaited.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if count, data := c.frames.read(p[:n]); count > 0 || data != 0 {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.unread == 0 {
			c.place.Await()
		}
		c.changeLocked(data, data+count*frameCost)
	}
	return n, err
}

// Close gives back all bytes, and closes the connection.
func (c *conn) Close() error {
	c.mu.Lock()
	c.changeLocked(0, -c.held)
	c.closed = true
	c.mu.Unlock()
	return c.Conn.Close()
}

// changeLocked adds to the bytes that are unread and held, unless the connection is closed.
func (c *conn) changeLocked(unread, held int) {
	if !c.closed {
		c.unread, c.held = c.unread+unread, c.held+held
		c.place.Hold(int64(held))
	}
}

// RemoteAddr returns the address of the client, by which [ConnectionOf] finds the connection of a stream.
func (c *conn) RemoteAddr() net.Addr { return remote{c.Conn.RemoteAddr(), c} }

// remote is the address of a client.
type remote struct {
	net.Addr
	conn *conn
}

// A Connection is the connection of a stream. The zero value is a connection that is not counted.
type Connection struct{ conn *conn }

// ConnectionOf returns the connection of the stream with a context.
func ConnectionOf(ctx context.Context) Connection {
	if p, ok := peer.FromContext(ctx); ok {
		if a, ok := p.Addr.(remote); ok {
			return Connection{a.conn}
		}
	}
	return Connection{}
}

// Address returns the address of the client.
func (c Connection) Address() netip.Addr {
	if c.conn == nil {
		return netip.Addr{}
	}
	return c.conn.address
}

// Read gives back what n bytes hold that a handler has read. When all is read, the client waits for the server.
func (c Connection) Read(n int) {
	if c.conn == nil {
		return
	}
	c.conn.mu.Lock()
	defer c.conn.mu.Unlock()
	back := c.conn.held
	if n < c.conn.unread {
		back = c.conn.held * n / c.conn.unread
	}
	if c.conn.changeLocked(-n, -back); c.conn.unread <= 0 {
		c.conn.place.Serve()
	}
}
