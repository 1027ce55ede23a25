package load

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
)

// keptSockets is the number of sockets that stay open.
const keptSockets = 8

// A query is one query of the load.
type query struct {
	question  *Question
	name      string // as asked
	id        uint16
	transport string
	sent      time.Time
	wire      []byte
}

// send sends queries at their times until ctx ends, from the calling goroutine.
func (l *Load) send(ctx context.Context, random *rand.Rand, kept []*keptSocket) {
	began := time.Now()
	interval := float64(time.Second) / float64(l.config.Rate)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for n := uint64(0); ; n++ {
		due := began.Add(time.Duration(float64(n) * interval))
		if wait := time.Until(due); wait > 0 {
			timer.Reset(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				return
			}
		} else if ctx.Err() != nil {
			return
		}
		lag := time.Since(due)
		l.both(func(t *tally) { t.Lag = max(t.Lag, lag) })
		l.sendOne(random, kept)
	}
}

// sendOne sends a query, and leaves its answer to another goroutine.
func (l *Load) sendOne(random *rand.Rand, kept []*keptSocket) {
	questions := l.config.Expect.Questions
	question := &questions[random.IntN(len(questions))]
	q := &query{question: question, name: question.ask(random.Uint64()), id: uint16(random.Uint32()), sent: time.Now()} //nolint:gosec // 16 of the bits
	message := new(dns.Msg).SetQuestion(q.name, dns.TypeA)
	message.Id = q.id
	l.flights.Add(1)
	var err error
	if q.wire, err = message.Pack(); err != nil {
		l.note(q, Unsent, err.Error(), time.Now())
		return
	}
	switch share := random.Float64(); {
	case share < l.config.TCP:
		q.transport = "tcp"
		go l.config.Enter(func() { l.overTCP(q) })
	case share < l.config.TCP+l.config.Kept:
		q.transport = "udp-kept"
		kept[random.IntN(len(kept))].send(q)
	default:
		q.transport = "udp"
		l.overUDP(q)
	}
}

// overUDP sends a query from a connected socket of its own.
func (l *Load) overUDP(q *query) {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(l.config.Server))
	if err != nil {
		l.fail(q, err, Unsent)
		return
	}
	_ = conn.SetReadDeadline(q.sent.Add(timeout)) // of an open socket
	if _, err = conn.Write(q.wire); err != nil {
		_ = conn.Close() // it has sent nothing
		l.fail(q, err, Unsent)
		return
	}
	go func() {
		defer func() { _ = conn.Close() }() // it has no more to send
		for buf := make([]byte, dns.MaxMsgSize/16); ; {
			n, err := conn.Read(buf)
			if err != nil {
				l.fail(q, err, Lost)
				return
			}
			if message := parse(q, buf[:n]); message != nil {
				l.judge(q, message)
				return
			}
		}
	}()
}

// overTCP sends a query over a connection of its own and waits for the answer.
func (l *Load) overTCP(q *query) {
	conn, err := (&net.Dialer{Deadline: q.sent.Add(timeout)}).Dial("tcp", l.config.Server.String())
	if err != nil {
		l.fail(q, err, Lost)
		return
	}
	defer func() { _ = conn.Close() }() // it has no more to send
	_ = conn.SetDeadline(q.sent.Add(timeout))
	_, err = conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(q.wire))), q.wire...)) //nolint:gosec // a query is short
	for err == nil {
		var length [2]byte
		if _, err = io.ReadFull(conn, length[:]); err != nil {
			break
		}
		buf := make([]byte, binary.BigEndian.Uint16(length[:]))
		if _, err = io.ReadFull(conn, buf); err != nil {
			break
		}
		if message := parse(q, buf); message != nil {
			l.judge(q, message)
			return
		}
	}
	l.fail(q, err, Lost)
}

// A keptSocket is a socket for many queries.
type keptSocket struct {
	load *Load
	conn *net.UDPConn

	mu      sync.Mutex
	pending map[uint16]*query
}

// openKept opens the kept sockets and starts their readers.
func (l *Load) openKept() (sockets []*keptSocket, err error) {
	if l.config.Kept == 0 {
		return nil, nil
	}
	l.config.Enter(func() {
		for range keptSockets {
			s := &keptSocket{load: l, pending: map[uint16]*query{}}
			if s.conn, err = net.ListenUDP("udp", nil); err != nil {
				return
			}
			sockets = append(sockets, s)
			go s.read()
		}
	})
	return sockets, err
}

// send sends a query under an ID that no query in flight of this socket has.
func (s *keptSocket) send(q *query) {
	s.mu.Lock()
	for s.pending[q.id] != nil {
		q.id++
	}
	binary.BigEndian.PutUint16(q.wire, q.id)
	s.pending[q.id] = q
	s.mu.Unlock()
	time.AfterFunc(timeout, func() {
		if s.take(q) {
			s.load.note(q, Lost, "no answer", time.Now())
		}
	})
	if _, err := s.conn.WriteToUDPAddrPort(q.wire, s.load.config.Server); err != nil && s.take(q) {
		s.load.fail(q, err, Unsent)
	}
}

// take removes a query, and reports whether it was in flight.
func (s *keptSocket) take(q *query) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[q.id] != q {
		return false
	}
	delete(s.pending, q.id)
	return true
}

// read reads answers until the socket is closed.
func (s *keptSocket) read() {
	for buf := make([]byte, dns.MaxMsgSize); ; {
		n, from, err := s.conn.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		if err != nil || n < 2 || from != s.load.config.Server { // an ICMP error: the timeout of the query follows
			continue
		}
		s.mu.Lock()
		q := s.pending[binary.BigEndian.Uint16(buf)]
		s.mu.Unlock()
		if q == nil {
			continue
		}
		if message := parse(q, buf[:n]); message != nil && s.take(q) {
			s.load.judge(q, message)
		}
	}
}

// parse returns a message that answers a query, and nil for any other message.
func parse(q *query, wire []byte) *dns.Msg {
	message := new(dns.Msg)
	if message.Unpack(wire) != nil || message.Id != q.id || !message.Response ||
		len(message.Question) != 1 || !strings.EqualFold(message.Question[0].Name, q.name) || message.Question[0].Qtype != dns.TypeA {
		return nil
	}
	return message
}

// judge judges and notes the answer to a query.
func (l *Load) judge(q *query, message *dns.Msg) {
	var addresses []netip.Addr
	for _, rr := range message.Answer {
		if a, ok := rr.(*dns.A); ok {
			addr, _ := netip.AddrFromSlice(a.A.To4())
			addresses = append(addresses, addr)
		}
	}
	kind := l.config.Expect.verdict(q.question, message.Rcode, addresses)
	l.note(q, kind, fmt.Sprintf("%s %v", dns.RcodeToString[message.Rcode], addresses), time.Now())
}

// fail notes the end of a query by an error: Unreachable if the server's host refuses it, or else kind.
func (l *Load) fail(q *query, err error, kind Kind) {
	for _, refused := range []error{syscall.ECONNREFUSED, syscall.ECONNRESET, io.EOF, syscall.EHOSTUNREACH, syscall.ENETUNREACH} {
		if errors.Is(err, refused) {
			kind = Unreachable
		}
	}
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.EADDRNOTAVAIL) {
		kind = Unsent
	}
	l.note(q, kind, err.Error(), time.Now())
}
