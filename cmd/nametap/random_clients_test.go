package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// A session is the use of one socket, or of one connection, by a client. It has one goroutine that writes, and one
// that reads.
type session struct {
	world *randomWorld
	conn  net.Conn
	tcp   bool

	mu      sync.Mutex
	pending map[uint16]*question
	done    map[uint16]bool // answered
	closing bool            // by the client
	changed *sync.Cond
}

// maxPending is how many queries of a session wait at a time.
const maxPending = 100

// patience is how long a client waits for an answer.
const patience = 8 * time.Second

// openSession opens a session.
func (w *randomWorld) openSession(tcp bool) (*session, error) {
	network := "udp"
	if tcp {
		network = "tcp"
	}
	conn, err := net.DialTimeout(network, w.dns, patience)
	if err != nil {
		return nil, err
	}
	s := &session{world: w, conn: conn, tcp: tcp, pending: map[uint16]*question{}, done: map[uint16]bool{}}
	s.changed = sync.NewCond(&s.mu)
	w.readers.Go(s.read)
	return s, nil
}

// read reads responses until the socket is closed.
func (s *session) read() {
	buf := make([]byte, dns.MaxMsgSize)
	for {
		n, err := s.next(buf)
		received := time.Now()
		if err != nil {
			s.ended(err)
			return
		}
		s.answered(buf[:n], received)
	}
}

// next reads one message.
func (s *session) next(buf []byte) (int, error) {
	if !s.tcp {
		return s.conn.Read(buf)
	}
	if _, err := io.ReadFull(s.conn, buf[:2]); err != nil {
		return 0, err
	}
	return io.ReadFull(s.conn, buf[:binary.BigEndian.Uint16(buf)])
}

// answered checks a response.
func (s *session) answered(b []byte, received time.Time) {
	m := new(dns.Msg)
	if err := m.Unpack(b); err != nil && !s.cutRelayed(m, b) {
		s.world.fail(nil, m, fmt.Errorf("a response that cannot be read: %w: % x", err, b))
		return
	}
	s.mu.Lock()
	q, again := s.pending[m.Id], s.done[m.Id]
	delete(s.pending, m.Id)
	s.done[m.Id] = true
	s.changed.Broadcast()
	s.mu.Unlock()
	switch {
	case again:
		s.world.fail(nil, m, errors.New("a second response"))
	case q == nil && s.world.abandonedPort(s.conn): // for a client before that had the same port
	case q == nil:
		s.world.fail(nil, m, errors.New("a response without a query"))
	default:
		if err := s.world.judge.judge(q, m, len(b), received); err != nil {
			s.world.fail(q, m, err)
		}
	}
}

// abandonedPort reports whether an earlier client has closed a socket of the same port without waiting for its answers.
func (w *randomWorld) abandonedPort(conn net.Conn) bool {
	_, abandoned := w.ports.Load(conn.LocalAddr().String())
	return abandoned
}

// cutRelayed reports whether b is a truncated reply that ends within a record. It is relayed as it is. m gets its header
// and question.
func (s *session) cutRelayed(m *dns.Msg, b []byte) bool {
	const header = 12
	if s.tcp || len(b) < header || b[2]&0x02 == 0 {
		return false
	}
	copy := slices.Clone(b)
	clear(copy[6:header]) // without records
	*m = dns.Msg{}
	if m.Unpack(copy) != nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.pending[m.Id]
	if q == nil || q.recursive {
		return false
	}
	if q.edns > 0 {
		m.SetEdns0(q.edns, q.do) // it may have been behind the end
	}
	return true
}

// ended notes the end of the socket. Queries that wait are lost, unless the client has closed it.
func (s *session) ended(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closing {
		for _, q := range s.pending {
			s.world.fail(q, nil, fmt.Errorf("lost: %w", err))
		}
	}
	clear(s.pending)
	s.closing = true
	s.changed.Broadcast()
}

// ask sends a query. It reports false if too many wait, or the socket is closed.
func (s *session) ask(random *rand.Rand, q *question) bool {
	s.mu.Lock()
	if s.closing || len(s.pending) >= maxPending {
		s.mu.Unlock()
		return false
	}
	for q.id = uint16(random.Uint32()); s.pending[q.id] != nil || s.done[q.id]; {
		q.id = uint16(random.Uint32())
	}
	q.tcp, q.sent = s.tcp, time.Now()
	s.pending[q.id] = q
	s.mu.Unlock()
	packet, err := q.message().Pack()
	if err == nil {
		err = s.write(random, packet)
	}
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.pending[q.id] == q {
			delete(s.pending, q.id)
			s.world.fail(q, nil, fmt.Errorf("sending: %w", err))
		}
		return false
	}
	return true
}

// write writes a message, over TCP in up to three parts.
func (s *session) write(random *rand.Rand, packet []byte) error {
	if !s.tcp {
		_, err := s.conn.Write(packet)
		return err
	}
	stream := append(binary.BigEndian.AppendUint16(nil, uint16(len(packet))), packet...)
	for len(stream) > 0 {
		n := len(stream)
		if random.IntN(8) == 0 {
			n = 1 + random.IntN(n)
		}
		if _, err := s.conn.Write(stream[:n]); err != nil {
			return err
		}
		stream = stream[n:]
	}
	return nil
}

// close ends the session in one of several ways. Only some wait for all answers.
func (s *session) close(random *rand.Rand) {
	way := random.IntN(10)
	abandon := func() {
		s.mu.Lock()
		s.closing = true
		s.world.abandoned.Add(int64(len(s.pending)))
		s.world.ports.Store(s.conn.LocalAddr().String(), true)
		s.mu.Unlock()
	}
	switch tcp, isTCP := s.conn.(*net.TCPConn); {
	case way == 0: // at once
		abandon()
	case way == 1 && isTCP: // by a reset
		abandon()
		_ = tcp.SetLinger(0)
	case way == 2 && isTCP: // in the middle of a query
		abandon()
		_, _ = tcp.Write([]byte{0, 40, 1, 2, 3})
	case way <= 4 && isTCP: // first its sending side
		_ = tcp.CloseWrite()
		s.await()
	default:
		s.await()
	}
	_ = s.conn.Close()
}

// await waits until no query waits.
func (s *session) await() {
	timer := time.AfterFunc(patience, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, q := range s.pending {
			s.world.fail(q, nil, errors.New("lost"))
		}
		clear(s.pending)
		s.changed.Broadcast()
	})
	defer timer.Stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.pending) > 0 {
		s.changed.Wait()
	}
	s.closing = true
}

// client sends queries in one session after the other, until there are none left.
func (w *randomWorld) client(random *rand.Rand, interval time.Duration) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	var s *session
	left := 0
	for range ticker.C {
		if w.left.Add(-1) < 0 {
			break
		}
		if left == 0 {
			w.end(s, random)
			var err error
			if s, err = w.openSession(random.IntN(5) == 0); err != nil {
				w.fail(nil, nil, fmt.Errorf("connecting: %w", err))
				s = nil
				continue
			}
			left = 1 + random.IntN(60)
			if !s.tcp {
				left *= 10
			}
		}
		left--
		if s.ask(random, randomQuestion(random)) {
			w.sent.Add(1)
			continue
		}
		w.left.Add(1) // later
		left = 0
	}
	w.end(s, random)
}

// end ends a session, in the background.
func (w *randomWorld) end(s *session, random *rand.Rand) {
	if s != nil {
		seed := random.Uint64()
		w.readers.Go(func() { s.close(rand.New(rand.NewPCG(seed, 0))) })
	}
}
