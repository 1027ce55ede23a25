package dnsproxy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/sockets"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// Times of a client's connection.
const (
	tcpIdleTimeout  = 10 * time.Second // in which a client must ask, RFC 7766, section 6.2.3
	tcpBriefTimeout = time.Second      // the same when descriptors have run out
	tcpWriteTimeout = 10 * time.Second // in which a client must take an answer
)

// tcpDrainTime is how long a connection is read on when the listener stops: what
// the kernel holds by then has come before.
const tcpDrainTime = 100 * time.Millisecond

// tcpReadBuffer is what is read at once, in bytes: some fifty queries.
const tcpReadBuffer = 4096

// tcpMaxPending bounds the queries of one connection that wait for nameservers, in bytes:
// each costs its length and tcpPendingCost, so that there are about 1,000 at most. Beyond
// it a query gets SERVFAIL, so that own names behind it still need not wait.
const (
	tcpMaxPending  = 1 << 20
	tcpPendingCost = 1 << 10
)

// tcpMaxUnsent bounds the answers of one connection that wait for its client to take
// them, in bytes. Beyond it the client reads too slowly, and is cut off.
const tcpMaxUnsent = 1 << 20

// lengthLen is the length of a message's length over TCP (RFC 1035, section 4.2.2).
const lengthLen = 2

// A tcpListener serves the connections of one socket, each on a goroutine.
type tcpListener struct {
	handler  *handler
	address  Addr
	listener *net.TCPListener
	clients  *tcpClients
	stopped  chan struct{} // closed by stop
	errors   *sockets.Pacer
	serving  sync.WaitGroup

	stopping bool // guarded by clients.mu
}

// newTCPListener serves an open socket; clients bounds its connections.
func newTCPListener(h *handler, listener *net.TCPListener, clients *tcpClients) *tcpListener {
	address := Addr{Network: "tcp", Address: listener.Addr().String()}
	return &tcpListener{
		handler:  h,
		address:  address,
		listener: listener,
		clients:  clients,
		stopped:  make(chan struct{}),
		errors:   newPacer(h, address),
	}
}

func (l *tcpListener) addr() Addr { return l.address }

// serve accepts connections until stop, and returns when all that was asked is
// answered. An error that passes is waited out; when descriptors run out, room is made.
func (l *tcpListener) serve() error {
	defer l.serving.Wait()
	reserved := false // the next connection has a descriptor of the reserve
	for {
		conn, err := l.listener.AcceptTCP()
		if err == nil {
			l.start(conn, reserved)
			reserved = false
			continue
		}
		select {
		case <-l.stopped:
			return nil
		default:
		}
		if sockets.Dead(err) {
			return fmt.Errorf("the DNS listener on %s died: %w", l.address, err)
		}
		reserved = l.afterError(err)
	}
}

// afterError returns when accept may be called again after an error. It reports whether the
// next connection has a descriptor of the reserve.
func (l *tcpListener) afterError(err error) (reserved bool) {
	if sockets.OutOfDescriptors(err) {
		// The kernel says so before it looks whether there is a client at all.
		if !sockets.Waiting(l.listener, tcpDrainTime) {
			return false
		}
		if freed, reserved := l.clients.freeDescriptor(); freed {
			l.errors.Note(err)
			return reserved
		}
	}
	l.errors.Wait(err, l.stopped)
	return false
}

// start serves a connection as soon as there is room for it. One that has a descriptor
// of the reserve ends after its first answers.
func (l *tcpListener) start(conn *net.TCPConn, reserved bool) {
	c := &tcpConn{
		handler: l.handler, listener: l, from: l.arrival(conn), conn: conn, task: new(task), reader: bufio.NewReaderSize(conn, tcpReadBuffer),
		brief: reserved, left: make(chan struct{}), finished: make(chan struct{}, 1),
	}
	c.from.send = c.send
	c.idleSince.Store(time.Now().UnixNano())
	if !l.clients.add(c) {
		_ = conn.Close() // it came too late to have asked
		return
	}
	l.serving.Go(func() {
		defer l.clients.remove(c)
		c.serve()
	})
}

// stop ends serve: no connection is read any more but for what already came.
func (l *tcpListener) stop() {
	close(l.stopped)
	_ = l.listener.Close() // what can be wrong with it ends it as well
	l.clients.stop(l)
}

// close closes a socket that never accepted.
func (l *tcpListener) close() { _ = l.listener.Close() }

// arrival says how the queries of a connection come. Where it was captured on its way
// to is asked once.
func (l *tcpListener) arrival(conn *net.TCPConn) arrival {
	from := arrival{over: overTCP}
	if l.handler.origins != nil {
		from.original = l.handler.origins.ofTCP(conn)
	}
	return from
}

var errStopping = errors.New("the listener has stopped")

// A tcpConn is one client's connection. Its queries are answered in any order, as
// RFC 7766, section 6.2.1.1, has it: own names do not wait for nameservers.
type tcpConn struct {
	handler  *handler
	listener *tcpListener
	from     arrival
	conn     net.Conn
	reader   *bufio.Reader
	task     *task         // of the query that is being read
	brief    bool          // ends after its first answers
	left     chan struct{} // closed when the connection is read no more

	idleSince atomic.Int64  // when a query was last awaited or answered, in Unix nanoseconds
	pending   atomic.Int64  // what the queries with workers cost (tcpMaxPending)
	unsent    atomic.Int64  // bytes of their answers that wait to be written
	finished  chan struct{} // holds one value after a query has ended, for awaitRoom
	waiting   sync.WaitGroup

	writing sync.Mutex // for the connection's write side

	deadline sync.Mutex
	draining bool
}

// serve answers until the client ends, is idle or breaks the protocol.
func (c *tcpConn) serve() {
	defer func() { _ = c.conn.Close() }() // everything was written or could not be
	defer c.waiting.Wait()
	defer close(c.left)
	var query, answers []byte
	for answered := false; ; {
		// What was asked in one go is answered in one go. Nothing waits for the rest of
		// a query of which only a part has come.
		if !c.buffered() {
			if c.write(answers) != nil || c.brief && answered || !c.await() {
				return
			}
			answers = answers[:0]
		}
		var err error
		if query, err = c.read(query); err != nil {
			_ = c.write(answers) // the client may have closed only its own side
			return
		}
		answered = true
		if answers, err = c.answer(answers, query); err != nil {
			return
		}
	}
}

// answer appends the response to a query to the answers that are to be written, or passes
// the query to a worker. It writes the answers when they are many.
func (c *tcpConn) answer(answers, query []byte) ([]byte, error) {
	start := len(answers)
	c.task.begin(query, &c.from)
	response, verdict := c.handler.fast(append(answers, 0, 0), c.task)
	reserved := false
	if verdict == later {
		reserved = c.pending.Load() < tcpMaxPending && c.handler.forwarder.ReserveMemory(len(query))
		if !reserved {
			var ok bool
			if response, ok = c.handler.refuse(append(answers, 0, 0), c.task); ok {
				verdict = answered
			}
		}
	}
	if verdict == answered {
		answers = response
		binary.BigEndian.PutUint16(answers[start:], uint16(len(answers)-start-lengthLen)) //nolint:gosec // fast bounds it
	}
	if len(answers) > maxBatch || verdict == later && !reserved {
		if err := c.write(answers); err != nil {
			return nil, err
		}
		answers = answers[:0]
	}
	if verdict == later && (reserved || c.awaitRoom(query)) {
		c.pass(query)
	}
	return answers, nil
}

// buffered reports whether the whole next query has been read.
func (c *tcpConn) buffered() bool {
	n := c.reader.Buffered()
	if n < lengthLen {
		return false
	}
	header, err := c.reader.Peek(lengthLen)
	return err == nil && n-lengthLen >= int(binary.BigEndian.Uint16(header))
}

// maxBatch is how many bytes of answers are written at the latest.
const maxBatch = 16 << 10

// await gives the client time for its next query. It reports false if the
// connection is no more.
func (c *tcpConn) await() bool {
	now := time.Now()
	c.idleSince.Store(now.UnixNano())
	c.deadline.Lock()
	defer c.deadline.Unlock()
	if c.draining {
		return true // the deadline of drain stands
	}
	timeout := tcpIdleTimeout
	if c.brief {
		timeout = tcpBriefTimeout
	}
	return c.conn.SetReadDeadline(now.Add(timeout)) == nil
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

// awaitRoom waits until fewer queries of the connection wait, and reserves memory for a
// query. What waits here is rare, or there is no table yet, and nothing behind it could be
// answered. It reports false if there is no memory: the query has failed then.
func (c *tcpConn) awaitRoom(query []byte) bool {
	for c.pending.Load() >= tcpMaxPending {
		<-c.finished
	}
	if c.handler.forwarder.ReserveMemory(len(query)) {
		return true
	}
	c.handler.forwarder.Overflow()
	_ = c.write(append([]byte{0, wire.HeaderLen}, bareFailure(query, dns.RcodeServerFailure)...)) // write closes what fails
	return false
}

// pass passes the task to a worker, and takes a new one. Memory is reserved.
func (c *tcpConn) pass(query []byte) {
	t := c.task
	t.keep(bytes.Clone(query), &c.from)
	c.task = new(task)
	cost := int64(len(query) + tcpPendingCost)
	c.pending.Add(cost)
	c.waiting.Go(func() {
		defer c.finish(cost)
		defer c.handler.forwarder.ReleaseMemory(len(t.packet))
		response := c.handler.slow(t)
		if response == nil {
			return
		}
		framed := binary.BigEndian.AppendUint16(make([]byte, 0, lengthLen+len(response)), uint16(len(response))) //nolint:gosec // a message
		framed = append(framed, response...)
		defer c.unsent.Add(-int64(len(framed)))
		if c.unsent.Add(int64(len(framed))) > tcpMaxUnsent {
			_ = c.conn.Close() // its client reads too slowly
			return
		}
		_ = c.write(framed) // write closes what fails
	})
}

// send sends a message of a response that has several. When the listener stops, the rest
// is not waited for.
func (c *tcpConn) send(message []byte) error {
	select {
	case <-c.listener.stopped:
		return errStopping
	default:
	}
	framed := binary.BigEndian.AppendUint16(make([]byte, 0, lengthLen+len(message)), uint16(len(message))) //nolint:gosec // a message
	return c.write(append(framed, message...))
}

// finish ends a query that a worker has answered.
func (c *tcpConn) finish(cost int64) {
	c.idleSince.Store(time.Now().UnixNano())
	if c.pending.Add(-cost) == 0 {
		c.listener.clients.becameIdle()
	}
	select {
	case c.finished <- struct{}{}:
	default: // awaitRoom knows already
	}
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
