package random

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"github.com/miekg/dns"
)

const (
	clients  = 100
	together = 20              // queries that a client sends at a time, at most
	patience = 8 * time.Second // of a client
)

// A session is the use of one socket, or of one connection, by a client.
type session struct {
	*dns.Conn

	world   *world
	tcp     bool
	pending map[uint16]*question // without a response
	done    map[uint16]bool      // with one
}

// client sends queries in one session after the other, until there are none left.
func (w *world) client(random *rand.Rand) {
	for w.left.Load() > 0 {
		network := []string{"udp", "udp", "udp", "udp", "tcp"}[random.IntN(5)]
		conn, err := dns.Dial(network, w.dns)
		if err != nil {
			w.wrong(finding{err: err})
			return
		}
		conn.UDPSize = dns.MaxMsgSize
		each := clients * time.Second / time.Duration(*rate) * together / 2 // of what the session sends at once
		s := &session{conn, w, network == "tcp", map[uint16]*question{}, map[uint16]bool{}}
		for i := random.IntN(10); i >= 0 && s.ask(random); i-- {
			pause(w.tb.Context(), random, each/2, each*3/2)
		}
		_ = conn.Close()
	}
}

// ask sends some queries at once, and waits for the responses. It reports whether the session goes on.
func (s *session) ask(random *rand.Rand) bool {
	for range 1 + random.IntN(together) {
		if s.world.left.Add(-1) < 0 {
			break
		}
		if err := s.send(random, randomQuestion(random)); err != nil {
			return s.lose(err)
		}
	}
	half := false
	if tcp, isTCP := s.Conn.Conn.(*net.TCPConn); isTCP {
		switch random.IntN(20) {
		case 0: // the client leaves in the middle of a query
			_, _ = tcp.Write([]byte{0, 40, 1, 2, 3})
			return false
		case 1: // it leaves by a reset
			_ = tcp.SetLinger(0)
			return false
		case 2:
			half = true
			_ = tcp.CloseWrite()
		}
	}
	_ = s.SetReadDeadline(time.Now().Add(patience))
	for len(s.pending) > 0 {
		b, err := s.ReadMsgHeader(nil)
		if err != nil {
			return s.lose(err)
		}
		s.answered(b, time.Now())
	}
	return !half
}

// send sends a query, over TCP sometimes in two parts.
func (s *session) send(random *rand.Rand, q *question) error {
	for q.id = uint16(random.Uint32()); s.pending[q.id] != nil || s.done[q.id]; {
		q.id = uint16(random.Uint32())
	}
	packet, err := q.message().Pack()
	if err != nil {
		return err
	}
	q.tcp, q.sent = s.tcp, time.Now()
	s.pending[q.id] = q
	if s.tcp && random.IntN(8) == 0 {
		whole := append([]byte{byte(len(packet) >> 8), byte(len(packet))}, packet...)
		n := 1 + random.IntN(len(whole)-1)
		if _, err := s.Conn.Conn.Write(whole[:n]); err != nil {
			return err
		}
		_, err = s.Conn.Conn.Write(whole[n:])
		return err
	}
	_, err = s.Write(packet)
	return err
}

// lose notes that queries have no response. The session has ended.
func (s *session) lose(err error) bool {
	for _, q := range s.pending {
		s.world.wrong(finding{q: q, since: q.sent, until: time.Now(), err: fmt.Errorf("lost: %w", err)})
	}
	return false
}

// answered checks a response.
func (s *session) answered(b []byte, received time.Time) {
	m := new(dns.Msg)
	if err := m.Unpack(b); err != nil {
		s.world.wrong(finding{err: fmt.Errorf("a response that cannot be read: %w: % .100x", err, b)})
		return
	}
	q, again := s.pending[m.Id], s.done[m.Id]
	delete(s.pending, m.Id)
	s.done[m.Id] = true
	switch {
	case again:
		s.world.wrong(finding{m: m, err: errors.New("a second response")})
	case q == nil:
		s.world.wrong(finding{m: m, err: errors.New("a response without a query")})
	default:
		s.world.check(q, m, len(b), received)
	}
}
