package httpguard

import (
	"crypto/tls"
	"net"
	"net/http"
	"sync"

	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/listen"
)

// listener is a listener whose connections have places.
type listener struct {
	net.Listener
	limit  *connlimit.Limit
	pacer  *listen.Pacer
	closed chan struct{}
	once   sync.Once
}

// Accept returns the next connection. After a temporary error it waits and retries: if it returned the error, the
// server would end.
func (l *listener) Accept() (net.Conn, error) {
	accepted, _, err := l.limit.Accept(l.Listener, l.pacer, l.closed)
	if err != nil {
		return nil, err
	}
	return &conn{accepted, l.limit.Enter(accepted)}, nil
}

// Close closes the listener. It may be called any number of times.
func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// A conn is a connection with a place.
type conn struct {
	net.Conn
	place *connlimit.Place
}

// NetConn returns the connection itself.
func (c *conn) NetConn() net.Conn { return c.Conn }

// Write writes. Until the client has read this, and has sent another request, it is awaited.
func (c *conn) Write(b []byte) (int, error) {
	c.place.Await()
	return c.Conn.Write(b)
}

// Close closes the connection and gives its place back.
func (c *conn) Close() error {
	defer c.place.Leave()
	return c.Conn.Close()
}

// Place returns the place of a connection of a server of [New], as its ConnContext gets it.
func Place(c net.Conn) *connlimit.Place {
	if encrypted, ok := c.(*tls.Conn); ok {
		c = encrypted.NetConn()
	}
	return c.(*conn).place
}

// stateChanged follows the state of a connection. The server calls it ([http.Server].ConnState).
func stateChanged(c net.Conn, state http.ConnState) {
	if state == http.StateActive {
		Place(c).Serve()
	}
}
