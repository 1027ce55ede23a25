package upstream_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// ask asks a group of servers, and fails the test if there is no reply.
func ask(t *testing.T, g *upstream.Group, how upstream.Mode) (got []byte, from string) {
	t.Helper()
	got, from, err := g.Exchange(context.Background(), query(), how)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got[:2], query()[:2]) || !bytes.Equal(got[12:questionEnd], query()[12:questionEnd]) {
		t.Errorf("the reply does not have the query's ID and question: %x", got)
	}
	return got, from
}

func specs(servers ...*raw) (all []upstream.Spec) {
	for _, s := range servers {
		all = append(all, s.spec())
	}
	return all
}

func code(reply []byte) byte { return reply[3] & 0x0f }

// truncating returns a handler that truncates replies over UDP, and appends whole to replies
// over TCP.
func truncating(whole []byte) handler {
	return func(query []byte, network string) [][]byte {
		r := reply(query, 0)
		if network == "udp" {
			r[2] |= 0x02
			return [][]byte{r}
		}
		return [][]byte{append(r, whole...)}
	}
}

func silence([]byte, string) [][]byte { return [][]byte{} }

// F2: a reply may have any size.
func TestHugeReply(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		huge := bytes.Repeat([]byte{1, 2, 3, 4}, 15_000)
		s := serve(t, func(query []byte, _ string) [][]byte { return [][]byte{append(reply(query, 0), huge...)} })
		g := client(t, upstream.Config{}).Group(specs(s), upstream.Options{})
		for _, how := range []upstream.Mode{upstream.UDPOnly, upstream.TCPOnly} {
			if got, _ := ask(t, g, how); !bytes.Equal(got[questionEnd:], huge) {
				t.Errorf("%d bytes", len(got))
			}
		}
	})
}

// F2: after a truncated reply the query is sent over TCP, unless the caller wants UDP or TCP
// fails.
func TestTruncated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		s := serve(t, truncating([]byte("whole")))
		refusing := fakedns.Start(t, func(query *dns.Msg, _ string) *dns.Msg {
			m := new(dns.Msg).SetReply(query)
			m.Truncated = true
			return m
		}, fakedns.NoTCP)
		c := client(t, upstream.Config{})
		for _, tc := range []struct {
			server  upstream.Spec
			options upstream.Options
			how     upstream.Mode
			cut     bool
		}{
			{s.spec(), upstream.Options{}, upstream.UDPThenTCP, false},
			{s.spec(), upstream.Options{}, upstream.UDPOnly, true},
			{s.spec(), upstream.Options{}, upstream.TCPOnly, false},
			{s.spec(), upstream.Options{UseVC: true}, upstream.UDPOnly, false},
			{upstream.Spec{Addr: refusing.Addr}, upstream.Options{}, upstream.UDPThenTCP, true},
		} {
			got, _ := ask(t, c.Group([]upstream.Spec{tc.server}, tc.options), tc.how)
			if cut := got[2]&2 != 0; cut != tc.cut || !cut && string(got[questionEnd:]) != "whole" {
				t.Errorf("%v, %v: %x", tc.how, tc.options, got)
			}
		}
	})
}

// F3: the first usable reply is the answer. If there is none, the best failure is.
func TestFailuresMoveOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		servers := map[byte]*raw{}
		for rcode := range byte(10) {
			servers[rcode] = serve(t, answers(rcode))
		}
		bare := serve(t, func(query []byte, _ string) [][]byte {
			return [][]byte{append(append([]byte(nil), query[:2]...), 0x81, 2, 0, 0, 0, 0, 0, 0, 0, 0)}
		})
		for _, tc := range []struct {
			servers []*raw
			want    byte
		}{
			{[]*raw{servers[2], servers[5], servers[0]}, 0},
			{[]*raw{servers[2], servers[4], servers[3]}, 3},
			{[]*raw{servers[1], servers[4], servers[5], servers[2], servers[9]}, 2},
			{[]*raw{servers[1], servers[4], servers[5]}, 5},
			{[]*raw{servers[1], servers[4]}, 4},
			{[]*raw{servers[9], servers[1]}, 1},
			{[]*raw{servers[9]}, 9},
			{[]*raw{bare}, 2},
		} {
			for _, fastest := range []bool{false, true} {
				c := client(t, upstream.Config{})
				g := c.Group(specs(tc.servers...), upstream.Options{Fastest: fastest})
				got, from := ask(t, g, upstream.UDPThenTCP)
				if code(got) != tc.want {
					t.Errorf("want response code %d: %x from %v", tc.want, got, from)
				}
			}
		}
	})
}

// F3: a reply to an opcode other than QUERY is an answer with any response code, and need not
// have the question.
func TestUpdate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		s := serve(t, func(query []byte, _ string) [][]byte {
			return [][]byte{append(append([]byte(nil), query[:2]...), query[2]|0x80, 9, 0, 0, 0, 0, 0, 0, 0, 0)}
		})
		g := client(t, upstream.Config{}).Group(specs(s), upstream.Options{})
		update := query()
		update[2] = 5 << 3
		got, _, err := g.Exchange(context.Background(), update, upstream.UDPThenTCP)
		if err != nil || len(got) != 12 || code(got) != 9 {
			t.Errorf("%x, %v", got, err)
		}
	})
}

// F11: messages that are not the reply are counted, and the reply is still awaited.
func TestWrongReplies(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		elsewhere, err := net.ListenPacket("udp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer elsewhere.Close()
		var s *raw
		var ready sync.WaitGroup
		ready.Add(1)
		s = serve(t, func(query []byte, _ string) [][]byte {
			ready.Wait()
			wrongID, wrongName, wrongType, noQuestion, twoQuestions, update, right := reply(query, 0), reply(query, 0), reply(query, 0),
				reply(query, 0), reply(query, 0), reply(query, 0)[:12], reply(query, 3)
			wrongID[1]++
			wrongName[13]++
			wrongType[questionEnd-3]++
			noQuestion[5], twoQuestions[5] = 0, 2
			update[2], update[5] = update[2]|5<<3, 0
			for _, from := range s.sources() { // from another port
				if to, err := net.ResolveUDPAddr("udp4", from); err == nil {
					_, _ = elsewhere.WriteTo(reply(query, 0), to)
				}
			}
			return [][]byte{wrongID, wrongName, wrongType, noQuestion, twoQuestions, update, reply(query, 0)[:20],
				{}, []byte("short"), query, right}
		})
		ready.Done()
		c := client(t, upstream.Config{})
		if got, _ := ask(t, c.Group(specs(s), upstream.Options{}), upstream.UDPOnly); code(got) != 3 {
			t.Errorf("a wrong reply is used: %x", got)
		}
		if st := c.Status()[0]; st.Wrong != 7 || st.Malformed != 3 {
			t.Errorf("%d wrong and %d malformed", st.Wrong, st.Malformed)
		}
	})
}

// F11: queries have many different IDs and source ports, and no socket is used for long.
func TestUnpredictable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		s, sockets := serve(t, answers(0)), 0
		c := client(t, upstream.Config{Control: func(string, string, syscall.RawConn) error { sockets++; return nil }})
		g := c.Group(specs(s), upstream.Options{})
		const queries = 3000
		for range queries {
			ask(t, g, upstream.UDPOnly)
		}
		ids := map[string]bool{}
		for _, q := range s.queries() {
			ids[string(q[:2])] = true
		}
		// Some may be equal by chance.
		if ports := len(s.sources()); len(ids) < queries*9/10 || sockets <= queries/128 || ports < sockets*3/4 {
			t.Errorf("%d IDs, %d sockets and %d ports in %d queries", len(ids), sockets, ports, queries)
		}
	})
}

// F4: a refused connection is noticed at once, over UDP and TCP.
func TestConnectionRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		s := fakedns.Start(t, fakedns.Silence, fakedns.NoUDP, fakedns.NoTCP)
		g := client(t, upstream.Config{}).Group([]upstream.Spec{{Addr: s.Addr}}, upstream.Options{})
		for _, how := range []upstream.Mode{upstream.UDPThenTCP, upstream.TCPOnly} {
			for range 10 {
				if _, _, err := g.Exchange(context.Background(), query(), how); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Fatal(err)
				}
			}
		}
	})
}

// Close ends queries in flight; later ones fail.
func TestClose(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		arrived := make(chan bool, 2)
		s := serve(t, func([]byte, string) [][]byte { arrived <- true; return [][]byte{} })
		c := upstream.NewClient(upstream.Config{})
		g := c.Group(specs(s), upstream.Options{})
		var asking sync.WaitGroup
		for _, how := range []upstream.Mode{upstream.UDPOnly, upstream.TCPOnly} {
			asking.Go(func() {
				if _, _, err := g.Exchange(context.Background(), query(), how); !errors.Is(err, net.ErrClosed) {
					t.Errorf("%v: %v", how, err)
				}
			})
		}
		<-arrived
		<-arrived
		c.Close()
		asking.Wait()
		if _, _, err := g.Exchange(context.Background(), query(), 0); !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
}

// F10: 10,000 queries at once to a nameserver that does not answer need few sockets and goroutines.
func TestResources(t *testing.T) {
	// Not parallel: it counts goroutines. In the bubble, time stands still.
	synctest.Test(t, func(t *testing.T) {
		s, sockets := serve(t, silence), 0
		c := client(t, upstream.Config{Control: func(string, string, syscall.RawConn) error { sockets++; return nil }})
		g := c.Group(specs(s), upstream.Options{})
		before := runtime.NumGoroutine()
		var ended atomic.Int64
		const queries = 10_000
		for range queries {
			g.Start(query(), upstream.UDPOnly, counter{&ended})
		}
		// Each socket has a goroutine, and one closes idle sockets. One of an earlier test may end meanwhile.
		if n := runtime.NumGoroutine() - before; ended.Load() > 0 || sockets != 16 || n > sockets+1 {
			t.Errorf("%d queries have ended, %d sockets, %d goroutines", ended.Load(), sockets, n)
		}
		c.Close()
		if n := ended.Load(); n != queries {
			t.Errorf("%d queries have ended, want all", n)
		}
	})
}

// A counter is a receiver that counts what it gets.
type counter struct{ *atomic.Int64 }

func (c counter) Receive(upstream.Answer, error) { c.Add(1) }

// TestMalformedQuery sends queries that have no header, or not at most one question.
func TestMalformedQuery(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		g := client(t, upstream.Config{}).Group(specs(serve(t, answers(0))), upstream.Options{})
		for _, q := range [][]byte{nil, query()[:11], query()[:20], append([]byte{0, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0}, query()[12:]...), make([]byte, 65536)} {
			if got, _, err := g.Exchange(context.Background(), q, 0); err == nil {
				t.Errorf("%x: %x", q[:min(len(q), 20)], got)
			}
		}
	})
}
