package agent

import (
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/nametap/nametap/dnsproxy/sockets"
)

// Bounds of the status endpoints. Anyone who reaches the host can connect to them.
const (
	statusMaxConns       = 64
	statusMaxHeaderBytes = 16 << 10
	statusHeaderTimeout  = 5 * time.Second
	statusReadTimeout    = 10 * time.Second
	statusWriteTimeout   = 30 * time.Second
	statusIdleTimeout    = 30 * time.Second
)

// statusConns is the listener of the status endpoints, of which statusMaxConns
// connections are open at most. A new one takes the place of one that asks nothing.
type statusConns struct {
	net.Listener
	errors *sockets.Pacer
	closed chan struct{} // closed when the listener is

	mu   sync.Mutex
	open map[net.Conn]statusConn
}

// A statusConn is what is known of a connection.
type statusConn struct {
	state http.ConnState
	since time.Time
	local bool // its client is on this host
}

// Accept returns the next connection. It waits out errors that pass.
func (s *statusConns) Accept() (net.Conn, error) {
	for {
		conn, err := s.Listener.Accept()
		switch {
		case err == nil:
			s.add(conn)
			return conn, nil
		case sockets.Dead(err):
			return nil, err
		}
		if sockets.OutOfDescriptors(err) && sockets.Waiting(s.Listener.(*net.TCPListener), probeTimeout) {
			s.makeRoom()
		}
		s.errors.Wait(err, s.closed)
	}
}

// add adds a connection, and makes room for it.
func (s *statusConns) add(conn net.Conn) {
	s.mu.Lock()
	full := len(s.open) >= statusMaxConns
	s.mu.Unlock()
	if full {
		s.makeRoom()
	}
	client, err := netip.ParseAddrPort(conn.RemoteAddr().String())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[conn] = statusConn{since: time.Now(), local: err == nil && client.Addr().Unmap().IsLoopback()}
}

// makeRoom closes a connection: the one that asks nothing for longest, if there is one;
// otherwise one from elsewhere; otherwise the oldest.
func (s *statusConns) makeRoom() {
	rank := func(c statusConn) int {
		switch {
		case c.state == http.StateIdle || c.state == http.StateNew:
			return 0
		case !c.local:
			return 1
		}
		return 2
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var last net.Conn
	for conn, c := range s.open {
		have := s.open[last]
		if last == nil || rank(c) < rank(have) || rank(c) == rank(have) && c.since.Before(have.since) {
			last = conn
		}
	}
	if last != nil {
		delete(s.open, last)
		_ = last.Close() // its own goroutine finds out
	}
}

// changed notes what the server does with a connection.
func (s *statusConns) changed(conn net.Conn, state http.ConnState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, known := s.open[conn]
	switch {
	case !known:
	case state == http.StateClosed || state == http.StateHijacked:
		delete(s.open, conn)
	default:
		c.state, c.since = state, time.Now()
		s.open[conn] = c
	}
}
