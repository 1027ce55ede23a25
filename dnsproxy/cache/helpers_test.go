package cache_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
)

// day is how long tests keep expired answers. maxBytes has room for everything that they
// store.
const (
	day      = 24 * time.Hour
	maxBytes = 4 << 20
)

// A clock is the time of a test, which only the test advances.
type clock struct{ time.Time }

func newClock() *clock { return &clock{time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)} }

func (c *clock) after(d time.Duration) time.Time {
	c.Time = c.Add(d)
	return c.Time
}

// key returns the key of the question for the A record of a name of one label.
func key(label string) cache.Key {
	return cache.Key{Name: string(rune(len(label))) + label, Type: dns.TypeA, Class: dns.ClassINET}
}

// nameserver is the nameserver that sends all replies.
const nameserver = "192.0.2.53"

// replied returns the value of a reply to a query sent since the last flush.
func replied(c *cache.Cache, r *reply.Reply) cache.Value {
	return cache.Value{Reply: r, Server: nameserver, Generation: c.Generation()}
}

// unanswered returns the value of a query without a reply, sent since the last flush.
func unanswered(c *cache.Cache, text string) cache.Value {
	return cache.Value{Failure: text, Generation: c.Generation()}
}

// answer returns a reply with one address.
func answer(tb testing.TB, label string, ttl uint32) *reply.Reply {
	tb.Helper()
	return makeReply(tb, label, dns.RcodeSuccess, fmt.Sprintf("%s. %d A 192.0.2.1", label, ttl))
}

// failure returns a SERVFAIL reply.
func failure(tb testing.TB, label string) *reply.Reply {
	tb.Helper()
	return makeReply(tb, label, dns.RcodeServerFailure, "")
}

// nxdomain returns an NXDOMAIN reply for the name a.
func nxdomain(tb testing.TB, ttl uint32) *reply.Reply {
	tb.Helper()
	return makeReply(tb, "a", dns.RcodeNameError, fmt.Sprintf(". %d SOA ns. host. 1 2 3 4 86400", ttl))
}

func makeReply(tb testing.TB, label string, rcode int, record string) *reply.Reply {
	tb.Helper()
	msg := new(dns.Msg).SetQuestion(label+".", dns.TypeA)
	msg.Response, msg.Rcode, msg.Compress = true, rcode, true
	if record != "" {
		rr, err := dns.NewRR(record)
		if err != nil {
			tb.Fatal(err)
		}
		if rr.Header().Rrtype == dns.TypeSOA {
			msg.Ns = []dns.RR{rr}
		} else {
			msg.Answer, msg.Question[0].Qtype = []dns.RR{rr}, rr.Header().Rrtype
		}
	}
	wire, err := msg.Pack()
	if err != nil {
		tb.Fatal(err)
	}
	r, err := reply.Parse(wire)
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

func wantHit(t *testing.T, got, want cache.Hit) {
	t.Helper()
	got.Age.Max = want.Age.Max // see TestMaxTTL
	if want.Reply != nil {
		want.Server = nameserver
	}
	if got != want {
		t.Errorf("Get = %+v, want %+v", got, want)
	}
}
