package dnsproxy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/listen"
)

// tcpTimeouts are the timeouts of a client's connection.
var tcpTimeouts = struct{ idle, brief, write time.Duration }{ //nolint:gochecknoglobals // only tests change them
	idle:  10 * time.Second, // until the next query (RFC 7766, section 6.2.3)
	brief: time.Second,      // until the first query of a connection with a reserved descriptor
	write: 10 * time.Second, // until a client has read an answer
}

// tcpDeferAccept is how long the kernel waits for the first query on a new connection, in seconds. In this time the
// connection belongs to the listening socket and not to this process: if the process ends, the next process that
// inherits the socket gets the connection.
const tcpDeferAccept = 1

// tcpReadBuffer is the size of the read buffer in bytes, enough for some fifty queries.
const tcpReadBuffer = 4096

// tcpMaxPending bounds, in bytes, the queries of one connection that workers have. Each query counts as its length
// plus tcpPendingCost, so there are at most about 1,000. Beyond the bound, a query that would be forwarded gets an
// expired reply or SERVFAIL at once. Otherwise the queries for mesh names after it would have to wait.
const (
	tcpMaxPending  = 1 << 20
	tcpPendingCost = 1 << 10
)

// tcpNotSent bounds the answers of one connection, in bytes, that the kernel keeps because the client does not read
// them. Without the bound, the kernel would keep megabytes for each such client.
const tcpNotSent = 16 << 10

// lengthLen is the length of the length prefix over TCP (RFC 1035, section 4.2.2).
const lengthLen = 2

// tcpMaxHeld bounds the memory that all connections together hold, in bytes. This is the memory of answers that
// clients have not read, and of long queries, even if only a part of a query has arrived.
const tcpMaxHeld = 16 << 20

// newLimit returns the limit of all TCP listeners: maxConns connections, but not more than half of the process's limit of
// open files. The other half is for nameservers and everything else.
func newLimit(maxConns int, log *slog.Logger) *connlimit.Limit {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	if err == nil && limit.Cur/2 < uint64(maxConns) { //nolint:gosec // validate bounds it
		bound := max(int(limit.Cur/2), 1) //nolint:gosec // less than maxConns
		log.Warn("degraded: the limit of open files allows fewer TCP connections; raise it, such as by LimitNOFILE= of the unit",
			"bound", bound, "wanted", maxConns, "open files", limit.Cur)
		maxConns = bound
	}
	return connlimit.New("dns", maxConns, tcpMaxHeld)
}

// A tcpListener serves the connections of one socket, each in a goroutine.
type tcpListener struct {
	handler  *front
	address  Addr
	listener *net.TCPListener
	limit    *connlimit.Limit
	stopped  chan struct{} // closed by stop
	errors   *listen.Pacer
	serving  sync.WaitGroup

	mu       sync.Mutex
	open     map[*tcpConn]struct{}
	stopping bool
}

// newTCPListener returns the listener of a socket; limit bounds its connections.
func newTCPListener(h *front, socket *listen.Socket, listener *net.TCPListener, limit *connlimit.Limit) *tcpListener {
	if raw, err := listener.SyscallConn(); err == nil { // otherwise accept returns the error
		_ = raw.Control(func(fd uintptr) {
			// Accepted connections inherit both options. Errors are ignored, because the agent works without the
			// options: the first is useful at a restart, and the second for clients that do not read.
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, tcpDeferAccept)
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, tcpNotSent)
		})
	}
	return &tcpListener{
		handler:  h,
		address:  socket.Addr,
		listener: listener,
		limit:    limit,
		stopped:  make(chan struct{}),
		errors:   newPacer(h, socket.Addr),
		open:     map[*tcpConn]struct{}{},
	}
}

// serve accepts connections until stop is called. It returns when every query is answered. It retries
// after temporary errors, and frees a descriptor when the process has none left.
func (l *tcpListener) serve() error {
	defer l.serving.Wait()
	reserved := false // whether the next connection gets a reserved descriptor
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
		if listen.Dead(err) {
			return fmt.Errorf("the DNS listener on %s failed: %w", l.address, err)
		}
		reserved = l.afterError(err)
	}
}

// afterError waits, after an error of accept, until accept may be called again. It reports whether the next connection
// gets a reserved descriptor.
func (l *tcpListener) afterError(err error) (reserved bool) {
	if listen.OutOfDescriptors(err) {
		// accept returns this error even if no client waits for a connection.
		if !listen.Waiting(l.listener, tcpDrainTime) {
			return false
		}
		if freed, reserved := l.limit.FreeDescriptor(); freed {
			l.errors.Note(err)
			return reserved
		}
	}
	l.errors.Wait(err, l.stopped)
	return false
}

// start begins to serve a connection. reserved is true if the connection has a reserved descriptor; such a connection
// ends after its first answers.
func (l *tcpListener) start(conn *net.TCPConn, reserved bool) {
	c := &tcpConn{
		handler: l.handler, listener: l, from: l.arrival(conn), conn: conn, task: newTask(),
		place: l.limit.Enter(conn), brief: reserved, finished: make(chan struct{}, 1),
	}
	c.from.send, c.from.hold = c.send, c.hold
	c.reader = bufio.NewReaderSize(drainReader{c}, tcpReadBuffer)
	l.add(c)
	l.serving.Go(func() {
		defer c.place.Leave()
		c.serve()
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.open, c)
	})
	runtime.Gosched() // answer it before accepting the next one, so that a crash loses few queries
}

// add adds a connection. One that was accepted just before the stop is served, because its query may be on the way.
func (l *tcpListener) add(c *tcpConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open[c] = struct{}{}
	if l.stopping {
		c.drain()
	}
}

// stop makes serve end. From then on, only queries that have already arrived are read.
func (l *tcpListener) stop() {
	close(l.stopped)
	_ = l.listener.Close() // the socket is closed even after an error
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopping = true
	for c := range l.open {
		c.drain()
	}
}

// arrival returns the arrival of a connection's queries. The original destination of the
// connection is looked up once.
func (l *tcpListener) arrival(conn *net.TCPConn) arrival {
	client := func() netip.AddrPort {
		tcp, _ := conn.RemoteAddr().(*net.TCPAddr) // the zero address otherwise
		return tcp.AddrPort()
	}
	local := func() netip.AddrPort {
		tcp, _ := conn.LocalAddr().(*net.TCPAddr) // the zero address otherwise
		return tcp.AddrPort()
	}
	return arrival{protocol: overTCP, client: client, local: local, original: l.handler.origins.ofTCP(conn)}
}

var errStopping = errors.New("the listener has stopped")

// A tcpConn is one client's connection. Its queries are answered in any order (RFC 7766,
// section 6.2.1.1), so mesh names do not wait for nameservers.
type tcpConn struct {
	handler  *front
	listener *tcpListener
	from     arrival
	conn     net.Conn
	reader   *bufio.Reader
	task     *task // the task of the query that is being read
	place    *connlimit.Place
	brief    bool // the connection ends after its first answers

	pendingCost atomic.Int64  // cost of the queries that workers have (see tcpMaxPending)
	finished    chan struct{} // gets an element when a query has ended; awaitRoom waits for it
	waiting     sync.WaitGroup

	writing sync.Mutex // guards writing to the connection

	deadline sync.Mutex // guards drained and the read deadline
	drained  time.Time  // when reading ends; zero if the listener has not stopped
}

// buffers has memory for answers while they are made and written.
var buffers sync.Pool //nolint:gochecknoglobals // memory, which any goroutine may use

func getBuffer() *[]byte {
	if b, ok := buffers.Get().(*[]byte); ok {
		return b
	}
	b := make([]byte, 0, tcpReadBuffer)
	return &b
}

// Answers of one connection are collected, and written when they have more than maxBatch bytes or no further query has
// arrived.
const maxBatch = 16 << 10

// lengthOf returns the length prefix of a message.
func lengthOf(message []byte) []byte {
	return binary.BigEndian.AppendUint16(nil, uint16(len(message))) //nolint:gosec // a message
}

// After the listener has stopped, connections are still read for queries that have arrived before. An idle
// connection is read for tcpDrainTime, any other connection for at most tcpDrainLimit.
const (
	tcpDrainTime  = 100 * time.Millisecond
	tcpDrainLimit = time.Second
)

// serve answers queries until the client closes the connection, sends no query for too long, or
// violates the protocol.
func (c *tcpConn) serve() {
	defer func() { _ = c.conn.Close() }() // every answer was written or cannot be written
	defer c.waiting.Wait()
	var query, answers []byte
	defer func() { c.releaseQuery(query) }()
	var buffer *[]byte
	for served := false; ; {
		// Answers to queries that arrived together are written together, when there is no further whole query.
		if !c.buffered() {
			wrote := len(answers) > 0
			if c.write(answers) != nil || c.brief && served {
				return
			}
			if buffer != nil { // a connection that waits for a query keeps no buffer
				*buffer = answers[:0]
				buffers.Put(buffer)
			}
			if !c.await(wrote) {
				return
			}
			buffer = getBuffer()
			answers = *buffer
		}
		var err error
		if query, err = c.read(query); err != nil {
			_ = c.write(answers) // the client may have closed only its sending side
			return
		}
		served = true
		if answers, err = c.answer(answers, query); err != nil {
			return
		}
		if c.releaseQuery(query) {
			query = nil
		}
	}
}

// releaseQuery reports whether the buffer of a query is long. The memory of a long buffer was counted with hold;
// releaseQuery subtracts it, and the caller must not use the buffer again.
func (c *tcpConn) releaseQuery(query []byte) bool {
	long := cap(query) > tcpReadBuffer
	if long {
		c.release(cap(query))
	}
	return long
}

// answer answers a query, or passes it to a worker. The parameter answers has the responses that are not written yet.
// answer appends the response to them, writes them if they exceed maxBatch, and returns those that are still not
// written.
func (c *tcpConn) answer(answers, query []byte) ([]byte, error) {
	start := len(answers)
	c.task.begin(query, &c.from)
	response, verdict := c.handler.answerFast(append(answers, 0, 0), c.task)
	reserved := false
	if verdict == deferred {
		reserved = c.pendingCost.Load() < tcpMaxPending && c.handler.forwarder.ReserveMemory(len(query))
		if !reserved {
			var ok bool
			if response, ok = c.task.handler.refuse(append(answers, 0, 0), c.task); ok {
				verdict = answered
			}
		}
	}
	if verdict == answered {
		answers = response
		binary.BigEndian.PutUint16(answers[start:], uint16(len(answers)-start-lengthLen)) //nolint:gosec // answerFast bounds it
	}
	if len(answers) > maxBatch || verdict == deferred && !reserved {
		if err := c.write(answers); err != nil {
			return nil, err
		}
		answers = answers[:0]
	}
	if verdict == deferred && (reserved || c.awaitRoom(query)) {
		c.pass(query)
	}
	return answers, nil
}

// buffered reports whether the buffer has the whole next query.
func (c *tcpConn) buffered() bool {
	n := c.reader.Buffered()
	if n < lengthLen {
		return false
	}
	header, err := c.reader.Peek(lengthLen)
	return err == nil && n-lengthLen >= int(binary.BigEndian.Uint16(header))
}

// read returns the next message. It is in the memory of buf if buf has the capacity, otherwise in a new buffer. If
// the new buffer is long, read counts it with hold.
func (c *tcpConn) read(buf []byte) ([]byte, error) {
	header, err := c.reader.Peek(lengthLen)
	if err != nil {
		return buf, err
	}
	n := int(binary.BigEndian.Uint16(header))
	if _, err := c.reader.Discard(lengthLen); err != nil {
		return buf, err
	}
	for have := 0; have < n && err == nil; {
		if cap(buf) <= have { // the buffer grows only as bytes arrive: a client may announce more than it sends
			buf = c.grow(buf[:have], n)
		}
		var read int
		read, err = io.ReadFull(c.reader, buf[have:min(cap(buf), n)])
		have += read
	}
	return buf[:min(cap(buf), n)], err
}

// grow copies part, the beginning of a query of n bytes, to a longer buffer.
func (c *tcpConn) grow(part []byte, n int) []byte {
	size := min(n, max(tcpReadBuffer, 4*len(part)))
	longer := append(make([]byte, 0, size), part...)
	if cap(longer) > tcpReadBuffer {
		c.hold(cap(longer))
	}
	c.releaseQuery(part)
	return longer
}

// awaitRoom waits until the pending queries of the connection are within tcpMaxPending. Only rare queries, and
// queries before the first table, wait here. Then awaitRoom reserves memory for a query. If there is no memory, it
// answers SERVFAIL and reports false.
func (c *tcpConn) awaitRoom(query []byte) bool {
	for c.pendingCost.Load() >= tcpMaxPending {
		<-c.finished
	}
	if c.handler.forwarder.ReserveMemory(len(query)) {
		return true
	}
	c.handler.forwarder.Overflow()
	response := bareFailure(query, dns.RcodeServerFailure)
	c.task.handler.observeRefused(c.task, dns.RcodeServerFailure, response)
	_ = c.write(append([]byte{0, wire.HeaderLen}, response...)) // write closes the connection on an error
	return false
}

// pass passes the task to a worker, and makes a new task for the reader. The caller has
// reserved the memory.
func (c *tcpConn) pass(query []byte) {
	t := c.task
	t.keep(bytes.Clone(query), &c.from)
	c.task = t.next()
	cost := int64(len(query) + tcpPendingCost)
	c.pendingCost.Add(cost)
	c.place.Serve()
	c.waiting.Go(func() {
		defer c.finish(cost)
		defer c.handler.forwarder.ReleaseMemory(len(t.packet))
		response := t.handler.answerSlow(t)
		defer func() { c.release(t.heldBytes) }()
		if response == nil {
			return
		}
		if more := len(response) - t.heldBytes; more > 0 {
			c.hold(more)
			t.heldBytes = len(response)
		}
		_ = c.writeHeld(lengthOf(response), response, cost) // writeHeld closes the connection on an error
	})
}

// send sends one of several messages of a response. It fails after the listener has stopped,
// so that the agent ends without waiting for the remaining messages.
func (c *tcpConn) send(message []byte) error {
	select {
	case <-c.listener.stopped:
		return errStopping
	default:
	}
	c.hold(len(message))
	defer c.release(len(message))
	return c.writeHeld(lengthOf(message), message, c.pendingCost.Load())
}

// finish ends the accounting of a query that a worker has answered. cost is what the query added to pendingCost.
func (c *tcpConn) finish(cost int64) {
	if c.pendingCost.Add(-cost) == 0 {
		c.place.Await()
		c.becameIdle()
	}
	chans.Wake(c.finished)
}

// hold counts n bytes of memory as held by the connection, until release is called. It reports false if the connection
// was closed to make room.
func (c *tcpConn) hold(n int) bool { return c.place.Hold(int64(n)) }

func (c *tcpConn) release(n int) { c.place.Hold(-int64(n)) }

// write sends messages. framed has the messages, each after its length prefix. While they are being sent, write
// counts their memory as held.
func (c *tcpConn) write(framed []byte) error {
	if len(framed) == 0 {
		return nil
	}
	c.hold(len(framed))
	defer c.release(len(framed))
	return c.writeHeld(framed, nil, 0)
}

// writeHeld sends framed, and then message, which may be nil. The caller must have counted both as held. The query that is
// answered has the cost own among the pending ones; without others, the client is awaited. An error closes the connection,
// because the client could not parse anything after a part of an answer.
func (c *tcpConn) writeHeld(framed, message []byte, own int64) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	if c.pendingCost.Load() <= own {
		c.place.Await() // before the client gets the answer: of two clients, the first to get its answer is awaited longer
	}
	err := c.conn.SetWriteDeadline(time.Now().Add(tcpTimeouts.write))
	for err == nil && len(framed)+len(message) > 0 {
		if framed, message, err = c.writePart(framed, message); len(framed)+len(message) > 0 {
			c.place.Await()
		}
	}
	if c.place.Turn(c.pendingCost.Load() > own); err != nil {
		return errors.Join(err, c.conn.Close())
	}
	return nil
}

// writePart writes the first part of framed and message, and returns the rest of both. If a client reads a long answer
// slowly, each part that is written shows that the client still reads.
func (c *tcpConn) writePart(framed, message []byte) (restOfFramed, restOfMore []byte, err error) {
	if len(message) == 0 || len(framed) >= tcpNotSent {
		n := min(len(framed), tcpNotSent)
		_, err = c.conn.Write(framed[:n])
		return framed[n:], message, err
	}
	n := min(len(message), tcpNotSent)
	if len(framed) == 0 {
		_, err = c.conn.Write(message[:n])
	} else {
		_, err = (&net.Buffers{framed, message[:n]}).WriteTo(c.conn)
	}
	return nil, message[n:], err
}

// await waits for the client's next query. It reports false if the connection is to be closed.
// answered is true if an answer was just written.
//
// After the listener has stopped, the connection is closed right after an answer, because at this moment the client is
// the least likely to have sent another query. It is also closed if no query arrives for tcpDrainTime.
func (c *tcpConn) await(answered bool) bool {
	if !c.setDeadline(answered) {
		return false
	}
	_, err := c.reader.Peek(1)
	return err == nil
}

// setDeadline sets the deadline for the client's next query. It reports false if the connection
// is to be closed.
func (c *tcpConn) setDeadline(answered bool) bool {
	c.deadline.Lock()
	defer c.deadline.Unlock()
	if !c.drained.IsZero() {
		return !answered || c.busy() // drain has set the deadline
	}
	timeout := tcpTimeouts.idle
	if c.brief {
		timeout = tcpTimeouts.brief
	}
	return c.conn.SetReadDeadline(time.Now().Add(timeout)) == nil
}

// retryRead reports whether the connection is read again after the error err. After the listener has stopped, a read
// fails at the deadline even if a query has arrived; then the connection is read again.
func (c *tcpConn) retryRead(err error) bool {
	c.deadline.Lock()
	defer c.deadline.Unlock()
	now := time.Now()
	return errors.Is(err, os.ErrDeadlineExceeded) && now.Before(c.drained) && c.busy() &&
		c.conn.SetReadDeadline(now.Add(tcpDrainTime)) == nil
}

// busy reports whether a query has arrived that is not answered yet.
func (c *tcpConn) busy() bool {
	if c.pendingCost.Load() > 0 || c.reader.Buffered() > 0 {
		return true
	}
	conn, ok := c.conn.(syscall.Conn)
	return ok && listen.Waiting(conn, 0)
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
		_ = c.conn.SetReadDeadline(time.Now()) // the reader wakes up, and reads a last query if one has arrived
	}
}

// A drainReader reads a connection. After the listener has stopped, it reads all bytes that have already arrived,
// even after the deadline, and even if they are only a part of a query. If the connection were closed with unread
// bytes, the kernel would reset it, and the client would lose its answers.
type drainReader struct{ c *tcpConn }

// Read reads from the connection.
func (r drainReader) Read(b []byte) (int, error) {
	for {
		n, err := r.c.conn.Read(b)
		if n > 0 || err == nil || !r.c.retryRead(err) {
			return n, err
		}
	}
}
