package intake

import (
	"context"
	"net"
	"net/netip"
	"sync"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// frameCost is how many bytes gRPC needs for a frame besides its content: a client may send each byte in a frame of its
// own.
const frameCost = 128

// A Budget bounds the bytes of requests that have arrived but were not read yet. Its methods are safe for concurrent
// use.
type Budget struct {
	max     int
	onClose func(net.Addr) // called for each connection that is closed

	mu        sync.Mutex
	held      int
	addresses map[netip.Addr]*holder
}

// A holder is an address that holds bytes of a budget.
type holder struct {
	held  int
	conns map[*conn]struct{} // connections that hold bytes
}

// NewBudget returns a budget. The parameter limit is its number of bytes. The budget calls onClose for each connection
// that it closes.
func NewBudget(limit int, onClose func(net.Addr)) *Budget {
	return &Budget{max: limit, onClose: onClose, addresses: map[netip.Addr]*holder{}}
}

// Held returns how many bytes are held.
func (b *Budget) Held() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.held
}

// Credentials returns credentials like inner. A server that uses them counts the bytes of the budget that its
// connections hold.
func (b *Budget) Credentials(inner credentials.TransportCredentials) credentials.TransportCredentials {
	return counting{inner, b}
}

// counting are credentials of connections that are counted.
type counting struct {
	credentials.TransportCredentials
	budget *Budget
}

// ServerHandshake does the handshake, and returns a connection that is counted.
func (c counting) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	inner, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	return &conn{Conn: inner, raw: raw, budget: c.budget, address: AddressOf(raw.RemoteAddr()), frames: newFrames()}, info, nil
}

// Clone returns a copy.
func (c counting) Clone() credentials.TransportCredentials {
	return counting{c.TransportCredentials.Clone(), c.budget}
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
	raw     net.Conn // below TLS
	budget  *Budget
	address netip.Addr
	frames  frames // for the goroutine that reads

	// The fields below are guarded by budget.mu.

	unread int  // bytes that no handler has read, also of streams that have ended
	held   int  // bytes of the budget
	closed bool // the connection is closed, and holds nothing any more
}

// Read reads, and counts what it has read.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if count, data := c.frames.read(p[:n]); count > 0 || data != 0 {
		c.budget.add(c, data, data+count*frameCost)
	}
	return n, err
}

// Close gives back all bytes of the budget, and closes the connection.
func (c *conn) Close() error {
	c.budget.mu.Lock()
	c.budget.removeLocked(c)
	c.budget.mu.Unlock()
	return c.Conn.Close()
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

// Read counts bytes that a handler has read.
func (c Connection) Read(n int) {
	if c.conn != nil {
		c.conn.budget.read(c.conn, n)
	}
}

// add counts bytes that have arrived, and what they cost. While more than the budget is held, it closes the connection
// that largestLocked returns.
func (b *Budget) add(c *conn, bytes, cost int) {
	var over []*conn
	b.mu.Lock()
	if !c.closed {
		c.unread += bytes
		b.changeLocked(c, cost)
	}
	for b.held > b.max {
		largest := b.largestLocked()
		b.removeLocked(largest)
		over = append(over, largest)
	}
	b.mu.Unlock()
	for _, c := range over {
		_ = c.raw.Close() // closing the TLS connection would first send the client a message
		b.onClose(c.Conn.RemoteAddr())
	}
}

// read gives back the cost of n bytes that a handler has read.
func (b *Budget) read(c *conn, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.closed {
		return
	}
	back := c.held
	if n < c.unread {
		back = c.held * n / c.unread
	}
	c.unread -= n
	b.changeLocked(c, -back)
}

// changeLocked adds delta to the number of bytes that a connection holds.
func (b *Budget) changeLocked(c *conn, delta int) {
	h := b.addresses[c.address]
	if h == nil {
		h = &holder{conns: map[*conn]struct{}{}}
		b.addresses[c.address] = h
	}
	c.held, h.held, b.held = c.held+delta, h.held+delta, b.held+delta
	if h.conns[c] = struct{}{}; c.held == 0 {
		delete(h.conns, c)
	}
	if len(h.conns) == 0 {
		delete(b.addresses, c.address)
	}
}

// removeLocked gives back all bytes that a connection holds. The connection is not counted any more.
func (b *Budget) removeLocked(c *conn) {
	if !c.closed {
		b.changeLocked(c, -c.held)
		c.closed = true
	}
}

// largestLocked finds the address that holds the most bytes, and returns the connection of this address that holds the
// most.
func (b *Budget) largestLocked() (largest *conn) {
	var most *holder
	for _, h := range b.addresses {
		if most == nil || h.held > most.held {
			most = h
		}
	}
	for c := range most.conns {
		if largest == nil || c.held > largest.held {
			largest = c
		}
	}
	return largest
}
