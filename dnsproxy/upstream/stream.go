package upstream

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// streamQueries is how many queries in flight share a connection before another
	// is opened, of which a server gets maxStreams (RFC 7766, section 6.2.2, wants
	// few).
	streamQueries = 128
	maxStreams    = 4
	// streamIdle is how long a connection is kept without queries; servers have
	// their own, often shorter, time (RFC 7766, section 6.2.3).
	streamIdle = 30 * time.Second
	// streamUnacked is how long the peer's kernel may leave what was sent unacknowledged
	// until ours ends the connection: a NAT has forgotten the flow, or the peer is gone.
	// A server that is slow to answer acknowledges at once, so this tells the two apart,
	// and leaves time to ask again on another connection.
	streamUnacked = 2 * time.Second
	// maxQueued is how many bytes may wait to be written to a connection.
	maxQueued = 128 << 10

	frameLen = 2 // length in front of a message
)

var errPeerClosed = errors.New("the server closed the connection")

// A stream is one connection. One goroutine dials and writes, another reads.
type stream struct {
	pool *streams
	wake chan struct{} // has an element when there is something to write or all is over

	born time.Time

	mu      sync.Mutex
	pending map[uint16]*attempt // by ID
	queue   []byte              // to be written, framed
	conn    net.Conn            // nil until it is there
	used    time.Time           // last
	waiting time.Time           // first query after it was last heard from; zero if there is none
	heard   time.Time           // last
	served  bool                // it has brought a reply
	retired bool                // it takes no more queries, and is closed once none is awaited
	ended   bool                // it takes no queries
}

// load returns how many queries the connection has and for how long it has been silent,
// and whether it takes another query.
func (s *stream) load(now time.Time) (queries int, silence time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.waiting.IsZero() {
		silence = now.Sub(s.waiting)
	}
	return len(s.pending), silence, !s.ended && !s.retired && len(s.queue) < maxQueued
}

// retire has the connection take no more queries.
func (s *stream) retire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retired = true
}

// hearLocked notes a sign of life.
func (s *stream) hearLocked() {
	s.heard = time.Now()
	s.waiting = time.Time{}
	if len(s.pending) > 0 {
		s.waiting = s.heard
	}
}

// send queues an attempt; false means that the connection has ended.
func (s *stream) send(a *attempt) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.retired {
		return false
	}
	id := freeID(s.pending)
	s.pending[id] = a
	binary.BigEndian.PutUint16(a.packet, id)
	s.queue = binary.BigEndian.AppendUint16(s.queue, uint16(len(a.packet))) //nolint:gosec // begin has checked it
	s.queue = append(s.queue, a.packet...)
	s.used = time.Now()
	if s.waiting.IsZero() {
		s.waiting = s.used
	}
	s.signal()
	return true
}

func (s *stream) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run dials and writes until the connection ends, and then ends what is pending.
func (s *stream) run() {
	err := s.dial()
	if err == nil {
		reader := make(chan error, 1)
		if s.pool.server.client.spawn(func() { reader <- s.read(); s.close() }) {
			err = s.write()
			s.close()
			if readErr := <-reader; err == nil {
				err = readErr
			}
		}
	}
	s.close()
	s.pool.remove(s)
	s.endAll(err)
}

// dial opens the connection.
func (s *stream) dial() error {
	conn, err := s.pool.server.dial()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn = conn
	if s.ended {
		_ = conn.Close() // it was never used
		return net.ErrClosed
	}
	s.hearLocked()
	return nil
}

// dial connects, and shakes hands with a TLS server.
func (s *server) dial() (net.Conn, error) {
	client := s.client
	ctx, cancel := context.WithTimeout(client.context, client.config.Timeout)
	defer cancel()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", s.spec.Addr.String())
	if err != nil {
		return nil, err
	}
	if err := limitUnacked(conn); err != nil {
		_ = conn.Close() // it was never used
		return nil, err
	}
	if !s.spec.TLS {
		return conn, nil
	}
	config, err := client.tlsConfig(s.spec)
	if err != nil {
		_ = conn.Close() // it was never used
		return nil, err
	}
	secure := tls.Client(conn, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = conn.Close() // it was never used
		return nil, err
	}
	return secure, nil
}

// limitUnacked sets streamUnacked (tcp(7), TCP_USER_TIMEOUT).
func limitUnacked(conn net.Conn) error {
	raw, err := conn.(*net.TCPConn).SyscallConn() //nolint:forcetypeassert // it was dialled as one
	if err != nil {
		return err
	}
	controlErr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(streamUnacked.Milliseconds()))
	})
	return errors.Join(controlErr, err)
}

// write writes what is queued, as much as there is at a time, until the connection
// ends.
func (s *stream) write() error {
	var spare []byte
	for range s.wake {
		s.mu.Lock()
		frames, ended := s.queue, s.ended
		s.queue = spare[:0]
		s.mu.Unlock()
		if ended {
			return nil
		}
		if err := s.conn.SetWriteDeadline(time.Now().Add(s.pool.server.client.config.Timeout)); err != nil {
			return err
		}
		if _, err := s.conn.Write(frames); err != nil {
			return err
		}
		spare = frames
	}
	return nil
}

// read takes replies until the connection ends.
func (s *stream) read() error {
	var frame [frameLen]byte
	for {
		if _, err := io.ReadFull(s.conn, frame[:]); err != nil {
			return err
		}
		reply := make([]byte, binary.BigEndian.Uint16(frame[:]))
		if _, err := io.ReadFull(s.conn, reply); err != nil {
			return err
		}
		s.receive(reply)
	}
}

// receive ends the attempt that a message is the reply to. A connection is proof
// against forgers, so the case of letters does not matter.
func (s *stream) receive(reply []byte) {
	server := s.pool.server
	if len(reply) < headerLen || reply[2]&flagResponse == 0 {
		server.malformed.Add(1)
		return
	}
	id := binary.BigEndian.Uint16(reply)
	s.mu.Lock()
	a := s.pending[id]
	if a != nil && judge(reply, a.opcode, a.question) == other {
		a = nil
	}
	if a != nil {
		delete(s.pending, id)
		s.served = true
		s.used = time.Now()
	}
	s.hearLocked()
	s.mu.Unlock()
	if a == nil {
		server.wrong.Add(1)
		return
	}
	a.end(reply, nil)
}

// close ends the connection; run ends what is pending.
func (s *stream) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.pool.server.shut()
	}
	s.ended = true
	if s.conn != nil {
		_ = s.conn.Close() // at most a second time
	}
	s.signal()
}

// endAll ends what is pending. If the connection had served before, the peer may
// have closed it without having read the query, which is asked once more.
func (s *stream) endAll(err error) {
	switch {
	case err == nil:
		err = net.ErrClosed
	case errors.Is(err, io.EOF):
		err = errPeerClosed
	}
	s.mu.Lock()
	pending := s.pending
	s.pending = nil
	again := s.served && !errors.Is(err, ErrTimeout)
	s.mu.Unlock()
	for _, a := range pending {
		if again && !a.retried && a.awaited() {
			a.retried = true
			s.pool.send(a, a.packet)
			continue
		}
		a.end(nil, cause(err))
	}
}

// sweep ends attempts whose replies did not come, and a connection that is idle. A
// connection on which nothing came since such an attempt was sent loses its place.
func (s *stream) sweep(now time.Time) {
	var expired []*attempt
	s.mu.Lock()
	awaited := false
	for id, a := range s.pending {
		if a.expired(now) {
			expired = append(expired, a)
			delete(s.pending, id)
			s.retired = s.retired || s.heard.Before(a.sent)
		}
		awaited = awaited || a.awaited()
	}
	idle := len(s.pending) == 0 && now.Sub(s.used) > streamIdle || s.retired && !awaited
	s.mu.Unlock()
	for _, a := range expired {
		a.end(nil, ErrTimeout)
	}
	if idle {
		s.close()
	}
}
