package discovery

import (
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/nametap/nametap/discovery/intake"
	"github.com/nametap/nametap/internal/connlimit"
)

// A boundedListener gives each connection a place. It closes a new connection at once if there are too many at its
// address, or too little memory is free. A listener that waits instead, such as netutil's, would let clients that hold
// connections keep out all others.
type boundedListener struct {
	net.Listener
	limit     *connlimit.Limit
	addresses *perAddress
	tooMany   func()                            // called for each connection that is closed because there are too many at its address
	full      func(place *connlimit.Place) bool // reports whether there is no memory for another connection, which has a place
}

// Accept returns the next connection that is within the bounds.
func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		give, ok := l.addresses.take(intake.AddressOf(conn.RemoteAddr()))
		if !ok {
			l.tooMany()
			_ = conn.Close() // the client notices
			continue
		}
		bounded := &boundedConn{Conn: conn, place: l.limit.Enter(conn), give: sync.OnceFunc(give)}
		if l.full(bounded.place) {
			_ = bounded.Close()
			continue
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetReadBuffer(socketBuffer) // both calls fail only if the connection has ended
			_ = tcp.SetWriteBuffer(socketBuffer)
		}
		return bounded, nil
	}
}

// perAddress bounds what each address takes: as many things at a time, those included that began within a minute. Its
// methods are safe for concurrent use.
type perAddress struct {
	most int

	mu    sync.Mutex
	taken map[netip.Addr]int
}

// take takes a thing for an address, unless the address has too many. The caller must call give once, when the thing ends.
func (a *perAddress) take(address netip.Addr) (give func(), ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.taken[address] >= a.most {
		return nil, false
	}
	a.taken[address]++
	minute := time.Now().Add(time.Minute)
	return func() {
		time.AfterFunc(time.Until(minute), func() {
			a.mu.Lock()
			defer a.mu.Unlock()
			if a.taken[address]--; a.taken[address] == 0 {
				delete(a.taken, address)
			}
		})
	}, true
}

// socketBuffer bounds the bytes that the kernel keeps for a connection in each direction; the kernel takes twice as
// much memory. Without the bound, the kernel keeps up to 4 MiB for a client that does not read.
const socketBuffer = 64 << 10

// boundedConn is a connection that the listener counts until it is closed.
type boundedConn struct {
	net.Conn
	place *connlimit.Place
	give  func()
}

// Close closes the connection.
func (c *boundedConn) Close() error {
	c.place.Leave()
	c.give()
	return c.Conn.Close()
}
