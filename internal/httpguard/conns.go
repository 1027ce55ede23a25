package httpguard

import (
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/nametap/nametap/internal/sockets"
)

// acceptWait is how long Accept waits for a client after descriptors have run out. If a client comes, Accept frees a
// descriptor: it closes a connection or spends a descriptor of the reserve. If it can do neither, it pauses and
// retries.
const acceptWait = time.Second

// requestTime is how long a connection has for a request and its response. After that it may be closed to free a
// descriptor.
const requestTime = 50 * time.Millisecond

// reserveSize is how many clients can be accepted while the process has no descriptors left and no connection of
// the listener can be closed.
const reserveSize = 2

// conns is a listener that bounds the number of its open connections. At the limit, a new connection replaces an
// open one.
type conns struct {
	net.Listener
	max     int
	pacer   *sockets.Pacer
	reserve *sockets.Reserve
	closed  chan struct{}
	once    sync.Once

	mu   sync.Mutex
	open map[net.Conn]client
}

// A client describes the client of a connection.
type client struct {
	state     http.ConnState
	stateTime time.Time // when the state began
	local     bool      // whether the client is on this host
}

// Accept returns the next connection. After a temporary error it waits and retries: if it returned the error, the
// server would end.
func (c *conns) Accept() (net.Conn, error) {
	for {
		conn, err := c.Listener.Accept()
		switch {
		case err == nil:
			c.add(conn)
			return conn, nil
		case sockets.Dead(err):
			return nil, err
		}
		pause := c.pacer.Note(err)
		if l, ok := c.Listener.(syscall.Conn); ok && sockets.OutOfDescriptors(err) && sockets.Waiting(l, acceptWait) {
			if c.freeDescriptor() {
				continue // at once, before another part of the process takes the descriptor
			}
			pause = min(pause, requestTime)
		}
		sockets.Pause(pause, c.closed)
	}
}

// Close closes the listener. It may be called any number of times.
func (c *conns) Close() error {
	c.once.Do(func() { close(c.closed); c.reserve.Close() })
	return c.Listener.Close()
}

// add adds a connection. At the limit, it closes another connection first.
func (c *conns) add(conn net.Conn) {
	addr, err := netip.ParseAddrPort(conn.RemoteAddr().String())
	local := err == nil && addr.Addr().Unmap().IsLoopback()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.open) >= c.max {
		c.makeRoomLocked(0)
	}
	c.open[conn] = client{stateTime: time.Now(), local: local}
}

// freeDescriptor closes a connection that has had requestTime for a request, or spends a descriptor of the reserve.
// It returns false if there is neither such a connection nor such a descriptor.
func (c *conns) freeDescriptor() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.makeRoomLocked(requestTime) || c.reserve.Spend()
}

// makeRoomLocked closes the connection that has been without a request for longest. If all connections have a
// request, it closes the connection from another host whose state is oldest, because probes and operators connect
// from this host. If all connections are from this host, it closes the connection whose state is oldest. A connection
// that is not idle can be closed only when the duration spared has passed since its state began. makeRoomLocked
// returns false if it closes none.
func (c *conns) makeRoomLocked(spared time.Duration) bool {
	rank := func(c client) int {
		switch {
		case c.state == http.StateIdle || c.state == http.StateNew:
			return 0
		case !c.local:
			return 1
		}
		return 2
	}
	var evicted net.Conn
	for other, candidate := range c.open {
		if candidate.state != http.StateIdle && time.Since(candidate.stateTime) < spared {
			continue
		}
		best := c.open[evicted]
		if evicted == nil || rank(candidate) < rank(best) ||
			rank(candidate) == rank(best) && candidate.stateTime.Before(best.stateTime) {
			evicted = other
		}
	}
	if evicted == nil {
		return false
	}
	delete(c.open, evicted)
	_ = evicted.Close() // the server's goroutine for the connection ends
	return true
}

// stateChanged records the new state of a connection. The server calls it ([http.Server].ConnState).
func (c *conns) stateChanged(conn net.Conn, state http.ConnState) {
	if encrypted, ok := conn.(*tls.Conn); ok {
		conn = encrypted.NetConn()
	}
	if state == http.StateClosed {
		c.reserve.Refill()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	known, ok := c.open[conn]
	switch {
	case !ok: // evicted
	case state == http.StateClosed || state == http.StateHijacked:
		delete(c.open, conn)
	default:
		known.state, known.stateTime = state, time.Now()
		c.open[conn] = known
	}
}
