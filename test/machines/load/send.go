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
	transport Transport
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
		l.tally.lag(time.Since(due))
		l.sendOne(random, kept)
	}
}

// sendOne sends a query, and leaves its answer to another goroutine.
func (l *Load) sendOne(random *rand.Rand, kept []*keptSocket) {
	question := l.windows.current().pick(random.Int())
	q := &query{question: question, name: question.ask(random.Uint64()), id: uint16(random.Uint32()), sent: time.Now()} //nolint:gosec // 16 of the bits
	message := new(dns.Msg).SetQuestion(q.name, question.qtype)
	message.Id = q.id
	var err error
	if q.wire, err = message.Pack(); err != nil {
		l.note(q, Unsent, err.Error(), time.Now())
		return
	}
	switch share := random.Float64(); {
	case share < l.config.TCP:
		q.transport = TCP
		l.flights.Go(func() { l.config.Enter(func() { l.overTCP(q) }) })
	case share < l.config.TCP+l.config.Kept:
		q.transport = UDPKept
		kept[random.IntN(len(kept))].send(q)
	default:
		q.transport = UDP
		l.overUDP(q)
	}
}

// overUDP sends a query from a connected socket of its own.
func (l *Load) overUDP(q *query) {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(l.config.Server))
	if err == nil {
		_ = conn.SetReadDeadline(q.sent.Add(l.config.Timeout)) // of an open socket
		_, err = conn.Write(q.wire)
	}
	if err != nil {
		if conn != nil {
			_ = conn.Close() // it has sent nothing
		}
		l.fail(q, err, Unsent)
		return
	}
	l.flights.Go(func() {
		defer func() { _ = conn.Close() }() // it has no more to send
		buf := make([]byte, dns.MaxMsgSize/16)
		for {
			n, err := conn.Read(buf)
			if err != nil {
				l.fail(q, err, Lost)
				return
			}
			if l.answered(q, buf[:n]) {
				return
			}
		}
	})
}

// overTCP sends a query over a connection of its own and waits for the answer.
func (l *Load) overTCP(q *query) {
	ctx, cancel := context.WithDeadline(context.Background(), q.sent.Add(l.config.Timeout))
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", l.config.Server.String())
	if err != nil {
		l.fail(q, err, Lost)
		return
	}
	defer func() { _ = conn.Close() }() // it has no more to send
	_ = conn.SetDeadline(q.sent.Add(l.config.Timeout))
	if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(q.wire))), q.wire...)); err != nil { //nolint:gosec // a query is short
		l.fail(q, err, Lost)
		return
	}
	for {
		var length [2]byte
		if _, err := io.ReadFull(conn, length[:]); err != nil {
			l.fail(q, err, Lost)
			return
		}
		buf := make([]byte, binary.BigEndian.Uint16(length[:]))
		if _, err := io.ReadFull(conn, buf); err != nil {
			l.fail(q, err, Lost)
			return
		}
		if l.answered(q, buf) {
			return
		}
	}
}

// A keptSocket is a socket for many queries.
type keptSocket struct {
	load   *Load
	conn   *net.UDPConn
	reader sync.WaitGroup

	mu      sync.Mutex
	pending map[uint16]*query
	timers  map[uint16]*time.Timer
}

// openKept opens the kept sockets and starts their readers.
func (l *Load) openKept() ([]*keptSocket, error) {
	if l.config.Kept == 0 {
		return nil, nil
	}
	sockets := make([]*keptSocket, keptSockets)
	var err error
	l.config.Enter(func() {
		for i := range sockets {
			s := &keptSocket{load: l, pending: map[uint16]*query{}, timers: map[uint16]*time.Timer{}}
			if s.conn, err = net.ListenUDP("udp", nil); err != nil {
				err = fmt.Errorf("opening a socket of the load: %w", err)
				return
			}
			sockets[i] = s
			s.reader.Go(s.read)
		}
	})
	if err != nil {
		for _, s := range sockets {
			if s != nil {
				s.end()
			}
		}
		return nil, err
	}
	return sockets, nil
}

// end closes the socket and waits for its reader.
func (s *keptSocket) end() {
	_ = s.conn.Close() // no query is in flight
	s.reader.Wait()
}

// send sends a query under an ID that no query in flight of this socket has.
func (s *keptSocket) send(q *query) {
	s.mu.Lock()
	for s.pending[q.id] != nil {
		q.id++
	}
	binary.BigEndian.PutUint16(q.wire, q.id)
	s.pending[q.id] = q
	s.load.flights.Add(1)
	s.timers[q.id] = time.AfterFunc(s.load.config.Timeout, func() {
		if s.take(q.id) == q {
			s.load.note(q, Lost, "no answer", time.Now())
			s.load.flights.Done()
		}
	})
	s.mu.Unlock()
	if _, err := s.conn.WriteToUDPAddrPort(q.wire, s.load.config.Server); err != nil && s.take(q.id) == q {
		s.load.fail(q, err, Unsent)
		s.load.flights.Done()
	}
}

// take removes and returns the query with an ID; nil if there is none.
func (s *keptSocket) take(id uint16) *query {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.pending[id]
	if q != nil {
		s.timers[id].Stop()
		delete(s.pending, id)
		delete(s.timers, id)
	}
	return q
}

// read reads answers until the socket is closed.
func (s *keptSocket) read() {
	buf := make([]byte, dns.MaxMsgSize)
	for {
		n, from, err := s.conn.ReadFromUDPAddrPort(buf)
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			continue // an ICMP error; the timeout of the query follows
		}
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		if n < 2 || from != s.load.config.Server {
			s.load.tally.stray(fmt.Sprintf("%d bytes from %v", n, from))
			continue
		}
		id := binary.BigEndian.Uint16(buf)
		s.mu.Lock()
		q := s.pending[id]
		s.mu.Unlock()
		if q == nil {
			s.load.tally.stray(fmt.Sprintf("an answer with ID %d, which no query has", id))
			continue
		}
		received := time.Now()
		if message, answers := s.load.parse(q, buf[:n]); answers && s.take(id) == q {
			s.load.judge(q, message, received)
			s.load.flights.Done()
		}
	}
}

// parse returns a message that answers a query. It counts any other message as stray.
func (l *Load) parse(q *query, wire []byte) (*dns.Msg, bool) {
	message := new(dns.Msg)
	err := message.Unpack(wire)
	switch {
	case err != nil:
		l.tally.stray(fmt.Sprintf("a malformed answer for %s: %v", q.name, err))
	case message.Id != q.id || !message.Response:
		l.tally.stray(fmt.Sprintf("an answer with ID %d for %s, which has %d", message.Id, q.name, q.id))
	case len(message.Question) != 1 || !strings.EqualFold(message.Question[0].Name, q.name) || message.Question[0].Qtype != q.question.qtype:
		l.tally.stray(fmt.Sprintf("an answer to %v for %s", message.Question, q.name))
	default:
		return message, true
	}
	return nil, false
}

// answered judges and notes a message if it answers a query, and reports whether it does.
func (l *Load) answered(q *query, wire []byte) bool {
	received := time.Now()
	message, answers := l.parse(q, wire)
	if answers {
		l.judge(q, message, received)
	}
	return answers
}

// judge judges and notes the answer to a query.
func (l *Load) judge(q *query, message *dns.Msg, received time.Time) {
	a := Answer{Name: q.name, Sent: q.sent, Received: received, Rcode: message.Rcode}
	for _, rr := range message.Answer {
		var addr netip.Addr
		switch rr := rr.(type) {
		case *dns.A:
			addr, _ = netip.AddrFromSlice(rr.A.To4())
		case *dns.AAAA:
			addr, _ = netip.AddrFromSlice(rr.AAAA.To16())
		default:
			continue
		}
		a.Addresses = append(a.Addresses, addr)
	}
	kind, wrong := l.windows.judge(q.question, a)
	detail := ""
	if wrong != nil {
		detail = fmt.Sprintf("%s %v", dns.RcodeToString[a.Rcode], a.Addresses)
		if wrong != errUnexpected { //nolint:errorlint // it is never wrapped
			detail += ": " + wrong.Error()
		}
		if message.Truncated {
			detail += " truncated"
		}
	}
	l.note(q, kind, detail, received)
}

// fail notes the end of a query by an error: Unreachable if the server's host refuses it,
// or else kind.
func (l *Load) fail(q *query, err error, kind Kind) {
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) ||
		errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) {
		kind = Unreachable
	}
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.EADDRNOTAVAIL) {
		kind = Unsent
	}
	l.note(q, kind, err.Error(), time.Now())
}

// note notes the end of a query.
func (l *Load) note(q *query, kind Kind, detail string, at time.Time) {
	took := at.Sub(q.sent)
	e := Example{Sent: q.sent, Took: took, Name: q.name, Transport: q.transport, Detail: detail}
	l.tally.note(kind, e)
	if kind != Right && l.config.OnBad != nil {
		l.config.OnBad(kind, e)
	}
}
