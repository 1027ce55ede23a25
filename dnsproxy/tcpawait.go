package dnsproxy

import (
	"errors"
	"os"
	"syscall"
	"time"

	"github.com/nametap/nametap/internal/sockets"
)

// tcpDrainTime is how long an idle connection is still read after the listener has stopped, for
// the queries that arrived before, and tcpDrainLimit how long any other connection is.
const (
	tcpDrainTime  = 100 * time.Millisecond
	tcpDrainLimit = time.Second
)

// await waits for the client's next query. It reports false if the connection is to be closed.
// answered is true if an answer was just written. After the stop of the listener, the
// connection is closed right after an answer, when the client is the least likely to have sent
// the next query, or if none arrives for tcpDrainTime.
func (c *tcpConn) await(answered bool) bool {
	if !answered {
		c.idleSince.Store(c.listener.clients.now())
	}
	if !c.setDeadline(answered) {
		return false
	}
	_, err := c.reader.Peek(1)
	return err == nil
}

// A drainReader reads a connection. After the stop of the listener it reads on past the deadline, also
// in the middle of a query, for what has already arrived: a connection that is closed with unread bytes
// is reset, and the client loses its answers.
type drainReader struct{ c *tcpConn }

// Read reads from the connection.
func (r drainReader) Read(b []byte) (int, error) {
	for {
		n, err := r.c.conn.Read(b)
		if n > 0 || err == nil || !r.c.again(err) {
			return n, err
		}
	}
}

// setDeadline sets the deadline for the client's next query. It reports false if the connection
// is to be closed.
func (c *tcpConn) setDeadline(answered bool) bool {
	c.deadline.Lock()
	defer c.deadline.Unlock()
	if !c.drained.IsZero() {
		return !answered || c.busy() // drain has set the deadline
	}
	timeout := tcpIdleTimeout
	if c.brief {
		timeout = tcpBriefTimeout
	}
	return c.conn.SetReadDeadline(time.Now().Add(timeout)) == nil
}

// again reports whether the connection is read again after an error: after the stop of the
// listener, the read fails at the deadline even if a query has arrived.
func (c *tcpConn) again(err error) bool {
	c.deadline.Lock()
	defer c.deadline.Unlock()
	now := time.Now()
	return errors.Is(err, os.ErrDeadlineExceeded) && now.Before(c.drained) && c.busy() &&
		c.conn.SetReadDeadline(now.Add(tcpDrainTime)) == nil
}

// busy reports whether a query has arrived or is not answered yet.
func (c *tcpConn) busy() bool {
	if c.pending.Load() > 0 || c.reader.Buffered() > 0 {
		return true
	}
	conn, ok := c.conn.(syscall.Conn)
	return ok && sockets.Waiting(conn, 0)
}

// drain ends the connection after the queries that have already arrived are answered.
func (c *tcpConn) drain() {
	c.deadline.Lock()
	defer c.deadline.Unlock()
	now := time.Now()
	c.drained = now.Add(tcpDrainLimit)
	_ = c.conn.SetReadDeadline(now.Add(tcpDrainTime)) // fails only on a closed connection
}

// becameIdle is called when no query of the connection is pending any more.
func (c *tcpConn) becameIdle() {
	c.deadline.Lock()
	defer c.deadline.Unlock()
	if !c.drained.IsZero() {
		_ = c.conn.SetReadDeadline(time.Now()) // await looks for a last query
	}
}
