package upstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"time"

	"github.com/nametap/nametap/internal/chans"
)

const (
	// streamIdle is how long a connection is kept without queries. A server often closes it
	// earlier (RFC 7766, section 6.2.3).
	streamIdle = 30 * time.Second
	// maxQueued is how many bytes may wait to be written to a connection.
	maxQueued = 128 << 10

	frameLen = 2 // length of the length field in front of a message
)

// A stream is one connection. One goroutine dials and writes, another reads.
type stream struct {
	socket
	pool *streams
	wake chan struct{} // has an element when there is something to write, or the connection was closed

	// Guarded by mu.
	queue   []byte    // to be written, framed
	used    time.Time // when a query was last sent, or a reply received, by the client's clock
	heard   time.Time // when anything was last received
	waiting time.Time // since when queries have waited and nothing was received; zero if no query waits
	served  bool      // a reply has come over it
}

const (
	// streamQueries is how many queries in flight share a connection before another one
	// is opened. A server gets at most maxStreams connections (RFC 7766, section 6.2.2,
	// wants few), and as many that wait for their last replies.
	streamQueries = 128
	maxStreams    = 4
)

// streams are a server's connections, over TCP or TLS.
type streams struct {
	sockets[*stream]
}

// chooseLocked returns the newest connection that has few queries. It avoids a connection that has been silent for longer
// than the server usually takes to reply, because it may be dead. If there is no such connection, it opens one. Beyond
// maxStreams, it returns the one that was silent for the shortest time, unless that is maxLate: then all may be dead, and
// a new one takes the place of the one that was silent for the longest time.
func (p *streams) chooseLocked(*attempt) (*stream, error) {
	now, patience := time.Now(), p.server.lateAfter()
	var best, worst *stream
	var least, most time.Duration // the silences of best and worst
	open := 0
	for _, s := range slices.Backward(p.all) {
		queries, silence, ok := s.load(now)
		if !ok {
			continue
		}
		if silence < patience && queries < streamQueries {
			return s, nil
		}
		if open++; best == nil || silence < least {
			best, least = s, silence
		}
		if silence >= most {
			worst, most = s, silence
		}
	}
	room := len(p.all) < 2*maxStreams
	switch {
	case room && open < maxStreams:
	case room && least >= maxLate:
		worst.retire() // sweep closes it
	case best == nil:
		return nil, errTooManyQueries
	default:
		return best, nil
	}
	return p.openLocked()
}

// openLocked opens a connection.
func (p *streams) openLocked() (*stream, error) {
	if err := p.server.reserveSocket(); err != nil {
		return nil, err
	}
	s := &stream{pool: p, wake: make(chan struct{}, 1), used: p.server.client.config.Clock.Now()}
	s.server, s.pending = p.server, make(map[uint16]*attempt)
	if !p.server.client.spawn(s.run) {
		p.server.releaseSocket()
		return nil, net.ErrClosed
	}
	p.all = append(p.all, s)
	return s, nil
}

// load returns how many queries the connection has and for how long it has been silent: for how long it has had queries
// and received nothing. It reports false if the connection takes no more queries.
func (s *stream) load(now time.Time) (queries int, silence time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.waiting.IsZero() {
		silence = now.Sub(s.waiting)
	}
	return len(s.pending), silence, !s.retired && len(s.pending) < maxPending && len(s.queue) < maxQueued && !s.idleLocked()
}

// idleLocked reports whether the connection has had no query for streamIdle. The time while
// the machine was suspended counts: the server, or a NAT, has forgotten the connection.
func (s *stream) idleLocked() bool { return len(s.pending) == 0 && s.since(s.used) > streamIdle }

// hearLocked notes a sign of life.
func (s *stream) hearLocked() {
	s.heard = time.Now()
	s.waiting = time.Time{}
	if len(s.pending) > 0 {
		s.waiting = s.heard
	}
}

func (s *stream) send(a *attempt, packet []byte) (sent bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.retired {
		return false, nil
	}
	a.packet = append(a.packet[:0], packet...)
	binary.BigEndian.PutUint16(a.packet, s.addLocked(a))
	s.queue = binary.BigEndian.AppendUint16(s.queue, uint16(len(a.packet))) //nolint:gosec // begin has checked it
	s.queue = append(s.queue, a.packet...)
	s.used = s.server.client.config.Clock.Now()
	if s.waiting.IsZero() {
		s.waiting = time.Now()
	}
	chans.Wake(s.wake)
	return true, nil
}

// run dials and writes until the connection ends, and then ends its attempts.
func (s *stream) run() {
	err := s.dial()
	if err == nil {
		reader := make(chan error, 1)
		if s.server.client.spawn(func() { reader <- s.read(); s.close() }) {
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
	conn, err := s.server.dial()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn = conn
	if s.closed {
		_ = conn.Close() // it was never used
		return net.ErrClosed
	}
	s.hearLocked()
	return nil
}

// write writes what is in the queue, until the connection ends.
func (s *stream) write() error {
	var spare []byte
	for range s.wake {
		s.mu.Lock()
		frames, closed := s.queue, s.closed
		s.queue = spare[:0]
		s.mu.Unlock()
		if closed {
			return nil
		}
		if err := s.conn.SetWriteDeadline(time.Now().Add(s.server.client.latest.Load().Timeout)); err != nil {
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
		s.mu.Lock()
		a := s.removeRepliedLocked(reply)
		if a != nil {
			s.served = true
			s.used = s.server.client.config.Clock.Now()
		}
		s.hearLocked()
		s.mu.Unlock()
		if a != nil {
			a.end(reply, nil)
		}
	}
}

// close ends the connection; run ends its attempts.
func (s *stream) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endLocked()
	if s.conn != nil {
		_ = s.conn.Close() // it may have been closed before, which does no harm
	}
	chans.Wake(s.wake)
}

// endAll ends all attempts. If a reply has come over the connection, the peer may have closed it without reading the
// queries that are left; these are sent over another connection. Some servers answer one query of each connection.
func (s *stream) endAll(err error) {
	switch {
	case err == nil:
		err = net.ErrClosed
	case errors.Is(err, io.EOF):
		err = errPeerClosed
	}
	s.mu.Lock()
	again := s.served && !errors.Is(err, ErrTimeout)
	s.mu.Unlock()
	for _, a := range s.removeIf(func(*attempt) bool { return true }) {
		if again && a.awaited() && s.pool.send(a, a.packet) == nil {
			continue
		}
		a.end(nil, cause(err))
	}
}

// sweep ends attempts that have expired without a reply. If nothing at all was received since one
// of them was sent, the connection takes no more queries. sweep closes the connection if it is
// idle, or if it is retired and nothing waits for a reply on it.
func (s *stream) sweep(now time.Time) {
	expired := s.removeIf(func(a *attempt) bool { return a.expired(now) })
	s.mu.Lock()
	for _, a := range expired {
		s.retired = s.retired || s.heard.Before(a.sent)
	}
	idle := s.idleLocked() || s.retired && !s.awaitedLocked()
	s.mu.Unlock()
	for _, a := range expired {
		a.end(nil, ErrTimeout)
	}
	if idle {
		s.close()
	}
}

// dial opens a connection, with TLS if the server is asked over TLS.
func (s *server) dial() (net.Conn, error) {
	client := s.client
	ctx, cancel := context.WithTimeout(client.context, client.latest.Load().Timeout)
	defer cancel()
	conn, err := client.dialTCP(ctx, "tcp", s.spec.Addr.String())
	if err != nil || !s.spec.TLS {
		return conn, err
	}
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, ClientSessionCache: client.tickets,
		ServerName: cmp.Or(s.spec.ServerName, s.spec.Addr.Addr().WithZone("").String()),
	}
	if path := client.latest.Load().TLSRootsFile; path != "" {
		config.RootCAs, err = ReadRoots(path)
	}
	secure := tls.Client(conn, config)
	if err == nil {
		err = secure.HandshakeContext(ctx)
	}
	if err != nil {
		_ = conn.Close() // it was never used
		return nil, err
	}
	return secure, nil
}

// ReadRoots reads a PEM file with certificates of certificate authorities.
func ReadRoots(path string) (roots *x509.CertPool, err error) {
	pem, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading root certificates: %w", err)
	}
	if roots = x509.NewCertPool(); !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("reading root certificates: %q has no certificate in PEM form", path)
	}
	return roots, nil
}
