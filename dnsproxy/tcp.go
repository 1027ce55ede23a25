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
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

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
// plus tcpPendingCost, so there are at most about 1,000. Beyond the bound, a query gets an expired reply or SERVFAIL at
// once. Otherwise the queries for mesh names after it would have to wait.
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
// clients have not read, and of long queries, from the time when the length of a query is known.
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

	mu   sync.Mutex
	open map[*net.TCPConn]struct{}
	ends time.Time // when reading ends; zero if the listener has not stopped
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
		open:     map[*net.TCPConn]struct{}{},
	}
}

// serve accepts connections until stop is called. It returns when every query is answered.
func (l *tcpListener) serve() error {
	defer l.serving.Wait()
	for {
		conn, reserved, err := l.limit.Accept(l.listener, l.errors, l.stopped)
		switch {
		case err == nil:
			l.start(conn.(*net.TCPConn), reserved) //nolint:forcetypeassert // of a TCP listener
		case chans.Closed(l.stopped):
			return nil
		default:
			return fmt.Errorf("the DNS listener on %s failed: %w", l.address, err)
		}
	}
}

// start begins to serve a connection. reserved is true if the connection has a reserved descriptor; such a connection
// ends after its first answers.
func (l *tcpListener) start(conn *net.TCPConn, reserved bool) {
	c := &tcpConn{
		handler: l.handler, listener: l, from: l.arrival(conn), conn: conn, reader: bufio.NewReaderSize(conn, tcpReadBuffer),
		task: newTask(), place: l.limit.Enter(conn), brief: reserved,
	}
	c.from.send, c.from.hold = c.send, c.hold
	l.mu.Lock()
	l.open[conn] = struct{}{}
	if !l.ends.IsZero() { // its query may be on the way
		_ = conn.SetReadDeadline(l.ends)
	}
	l.mu.Unlock()
	l.serving.Go(func() {
		defer c.place.Leave()
		c.serve()
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.open, conn)
	})
	runtime.Gosched() // answer it before accepting the next one, so that a crash loses few queries
}

// stop makes serve end. From then on, only queries that have already arrived are read: of a connection that is idle, for
// tcpStopTime.
func (l *tcpListener) stop() {
	close(l.stopped)
	_ = l.listener.Close() // the socket is closed even after an error
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ends = time.Now().Add(tcpDrainTime)
	for conn := range l.open {
		_ = conn.SetReadDeadline(l.ends) // fails only on a closed connection
	}
	time.AfterFunc(tcpStopTime, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for conn := range l.open {
			endReading(conn)
		}
	})
}

// endReading makes the kernel report the end of the data once all that has arrived is read. If the connection were closed
// with unread bytes, the kernel would reset it, and the client would lose its answers.
func endReading(conn net.Conn) { _ = conn.(*net.TCPConn).CloseRead() } // fails only on a closed connection

// await sets how long a client may take until its next query. After the listener has stopped, reading ends right after an
// answer, because at this moment the client is the least likely to have sent another query.
func (l *tcpListener) await(conn net.Conn, timeout time.Duration, answered bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.ends.IsZero():
		_ = conn.SetReadDeadline(time.Now().Add(timeout)) // fails only on a closed connection
	case answered:
		endReading(conn)
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

	pendingCost atomic.Int64 // cost of the queries that workers have (see tcpMaxPending)
	waiting     sync.WaitGroup
	writing     sync.Mutex // guards writing to the connection
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

// framed returns a message after its length prefix.
func framed(message []byte) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(message))), message...) //nolint:gosec // a message
}

// After the listener has stopped, connections are still read for queries that have arrived: one that is idle for tcpStopTime,
// any other one for at most tcpDrainTime.
const (
	tcpStopTime  = 100 * time.Millisecond
	tcpDrainTime = time.Second
)

// serve answers queries until the client closes the connection, sends no query for too long, or
// violates the protocol.
func (c *tcpConn) serve() {
	defer func() { _ = c.conn.Close() }() // every answer was written or cannot be written
	defer c.waiting.Wait()
	var query, answers []byte
	defer func() { c.release(query) }()
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
		query = c.release(query)
	}
}

// release returns the buffer of a query for the next one. A long buffer was counted with hold, and is not used again.
func (c *tcpConn) release(query []byte) []byte {
	if cap(query) <= tcpReadBuffer {
		return query
	}
	c.hold(-cap(query))
	return nil
}

// answer answers a query, or passes it to a worker. The parameter answers has the responses that are not written yet.
// answer appends the response to them, writes them if they exceed maxBatch, and returns those that are still not
// written.
func (c *tcpConn) answer(answers, query []byte) ([]byte, error) {
	start := len(answers)
	c.task.begin(query, &c.from)
	response, verdict := c.handler.answerFast(append(answers, 0, 0), c.task)
	switch {
	case verdict == deferred && c.pendingCost.Load() < tcpMaxPending && c.handler.forwarder.ReserveMemory(len(query)):
		c.pass(query)
	case verdict == deferred:
		var ok bool
		if response, ok = c.task.handler.refuse(append(answers, 0, 0), c.task); !ok {
			failure := bareFailure(query, dns.RcodeServerFailure)
			c.handler.forwarder.Overflow()
			c.task.handler.observeRefused(c.task, dns.RcodeServerFailure, failure)
			response = append(response, failure...)
		}
		verdict = answered
	}
	if verdict == answered {
		answers = response
		binary.BigEndian.PutUint16(answers[start:], uint16(len(answers)-start-lengthLen)) //nolint:gosec // answerFast bounds it
	}
	if len(answers) <= maxBatch {
		return answers, nil
	}
	return answers[:0], c.write(answers)
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
	var header [lengthLen]byte
	if _, err := io.ReadFull(c.reader, header[:]); err != nil {
		return buf, err
	}
	n := int(binary.BigEndian.Uint16(header[:]))
	if n > cap(buf) {
		buf = make([]byte, max(n, dns.MinMsgSize))
		if n > tcpReadBuffer && !c.hold(n) {
			return buf, net.ErrClosed
		}
	}
	_, err := io.ReadFull(c.reader, buf[:n])
	return buf[:n], err
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
		defer func() { c.hold(-t.heldBytes) }()
		if response == nil {
			return
		}
		if more := len(response) - t.heldBytes; more > 0 {
			c.hold(more)
			t.heldBytes = len(response)
		}
		_ = c.writeHeld(framed(response), cost) // writeHeld closes the connection on an error
	})
}

// send sends one of several messages of a response. It fails after the listener has stopped,
// so that the agent ends without waiting for the remaining messages.
func (c *tcpConn) send(message []byte) error {
	if chans.Closed(c.listener.stopped) {
		return errStopping
	}
	c.hold(len(message))
	defer c.hold(-len(message))
	return c.writeHeld(framed(message), c.pendingCost.Load())
}

// finish ends the accounting of a query that a worker has answered. cost is what the query added to pendingCost.
func (c *tcpConn) finish(cost int64) {
	if c.pendingCost.Add(-cost) == 0 {
		c.place.Await()
	}
}

// hold adds n, which may be negative, to the bytes of memory that the connection holds. It reports false if the
// connection was closed to make room.
func (c *tcpConn) hold(n int) bool { return c.place.Hold(int64(n)) }

// write sends messages, each after its length prefix. While they are being sent, write counts their memory as held.
func (c *tcpConn) write(messages []byte) error {
	if len(messages) == 0 {
		return nil
	}
	c.hold(len(messages))
	defer c.hold(-len(messages))
	return c.writeHeld(messages, 0)
}

// writeHeld is write for messages that the caller has counted as held. The query that is answered has the cost own among
// the pending ones; without others, the client is awaited. If a client reads a long answer slowly, each part that is written
// shows that the client still reads. An error closes the connection, because the client could not parse anything after a
// part of an answer.
func (c *tcpConn) writeHeld(messages []byte, own int64) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	if c.pendingCost.Load() <= own {
		c.place.Await() // before the client gets the answer: of two clients, the first to get its answer is awaited longer
	}
	err := c.conn.SetWriteDeadline(time.Now().Add(tcpTimeouts.write))
	for err == nil && len(messages) > 0 {
		n := min(len(messages), tcpNotSent)
		_, err = c.conn.Write(messages[:n])
		if messages = messages[n:]; len(messages) > 0 {
			c.place.Await()
		}
	}
	if c.place.Turn(c.pendingCost.Load() > own); err != nil {
		return errors.Join(err, c.conn.Close())
	}
	return nil
}

// await waits for the client's next query. It reports false if the connection is to be closed. answered is true if an
// answer was just written.
func (c *tcpConn) await(answered bool) bool {
	timeout := tcpTimeouts.idle
	if c.brief {
		timeout = tcpTimeouts.brief
	}
	c.listener.await(c.conn, timeout, answered)
	_, err := c.reader.Peek(1)
	return err == nil
}
