package discovery

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/nametap/nametap/discovery/intake"
)

// spareConns is how many connections there may be beyond MaxClients: some connections have no stream yet, or no longer
// have one.
const spareConns = 1000

// A boundedListener closes a new connection at once if there are too many connections, or too little memory is free.
type boundedListener struct {
	net.Listener
	max       int64 // bounds open
	open      atomic.Int64
	addresses *intake.Group[netip.Addr]
	tooMany   func()      // called for each connection that is closed because there are too many
	full      func() bool // reports whether there is no memory for another connection
}

// Accept returns the next connection that is within the bounds.
func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		address := intake.AddressOf(conn.RemoteAddr())
		switch {
		case !l.addresses.Take(address):
			l.tooMany()
			_ = conn.Close() // the client notices
			continue
		case l.open.Add(1) > l.max:
			l.tooMany()
		case l.full():
		default:
			boundBuffers(conn)
			return &boundedConn{Conn: conn, listener: l, address: address}, nil
		}
		l.open.Add(-1)
		l.addresses.Give(address)
		_ = conn.Close() // the client notices
	}
}

// socketBuffer bounds the bytes that the kernel keeps for a connection in each direction; the kernel takes twice as
// much memory. Without the bound, the kernel keeps up to 4 MiB for a client that does not read.
const socketBuffer = 64 << 10

// boundBuffers bounds the buffers of the kernel for a connection.
func boundBuffers(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetReadBuffer(socketBuffer) // both calls fail only if the connection has ended
		_ = tcp.SetWriteBuffer(socketBuffer)
	}
}

// boundedConn is a connection that the listener counts until it is closed.
type boundedConn struct {
	net.Conn
	listener *boundedListener
	address  netip.Addr
	once     sync.Once
}

// Close closes the connection.
func (c *boundedConn) Close() error {
	c.once.Do(func() {
		c.listener.open.Add(-1)
		c.listener.addresses.Give(c.address)
	})
	return c.Conn.Close()
}
