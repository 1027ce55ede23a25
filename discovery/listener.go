package discovery

import (
	"net"
	"net/netip"
	"sync"

	"github.com/nametap/nametap/discovery/intake"
	"github.com/nametap/nametap/internal/connlimit"
)

// spareConns is how many connections there may be beyond MaxClients: some connections have no stream yet, or no longer
// have one.
const spareConns = 1000

// A boundedListener gives each connection a place. It closes a new connection at once if there are too many at its
// address, or too little memory is free.
type boundedListener struct {
	net.Listener
	limit     *connlimit.Limit
	addresses *intake.Group[netip.Addr]
	tooMany   func()      // called for each connection that is closed because there are too many at its address
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
		case l.full():
			l.addresses.Give(address)
		default:
			boundBuffers(conn)
			return &boundedConn{Conn: conn, listener: l, address: address, place: l.limit.Enter(conn)}, nil
		}
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
	place    *connlimit.Place
	once     sync.Once
}

// placeOf returns the place of a connection.
func placeOf(conn net.Conn) *connlimit.Place { return conn.(*boundedConn).place }

// Close closes the connection.
func (c *boundedConn) Close() error {
	c.once.Do(func() {
		c.place.Leave()
		c.listener.addresses.Give(c.address)
	})
	return c.Conn.Close()
}
