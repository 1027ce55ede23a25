package dnsproxy

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/nametap/nametap/dnsproxy/origdst"
)

// Times of a client's connection.
const (
	tcpIdleTimeout  = 10 * time.Second // in which a client must ask, RFC 7766, section 6.2.3
	tcpWriteTimeout = 10 * time.Second // in which a client must take an answer
)

// tcpDrainTime is how long a connection is read on when the listener stops: what
// the kernel holds by then has come before.
const tcpDrainTime = 100 * time.Millisecond

// tcpReadBuffer is what is read at once, in bytes: some fifty queries.
const tcpReadBuffer = 4096

// tcpMaxPending is how many queries of one connection may wait for nameservers.
// Beyond it the connection is not read.
const tcpMaxPending = 100

// lengthLen is the length of a message's length over TCP (RFC 1035, section 4.2.2).
const lengthLen = 2

// A tcpListener serves the connections of one socket, each on a goroutine.
type tcpListener struct {
	handler  *handler
	address  Addr
	listener *net.TCPListener
	slots    chan struct{} // one for every connection that may be open
	stopped  chan struct{} // closed by stop
	serving  sync.WaitGroup

	mu       sync.Mutex
	stopping bool
	conns    map[*tcpConn]struct{}
}

// newTCPListener serves an open socket, at most maxConns connections at a time.
func newTCPListener(h *handler, listener *net.TCPListener, maxConns int) *tcpListener {
	return &tcpListener{
		handler:  h,
		address:  Addr{Network: "tcp", Address: listener.Addr().String()},
		listener: listener,
		slots:    make(chan struct{}, maxConns),
		stopped:  make(chan struct{}),
		conns:    map[*tcpConn]struct{}{},
	}
}

func (l *tcpListener) addr() Addr { return l.address }

// serve accepts connections until stop, and returns when all that was asked is
// answered.
func (l *tcpListener) serve() error {
	defer l.serving.Wait()
	for {
		select {
		case l.slots <- struct{}{}:
		case <-l.stopped:
			return nil
		}
		conn, err := l.listener.AcceptTCP()
		if err == nil {
			l.start(conn)
			continue
		}
		select {
		case <-l.stopped:
			return nil
		default:
			return fmt.Errorf("the DNS listener on %s died: %w", l.address, err)
		}
	}
}

// start serves a connection, which has a slot.
func (l *tcpListener) start(conn *net.TCPConn) {
	c := &tcpConn{
		handler: l.handler, from: l.arrival(conn), conn: conn, reader: bufio.NewReaderSize(conn, tcpReadBuffer),
		slots: make(chan struct{}, tcpMaxPending),
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopping {
		_ = conn.Close() // it came too late to have asked
		return
	}
	l.conns[c] = struct{}{}
	l.serving.Go(func() {
		defer func() { <-l.slots }()
		c.serve()
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.conns, c)
	})
}

// stop ends serve: no connection is read any more but for what already came.
func (l *tcpListener) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopping = true
	close(l.stopped)
	_ = l.listener.Close() // what can be wrong with it ends it as well
	for c := range l.conns {
		c.drain()
	}
}

// close closes a socket that never accepted.
func (l *tcpListener) close() { _ = l.listener.Close() }

// arrival says how the queries of a connection come. Where it was captured on its way
// to is asked once.
func (l *tcpListener) arrival(conn *net.TCPConn) arrival {
	from := arrival{over: overTCP}
	if !l.handler.originalDestination {
		return from
	}
	// Without an answer it is as if it had not been captured.
	if server, captured, err := origdst.TCP(conn); err == nil && captured {
		from.original = func() netip.AddrPort { return server }
	}
	return from
}

// A tcpConn is one client's connection. Its queries are answered in any order, as
// RFC 7766, section 6.2.1.1, has it: own names do not wait for nameservers.
type tcpConn struct {
	handler *handler
	from    arrival
	conn    net.Conn
	reader  *bufio.Reader
	slots   chan struct{}  // one for every query that was handed on
	pending sync.WaitGroup // those queries

	writing sync.Mutex // for the connection's write side

	deadline sync.Mutex
	draining bool
}

// serve answers until the client ends, is idle or breaks the protocol.
func (c *tcpConn) serve() {
	defer func() { _ = c.conn.Close() }() // everything was written or could not be
	defer c.pending.Wait()
	responder := newResponder(c.handler)
	responder.uncached = c.from.original != nil && c.handler.forwarder.elsewhere(&c.from).IsValid()
	var query, answers []byte
	for {
		// What was asked in one go is answered in one go.
		if c.reader.Buffered() < lengthLen {
			if c.write(answers) != nil || !c.await() {
				return
			}
			answers = answers[:0]
		}
		var err error
		if query, err = c.read(query); err != nil {
			_ = c.write(answers) // the client may have closed only its own side
			return
		}
		start := len(answers)
		answers = append(answers, 0, 0)
		response, ok := responder.respond(answers, query, overTCP)
		if !ok {
			answers = answers[:start]
			c.handOn(append([]byte(nil), query...))
			continue
		}
		answers = response
		binary.BigEndian.PutUint16(answers[start:], uint16(len(answers)-start-lengthLen)) //nolint:gosec // respond bounds it
		if len(answers) > maxBatch {
			if c.write(answers) != nil {
				return
			}
			answers = answers[:0]
		}
	}
}

// maxBatch is how many bytes of answers are written at the latest.
const maxBatch = 16 << 10

// await gives the client time for its next query. It reports false if the
// connection is no more.
func (c *tcpConn) await() bool {
	c.deadline.Lock()
	defer c.deadline.Unlock()
	if c.draining {
		return true // the deadline of drain stands
	}
	return c.conn.SetReadDeadline(time.Now().Add(tcpIdleTimeout)) == nil
}

// drain has the connection end once what has already come is answered.
func (c *tcpConn) drain() {
	c.deadline.Lock()
	defer c.deadline.Unlock()
	c.draining = true
	_ = c.conn.SetReadDeadline(time.Now().Add(tcpDrainTime)) // a connection that fails has ended
}

// read returns the next message, in buf if that is long enough.
func (c *tcpConn) read(buf []byte) ([]byte, error) {
	header, err := c.reader.Peek(lengthLen)
	if err != nil {
		return buf, err
	}
	n := int(binary.BigEndian.Uint16(header))
	if _, err := c.reader.Discard(lengthLen); err != nil {
		return buf, err
	}
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	_, err = io.ReadFull(c.reader, buf[:n])
	return buf[:n], err
}

// handOn has the handler serve a query while the next one is read.
func (c *tcpConn) handOn(query []byte) {
	c.slots <- struct{}{}
	c.pending.Go(func() {
		defer func() { <-c.slots }()
		response := c.handler.serve(query, &c.from)
		if response == nil {
			return
		}
		framed := binary.BigEndian.AppendUint16(make([]byte, 0, lengthLen+len(response)), uint16(len(response))) //nolint:gosec // a message
		_ = c.write(append(framed, response...))                                                                 // write closes what fails
	})
}

// write sends messages with their lengths. On an error it closes the connection:
// after half an answer the client could make nothing of another.
func (c *tcpConn) write(framed []byte) error {
	if len(framed) == 0 {
		return nil
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	err := c.conn.SetWriteDeadline(time.Now().Add(tcpWriteTimeout))
	if err == nil {
		_, err = c.conn.Write(framed)
	}
	if err != nil {
		return errors.Join(err, c.conn.Close())
	}
	return nil
}
