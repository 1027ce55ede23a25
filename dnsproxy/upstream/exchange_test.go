package upstream_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
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
	huge := bytes.Repeat([]byte{1, 2, 3, 4}, 15_000)
	s := serve(t, func(query []byte, _ string) [][]byte { return [][]byte{append(reply(query, 0), huge...)} })
	g := client(t, upstream.Config{}).Group(specs(s), upstream.Options{})
	for _, how := range []upstream.Mode{upstream.UDPOnly, upstream.TCPOnly} {
		if got, _ := ask(t, g, how); !bytes.Equal(got[questionEnd:], huge) {
			t.Errorf("%d bytes", len(got))
		}
	}
}

// F2: after a truncated reply the query is sent over TCP, unless the caller wants UDP or TCP
// fails.
func TestTruncated(t *testing.T) {
	t.Parallel()
	s := serve(t, truncating([]byte("whole")))
	udpOnly := serve(t, truncating(nil))
	udpOnly.tcp.Close()
	c := client(t, upstream.Config{})
	for _, tc := range []struct {
		server *raw
		how    upstream.Mode
		cut    bool
	}{
		{s, upstream.UDPThenTCP, false},
		{s, upstream.UDPOnly, true},
		{s, upstream.TCPOnly, false},
		{udpOnly, upstream.UDPThenTCP, true},
	} {
		got, _ := ask(t, c.Group(specs(tc.server), upstream.Options{}), tc.how)
		if cut := got[2]&2 != 0; cut != tc.cut || !cut && string(got[questionEnd:]) != "whole" {
			t.Errorf("%v: %x", tc.how, got)
		}
	}
	if got, _ := ask(t, c.Group(specs(s), upstream.Options{UseVC: true}), upstream.UDPOnly); got[2]&2 != 0 {
		t.Errorf("use-vc: %x", got)
	}
}

// F2, F4: if a server does not answer over TCP, its truncated reply becomes the answer after a
// short time, unless another server answers with the whole reply.
func TestTruncatedBlackHole(t *testing.T) {
	t.Parallel()
	hole := serve(t, func(query []byte, network string) [][]byte {
		if network == "tcp" {
			return [][]byte{}
		}
		return truncating(nil)(query, network)
	})
	whole := serve(t, func(query []byte, network string) [][]byte {
		packets := truncating([]byte("whole"))(query, network)
		packets[0][7] = 1 // one answer
		return packets
	})
	for _, tc := range []struct {
		servers []*raw
		cut     bool
	}{{[]*raw{hole}, true}, {[]*raw{hole, whole}, false}} {
		g := client(t, upstream.Config{Timeout: deadline}).Group(specs(tc.servers...), upstream.Options{})
		for range 3 {
			began := time.Now()
			got, _ := ask(t, g, upstream.UDPThenTCP)
			if took := time.Since(began); got[2]&2 != 0 != tc.cut || took > deadline/2 {
				t.Errorf("%d servers: %x after %v", len(tc.servers), got, took)
			}
		}
	}
}

// F3: the first usable reply is the answer. If there is none, the best failure is.
func TestFailuresMoveOn(t *testing.T) {
	t.Parallel()
	servers := map[byte]*raw{}
	for rcode := range byte(10) {
		servers[rcode] = serve(t, answers(rcode))
	}
	dead := serve(t, silence)
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
		{[]*raw{dead, servers[2], servers[0]}, 0},
		{[]*raw{dead, servers[2]}, 2}, // only after the dead one is known to be down
	} {
		for _, fastest := range []bool{false, true} {
			c := client(t, upstream.Config{Timeout: 2 * time.Second})
			g := c.Group(specs(tc.servers...), upstream.Options{Fastest: fastest})
			got, from := ask(t, g, upstream.UDPThenTCP)
			if code(got) != tc.want {
				t.Errorf("want response code %d: %x from %v", tc.want, got, from)
			}
		}
	}
}

// F3: a reply to an opcode other than QUERY is an answer with any response code, and need not
// have the question.
func TestUpdate(t *testing.T) {
	t.Parallel()
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
}

// F4: queries do not wait for a late server. A server that is down is probed, and one reply makes
// it up again.
func TestDead(t *testing.T) {
	t.Parallel()
	var dead atomic.Bool
	dead.Store(true)
	first := serve(t, func(query []byte, _ string) [][]byte {
		if dead.Load() {
			return [][]byte{}
		}
		return [][]byte{reply(query, 0)}
	})
	second := serve(t, answers(3))
	var logged testlog.Buffer
	c := client(t, upstream.Config{Logger: slog.New(slog.NewTextHandler(&logged, nil))})
	g := c.Group(specs(first, second), upstream.Options{})
	state := func() (s upstream.State) {
		for _, status := range c.Status() {
			if status.Spec == first.spec() {
				s = status.State
			}
		}
		return s
	}
	wait.Until(t, "the server is down", func() bool {
		start := time.Now()
		if got, _ := ask(t, g, upstream.UDPThenTCP); code(got) != 3 || time.Since(start) > 2*time.Second {
			t.Fatalf("%x after %v", got, time.Since(start))
		}
		return state() == upstream.Down
	})
	dead.Store(false)
	wait.Until(t, "the server is up", func() bool {
		ask(t, g, upstream.UDPThenTCP)
		return state() == upstream.Up
	})
	wait.Until(t, "the log says so", func() bool { return strings.Contains(logged.String(), "answers again") })
	if text := logged.String(); strings.Count(text, "is down") != 1 {
		t.Errorf("log:\n%s", text)
	}
}

// isProbe reports whether a query is a probe that tells whether a server lives.
func isProbe(query []byte) bool {
	return bytes.Contains(query, []byte("\x09localhost\x00")) || bytes.Contains(query, []byte("\x06server\x00"))
}

// F4, F11: a lost query is sent again, from another port with another ID.
func TestLost(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	s := serve(t, func(query []byte, _ string) [][]byte {
		if isProbe(query) || asked.Add(1) < 3 {
			return [][]byte{}
		}
		return [][]byte{reply(query, 0)}
	})
	ask(t, client(t, upstream.Config{}).Group(specs(s), upstream.Options{}), upstream.UDPThenTCP)
	got := slices.DeleteFunc(s.queries(), isProbe)
	if from := s.sources(); len(got) < 3 || len(from) < 3 || bytes.Equal(got[0][:2], got[1][:2]) && bytes.Equal(got[1][:2], got[2][:2]) {
		t.Errorf("%x from %v", got, from)
	}
}

// F4, F5: a query ends in time, and the error has the cause for each server.
func TestTimeout(t *testing.T) {
	t.Parallel()
	dead, refusing := serve(t, silence), serve(t, silence)
	refusing.udp.Close()
	for name, g := range map[string]*upstream.Group{
		"the client's":  client(t, upstream.Config{Timeout: time.Second}).Group(specs(dead, refusing), upstream.Options{}),
		"resolv.conf's": client(t, upstream.Config{}).Group(specs(dead, refusing), upstream.Options{Timeout: 500 * time.Millisecond, Attempts: 1}),
	} {
		start := time.Now()
		_, _, err := g.Exchange(context.Background(), query(), upstream.UDPThenTCP)
		took := time.Since(start)
		if !errors.Is(err, upstream.ErrTimeout) || !errors.Is(err, syscall.ECONNREFUSED) || took < 250*time.Millisecond || took > 3*time.Second {
			t.Errorf("%s: %v after %v", name, err, took)
		}
		if want := "no nameserver answered: " + dead.spec().String() + ": no reply in time; " + refusing.spec().String() + ": connection refused"; err.Error() != want {
			t.Errorf("%q, want %q", err, want)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, _, err := client(t, upstream.Config{}).Group(specs(dead), upstream.Options{}).Exchange(ctx, query(), 0); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

// F4, R2: a nameserver that is dead is logged soon after the first query that it does not answer, with the reason,
// although no query follows and another nameserver has answered.
func TestDeadIsLogged(t *testing.T) {
	t.Parallel()
	refusing := serve(t, silence)
	refusing.udp.Close()
	refusing.tcp.Close()
	for name, tc := range map[string]struct {
		dead   *raw
		reason string
	}{"silent": {serve(t, silence), "no reply in time"}, "refusing": {refusing, "connection refused"}} {
		for _, servers := range [][]*raw{{tc.dead}, {tc.dead, serve(t, answers(0))}} {
			for _, options := range []upstream.Options{{}, {UseVC: true}} {
				t.Run(fmt.Sprint(name, " of ", len(servers), options), func(t *testing.T) {
					t.Parallel()
					var logged testlog.Buffer
					c := client(t, upstream.Config{Logger: logged.Logger()})
					began := time.Now()
					go func() { _, _, _ = c.Group(specs(servers...), options).Exchange(context.Background(), query(), 0) }()
					wait.Until(t, "the nameserver is down", func() bool { return logged.Count("nameserver is down") > 0 })
					if took := time.Since(began); took > 3*time.Second || !strings.Contains(logged.String(), tc.reason) {
						t.Errorf("after %v:\n%s", took, &logged)
					}
				})
			}
		}
	}
}

// F4: a refused connection is noticed at once, over UDP and TCP.
func TestConnectionRefused(t *testing.T) {
	t.Parallel()
	s := serve(t, silence)
	s.udp.Close()
	s.tcp.Close()
	g := client(t, upstream.Config{Timeout: time.Minute}).Group(specs(s), upstream.Options{})
	for _, how := range []upstream.Mode{upstream.UDPThenTCP, upstream.TCPOnly} {
		for range 10 {
			start := time.Now()
			_, _, err := g.Exchange(context.Background(), query(), how)
			if !errors.Is(err, syscall.ECONNREFUSED) || time.Since(start) > deadline {
				t.Fatalf("%v after %v", err, time.Since(start))
			}
		}
	}
}

// F11: messages that are not the reply are counted, and the reply is still awaited.
func TestWrongReplies(t *testing.T) {
	t.Parallel()
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
		s.mu.Lock()
		for from := range s.from { // from another port
			if to, err := net.ResolveUDPAddr("udp4", from); err == nil {
				_, _ = elsewhere.WriteTo(reply(query, 0), to)
			}
		}
		s.mu.Unlock()
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
}

// F11: queries have many different IDs and source ports, and no socket is used for long.
func TestUnpredictable(t *testing.T) {
	t.Parallel()
	s := serve(t, answers(0))
	c := client(t, upstream.Config{})
	g := c.Group(specs(s), upstream.Options{})
	const queries = 3000
	for range queries {
		ask(t, g, upstream.UDPOnly)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := map[string]bool{}
	for _, q := range s.got {
		ids[string(q[:2])] = true
	}
	if len(ids) < queries*9/10 || len(s.from) < queries/128 {
		t.Errorf("%d IDs and %d ports in %d queries", len(ids), len(s.from), queries)
	}
}

// TestMalformedQuery sends queries that have no header, or not at most one question.
func TestMalformedQuery(t *testing.T) {
	t.Parallel()
	g := client(t, upstream.Config{}).Group(specs(serve(t, answers(0))), upstream.Options{})
	for _, q := range [][]byte{nil, query()[:11], query()[:20], append([]byte{0, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0}, query()[12:]...), make([]byte, 65536)} {
		if got, _, err := g.Exchange(context.Background(), q, 0); err == nil {
			t.Errorf("%x: %x", q[:min(len(q), 20)], got)
		}
	}
}
