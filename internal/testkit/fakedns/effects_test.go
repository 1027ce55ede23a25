package fakedns_test

import (
	"errors"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A link sends queries and receives messages, valid or not.
type link struct {
	testing.TB
	*dns.Conn
}

// dial opens a link that is closed when the test ends.
func dial(t *testing.T, network string, s *fakedns.Server) link {
	t.Helper()
	conn, err := dns.DialTimeout(network, s.Addr.String(), wait.Limit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(wait.Limit)); err != nil {
		t.Fatal(err)
	}
	return link{t, conn}
}

// send sends a query for an A record.
func (l link) send(id uint16, name string) {
	l.Helper()
	query := new(dns.Msg).SetQuestion(name, dns.TypeA)
	query.Id = id
	if err := l.WriteMsg(query); err != nil {
		l.Fatal(err)
	}
}

// receive returns the next message.
func (l link) receive() []byte {
	l.Helper()
	buf := make([]byte, dns.MaxMsgSize)
	n, err := l.Read(buf)
	if err != nil {
		l.Fatal(err)
	}
	return buf[:n]
}

// message parses the next message.
func (l link) message() *dns.Msg {
	l.Helper()
	m := new(dns.Msg)
	if err := m.Unpack(l.receive()); err != nil {
		l.Fatal(err)
	}
	return m
}

func TestForgedFirst(t *testing.T) {
	t.Parallel()
	answer := fakedns.Answer("www.example. 60 IN A 192.0.2.1")
	for name, effect := range map[string]fakedns.Effect{"ID": fakedns.WrongID, "question": fakedns.WrongQuestion} {
		s := fakedns.Start(t, answer)
		s.Handle(answer, fakedns.First(effect))
		l := dial(t, "udp", s)
		l.send(7, "www.example.")
		forged, right := l.message(), l.message()
		if forged.Id == 7 && forged.Question[0].Name == "www.example." || forged.Rcode != dns.RcodeNameError {
			t.Errorf("wrong %s first:\n%v", name, forged)
		}
		if right.Id != 7 || right.Question[0].Name != "www.example." || len(right.Answer) != 1 {
			t.Errorf("wrong %s, then:\n%v", name, right)
		}
	}
}

func TestChangedCase(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1"))
	s.Handle(fakedns.Answer("www.a-b1.example. 60 IN A 192.0.2.1"), fakedns.First(fakedns.ChangedCase))
	l := dial(t, "udp", s)
	l.send(1, "wWw.a-B1.example.")
	if got := l.message().Question[0].Name; got != "WwW.A-b1.EXAMPLE." {
		t.Errorf("question %q", got)
	}
	if got := l.message().Question[0].Name; got != "wWw.a-B1.example." {
		t.Errorf("the reply itself was changed: question %q", got)
	}
}

func TestBytes(t *testing.T) {
	t.Parallel()
	whole := fakedns.Answer("www.example. 60 IN A 192.0.2.1")
	s := fakedns.Start(t, whole)
	l := dial(t, "udp", s)
	l.send(1, "www.example.")
	reply := l.receive()

	s.Handle(whole, fakedns.Cut(3))
	l.send(1, "www.example.")
	if got := l.receive(); !slices.Equal(got, reply[:len(reply)-3]) {
		t.Errorf("cut: % x, want three bytes less than % x", got, reply)
	}
	s.Handle(fakedns.Silence, fakedns.Raw(func(query []byte) [][]byte { return [][]byte{query[:2], query} }))
	l.send(0x0102, "www.example.")
	if got := l.receive(); !slices.Equal(got, []byte{1, 2}) {
		t.Errorf("raw: % x", got)
	}
	if got := l.message(); got.Id != 0x0102 || got.Response {
		t.Errorf("raw: %v, want the query", got)
	}
	s.Handle(whole, fakedns.Duplicate(3))
	l.send(1, "www.example.")
	for range 3 {
		if got := l.receive(); !slices.Equal(got, reply) {
			t.Errorf("duplicate: % x, want % x", got, reply)
		}
	}
}

func TestDelay(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Answer())
	const delay = 50 * time.Millisecond
	s.Handle(fakedns.Answer(), fakedns.Delay(delay), fakedns.Delay(delay))
	l := dial(t, "udp", s)
	began := time.Now()
	l.send(1, "www.example.")
	l.receive()
	if took := time.Since(began); took < 2*delay {
		t.Errorf("an answer after %v, want %v", took, 2*delay)
	}
	s.Handle(fakedns.Answer(), fakedns.Delay(time.Hour))
	l.send(1, "www.example.")
	wait.Until(t, "the query is received", func() bool { return len(s.Queries()) == 2 })
	s.Close() // does not wait for an hour
}

func TestLoss(t *testing.T) {
	t.Parallel()
	const queries, p = 1000, 0.3
	answer := fakedns.Answer()
	s := fakedns.Start(t, answer)
	s.Handle(answer, fakedns.OnUDP(fakedns.Loss(p, 1)))
	l, tcp := dial(t, "udp", s), dial(t, "tcp", s)
	answered := 0
	for id := range uint16(queries) {
		l.send(id, "www.example.")
		tcp.send(id, "www.example.") // never lost
		tcp.receive()
		if err := l.SetReadDeadline(time.Now().Add(5 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Read(make([]byte, 512)); err == nil {
			answered++
		}
	}
	// Six standard deviations of a binomial distribution. Late answers count later.
	if lost := queries - answered; lost < 213 || lost > 387 {
		t.Errorf("%d of %d packets lost, want about %v", lost, queries, p*queries)
	}
}

func TestOutOfOrder(t *testing.T) {
	t.Parallel()
	answer := fakedns.Answer()
	s := fakedns.Start(t, answer)
	for _, network := range []string{"udp", "tcp"} {
		outOfOrder, applied := fakedns.OutOfOrder(3), make(chan struct{})
		s.Handle(answer, func(r fakedns.Request, packets []fakedns.Packet) []fakedns.Packet {
			defer func() { applied <- struct{}{} }()
			return outOfOrder(r, packets)
		})
		l := dial(t, network, s)
		for _, ids := range [][]uint16{{1, 2, 3}, {4, 5, 6}} {
			for _, id := range ids {
				l.send(id, "www.example.")
				wait.For(t, "the effect on the reply", applied) // so that the queries keep their order
			}
			for _, want := range slices.Backward(ids) {
				if got := l.message().Id; got != want {
					t.Errorf("over %s: reply %d, want %d", network, got, want)
				}
			}
		}
	}
}

func TestJitter(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Answer(), fakedns.Forget)
	s.Handle(fakedns.Answer(), fakedns.Jitter(50*time.Millisecond, 1))
	l := dial(t, "udp", s)
	const queries = 50
	for id := range uint16(queries) {
		l.send(id, "www.example.")
	}
	var ids []uint16
	for range queries {
		ids = append(ids, l.message().Id)
	}
	if slices.IsSorted(ids) {
		t.Errorf("no reply overtook another: %v", ids)
	}
	if got := s.Queries(); len(got) > 0 {
		t.Errorf("%d queries are recorded", len(got))
	}
}

func TestSometimes(t *testing.T) {
	t.Parallel()
	answer := fakedns.Answer()
	s := fakedns.Start(t, answer)
	const queries, p = 1000, 0.3
	s.Handle(answer, fakedns.OnTCP(fakedns.Sometimes(p, 1, fakedns.Duplicate(2))))
	l, udp := dial(t, "tcp", s), dial(t, "udp", s)
	replies := 0
	for id := range uint16(queries) {
		l.send(id, "www.example.")
		udp.send(id, "www.example.") // never duplicated
		if got := udp.message().Id; got != id {
			t.Fatalf("reply %d, want %d", got, id)
		}
	}
	if err := l.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := l.ReadMsg(); err != nil {
			break
		}
		replies++
	}
	if more := replies - queries; more < 213 || more > 387 { // see TestLoss
		t.Errorf("%d of %d replies are duplicated, want about %v", more, queries, p*queries)
	}
}

func TestBreak(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1"))
	s.Handle(fakedns.Answer("www.example. 60 IN A 192.0.2.1"), fakedns.Break)
	l := dial(t, "tcp", s)
	l.send(1, "www.example.")
	if _, err := l.ReadMsg(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the reply ends with %v, want an end in the middle", err)
	}
	l = dial(t, "udp", s)
	l.send(1, "www.example.")
	l.message() // whole
}
