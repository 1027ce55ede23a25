package httpguard

import (
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/sockets"
)

// A fakeConn is a connection of a client with this address.
type fakeConn struct {
	net.Conn
	client string
	closed bool
}

func (c *fakeConn) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.client))
}

func (c *fakeConn) Close() error {
	c.closed = true
	return nil
}

// TestEviction checks which connection makes room for another one.
func TestEviction(t *testing.T) { // R9
	const local, remote = "127.0.0.1:1", "192.0.2.1:1"
	type connection struct {
		addr  string
		state http.ConnState
	}
	for name, test := range map[string]struct {
		clients []connection // in the order of their states
		evicted int
	}{
		"the longest idle one":  {[]connection{{remote, http.StateActive}, {local, http.StateIdle}, {remote, http.StateIdle}}, 1},
		"one without a request": {[]connection{{remote, http.StateActive}, {local, http.StateActive}, {local, http.StateNew}}, 2},
		"one of another host":   {[]connection{{local, http.StateActive}, {remote, http.StateActive}, {remote, http.StateActive}}, 1},
		"the oldest":            {[]connection{{local, http.StateActive}, {local, http.StateActive}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := &conns{reserve: new(sockets.Reserve), max: len(test.clients), open: map[net.Conn]client{}}
				var all []*fakeConn
				for _, client := range test.clients {
					conn := &fakeConn{client: client.addr}
					all = append(all, conn)
					c.add(conn)
					c.stateChanged(conn, client.state)
					<-time.After(time.Second) // of the bubble's clock
				}
				added := &fakeConn{client: local}
				c.add(added)
				for i, conn := range all {
					if conn.closed != (i == test.evicted) {
						t.Errorf("connection %d: closed is %v", i, conn.closed)
					}
				}
				if added.closed || len(c.open) != len(test.clients) {
					t.Errorf("closed is %v for the new one, %d are open", added.closed, len(c.open))
				}
				c.stateChanged(all[test.evicted], http.StateClosed)
				if len(c.open) != len(test.clients) {
					t.Errorf("%d are open", len(c.open))
				}
			})
		})
	}
}

// A failing listener returns errors, then connections.
type failing struct {
	net.Listener
	errs []error
}

func (l *failing) Accept() (net.Conn, error) {
	if len(l.errs) == 0 {
		return &fakeConn{client: "127.0.0.1:1"}, nil
	}
	err := l.errs[0]
	l.errs = l.errs[1:]
	return nil, err
}

func (l *failing) Close() error { return nil }

// TestAcceptErrors checks that temporary errors do not end the server, and that others do.
func TestAcceptErrors(t *testing.T) { // R3
	listen := func(errs ...error) *conns {
		return &conns{
			reserve:  new(sockets.Reserve),
			Listener: &failing{errs: errs}, max: 1, closed: make(chan struct{}), open: map[net.Conn]client{},
			pacer: &sockets.Pacer{Log: slog.New(slog.DiscardHandler)},
		}
	}
	synctest.Test(t, func(t *testing.T) {
		c := listen(slices.Repeat([]error{unix.EMFILE, unix.ECONNABORTED, unix.ENOBUFS}, 10)...)
		if _, err := c.Accept(); err != nil {
			t.Errorf("after temporary errors: %v", err)
		}
		start := time.Now()
		c = listen(append(slices.Repeat([]error{unix.EMFILE}, 100), net.ErrClosed)...)
		if err := errors.Join(c.Close(), c.Close()); err != nil {
			t.Error(err)
		}
		if _, err := c.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("closed: %v, want %v", err, net.ErrClosed)
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("waited %v after Close", took)
		}
	})
}
