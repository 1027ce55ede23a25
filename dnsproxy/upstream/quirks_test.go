package upstream_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakeclock"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// F11: a server that folds the case of the question's letters is understood, and the client gets its own letters.
func TestFoldedCase(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		folds := serve(t, func(query []byte, _ string) [][]byte {
			packet := reply(query, 0)
			return [][]byte{append(packet[:12:12], bytes.ToLower(packet[12:])...)}
		})
		g := client(t, upstream.Config{}).Group(specs(folds), upstream.Options{})
		upper := append(query()[:12:12], bytes.ToUpper(query()[12:questionEnd-4])...)
		upper = append(upper, query()[questionEnd-4:]...)
		got, _, err := g.Exchange(t.Context(), upper, upstream.UDPOnly)
		if err != nil || !bytes.Equal(got[12:questionEnd], upper[12:questionEnd]) {
			t.Errorf("%q, %v; want the question %q", got, err, upper[12:questionEnd])
		}
	})
}

// F18: a server that sends OPT records, and says FORMERR for one name, is asked with EDNS for others, whether its
// FORMERR has an OPT record or not.
func TestFailureIsNoSignAgainstEDNS(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		bad := bytes.Clone(query())
		copy(bad[13:], "bad")
		for name, rejects := range map[string]func(query []byte) []byte{
			"FORMERR":                    func(query []byte) []byte { return reply(query, 1) },
			"FORMERR with an OPT record": func(query []byte) []byte { return replyOPT(query, 1, 0) },
			"BADVERS":                    func(query []byte) []byte { return replyOPT(query, 0, 1) },
		} {
			s := serve(t, func(query []byte, _ string) [][]byte {
				edns := binary.BigEndian.Uint16(query[10:]) > 0
				switch {
				case edns && bytes.Contains(query, []byte("\x03bad")):
					return [][]byte{rejects(query)}
				case edns:
					return [][]byte{replyOPT(query, 0, 0)}
				}
				return [][]byte{reply(query, 0)}
			})
			g := client(t, upstream.Config{Check: checkExtended}).Group(specs(s), upstream.Options{})
			again := name != "FORMERR with an OPT record"
			for range 3 {
				ask(t, g, upstream.UDPThenTCP)
				answer, err := g.Ask(context.Background(), bad, upstream.UDPThenTCP)
				if err != nil || answer.Plain != again || (code(answer.Reply) == 0) != again {
					t.Errorf("%s: %+v, %v", name, answer, err)
				}
			}
			plain := slices.DeleteFunc(s.queries(), func(q []byte) bool { return len(q) == len(query()) })
			others := slices.DeleteFunc(slices.Clone(plain), func(q []byte) bool { return bytes.Contains(q, []byte("\x03bad")) })
			if len(others) > 1 || again != (len(plain) >= 3) {
				t.Errorf("%s: asked without EDNS: %q", name, plain)
			}
		}
	})
}

// replyOPT is reply with an OPT record, which has the upper bits of the response code.
func replyOPT(query []byte, rcode, upper byte) []byte {
	r := reply(query, rcode)
	r[11] = 1
	return append(r, 0, 0, 41, 4, 208, upper, 0, 0, 0, 0, 0)
}

// checkExtended reads a reply without records except for an OPT record.
func checkExtended(reply []byte) (rcode int, negative bool, err error) {
	rcode = int(code(reply))
	if reply[11] > 0 {
		rcode |= int(reply[len(reply)-6]) << 4
	}
	return rcode, rcode == 0 || rcode == 3, nil
}

// F3, F11: a server that does not support EDNS is asked again without (RFC 6891, section 6.2.2), from another port and
// with another ID. A server that says FORMERR in any case is not remembered.
func TestWithoutEDNS(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		s := serve(t, func(query []byte, _ string) [][]byte {
			if binary.BigEndian.Uint16(query[10:]) > 0 {
				return [][]byte{reply(query, 1)}
			}
			return [][]byte{reply(query, 0)}
		})
		malformed := serve(t, answers(1))
		for _, tc := range []struct {
			server *raw
			rcode  byte
			asked  int
		}{{s, 0, 6}, {malformed, 1, 6}} {
			g := client(t, upstream.Config{}).Group(specs(tc.server), upstream.Options{})
			for range 3 {
				if got, _ := ask(t, g, upstream.UDPThenTCP); code(got) != tc.rcode {
					t.Errorf("%x", got)
				}
			}
			asked := tc.server.queries()
			if len(asked) != tc.asked || len(asked[0]) != len(query()) || len(asked[1]) != questionEnd || len(asked[3]) != questionEnd {
				t.Fatalf("asked %d times: %x", len(asked), asked)
			}
			if from := tc.server.from; from[0] == from[1] || bytes.Equal(asked[0][:2], asked[1][:2]) && bytes.Equal(asked[2][:2], asked[3][:2]) {
				t.Errorf("from %v: %x", from, asked)
			}
		}
	})
}

// F10: a socket is replaced while the goroutine that reads it is about to send another query to its server.
func TestSocketIsReplacedByItsReader(t *testing.T) {
	t.Parallel()
	s := serve(t, answers(1)) // each query is sent again, without EDNS
	clock := fakeclock.New()
	reading, goOn := make(chan struct{}), make(chan struct{})
	var blocked atomic.Bool
	g := client(t, upstream.Config{Clock: clock.Clock, Check: func(reply []byte) (rcode int, negative bool, err error) {
		if !blocked.Swap(true) {
			close(reading)
			<-goOn
		}
		return int(code(reply)), false, nil
	}}).Group(specs(s), upstream.Options{})
	ended := make(chan error)
	exchange := func() {
		_, _, err := g.Exchange(t.Context(), query(), upstream.UDPOnly)
		ended <- err
	}
	go exchange()
	wait.For(t, "a reply", reading)
	clock.Suspend(t, 6*time.Second) // sockets are used for 5 s
	const others = 40               // each uses one of four sockets, which are replaced
	for range others {
		go exchange()
	}
	for range others {
		if err := wait.For(t, "the end of another query", ended); err != nil {
			t.Error(err)
		}
	}
	close(goOn)
	if err := wait.For(t, "the end of the first query", ended); err != nil {
		t.Error(err)
	}
}
