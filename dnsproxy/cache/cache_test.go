package cache_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
)

// F8: the age of a reply grows until it expires.
func TestCountsDown(t *testing.T) {
	for name, r := range map[string]*reply.Reply{"positive": answer(t, "a", 300), "negative": nxdomain(t, 300)} {
		t.Run(name, func(t *testing.T) {
			c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: 0}), newClock()
			wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{})
			c.Put(key("a"), replied(c, r), clock.Time)
			wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{State: cache.Fresh, Reply: r, Age: reply.Age{}})
			wantHit(t, c.Get(key("a"), clock.after(10*time.Second+999*time.Millisecond)),
				cache.Hit{State: cache.Fresh, Reply: r, Age: reply.Age{Seconds: 10}})
			if hit := c.Get(key("a"), clock.after(289*time.Second)); hit.State != cache.Fresh || hit.Age.Seconds != 299 {
				t.Errorf("after 299.999 s %+v", hit)
			}
			wantHit(t, c.Get(key("a"), clock.after(time.Millisecond)), cache.Hit{})
		})
	}
}

// The name may be in a reader's buffer.
func TestPutClonesName(t *testing.T) {
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: 0}), newClock()
	buf := []byte("\x01a")
	k := key("a")
	k.Name = unsafe.String(&buf[0], len(buf))
	c.Put(k, replied(c, answer(t, "a", 300)), clock.Time)
	c.Put(cache.Key{Name: k.Name, DO: true}, unanswered(c, "timeout"), clock.Time)
	buf[1] = 'b'
	if hit := c.Get(key("a"), clock.Time); hit.State != cache.Fresh {
		t.Errorf("Get = %+v", hit)
	}
	if hit := c.Get(cache.Key{Name: "\x01a", DO: true}, clock.Time); hit.State != cache.Failed {
		t.Errorf("Get = %+v", hit)
	}
	if allocs := testing.AllocsPerRun(100, func() { c.Get(key("a"), clock.Time) }); allocs != 0 {
		t.Errorf("Get makes %v allocations", allocs)
	}
}

// F8: a reply that must not be kept is not stored, and removes the previous one.
func TestNotKept(t *testing.T) {
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: day}), newClock()
	c.Put(key("a"), replied(c, answer(t, "a", 300)), clock.Time)
	c.Put(key("a"), replied(c, answer(t, "a", 0)), clock.Time)
	wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{})
	if s := c.Stats(); s.Entries != 0 || s.Bytes != 0 {
		t.Errorf("Stats = %+v", s)
	}
}

// F8: TTLs have bounds, which clients see.
func TestMaxTTL(t *testing.T) {
	const week, year = 7 * 24 * time.Hour, 365 * 24 * 3600
	for name, c := range map[string]struct {
		reply *reply.Reply
		want  time.Duration
	}{
		"positive": {answer(t, "a", year), week},
		"negative": {nxdomain(t, 86400), 3 * time.Hour},
	} {
		cached, clock := cache.New(cache.Config{MaxBytes: maxBytes}), newClock()
		cached.Put(key("a"), replied(cached, c.reply), clock.Time)
		hit := cached.Get(key("a"), clock.after(c.want-1))
		if hit.State != cache.Fresh || hit.Age.Max != uint32(c.want/time.Second) {
			t.Errorf("%s: %+v", name, hit)
		}
		wantHit(t, cached.Get(key("a"), clock.after(1)), cache.Hit{})
	}
}

// F9: an expired reply is kept, and is used once asking has failed.
func TestStale(t *testing.T) {
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: day}), newClock()
	r := answer(t, "a", 300)
	c.Put(key("a"), replied(c, r), clock.Time)
	stale := cache.Hit{State: cache.Stale, Reply: r, Age: reply.Age{Stale: true, Seconds: 300}}
	wantHit(t, c.Get(key("a"), clock.after(300*time.Second)), stale)

	wantHit(t, c.Get(key("a"), clock.Time), stale)

	// Once asking has failed no client waits; one of them asks again now and then.
	c.Put(key("a"), unanswered(c, "timeout"), clock.Time)
	now := stale
	now.State, now.Failure = cache.StaleNow, "timeout"
	for i, pause := range []time.Duration{5, 10, 20, 30, 30} {
		wantHit(t, c.Get(key("a"), clock.Time), now)
		clock.after(pause * time.Second)
		now.Age.Seconds += uint32(pause)
		now.Refresh = true
		wantHit(t, c.Get(key("a"), clock.Time), now)
		now.Refresh = false
		wantHit(t, c.Get(key("a"), clock.Add(30*time.Second-1)), later(now, 29))
		if i%2 == 0 {
			failed := replied(c, failure(t, "a")) // counts as no reply
			failed.Failure = "SERVFAIL"
			c.Put(key("a"), failed, clock.Time)
			now.Failure = "SERVFAIL"
		} else {
			c.Put(key("a"), unanswered(c, "timeout"), clock.Time)
			now.Failure = "timeout"
		}
	}
	// No result is stored, not even a failure.
	clock.after(31 * time.Second)
	now.Age.Seconds += 31
	now.Refresh = true
	wantHit(t, c.Get(key("a"), clock.Time), now)
	wantHit(t, c.Get(key("a"), clock.Add(30*time.Second)), later(now, 30))

	// Any answer ends this.
	removed := nxdomain(t, 60)
	c.Put(key("a"), replied(c, removed), clock.Time)
	if hit := c.Get(key("a"), clock.Time); hit.State != cache.Fresh || hit.Reply != removed {
		t.Errorf("after NXDOMAIN %+v", hit)
	}
	if hit := c.Get(key("a"), clock.after(time.Minute+day-1)); hit.State != cache.Stale {
		t.Errorf("just before a day %+v", hit)
	}
	wantHit(t, c.Get(key("a"), clock.after(1)), cache.Hit{})
}

// later returns hit with an older reply.
func later(hit cache.Hit, seconds uint32) cache.Hit {
	hit.Age.Seconds += seconds
	return hit
}

// F8: a failure is kept for 5 s, never stale, and replaces no fresh answer (RFC 9520).
func TestFailureReplies(t *testing.T) {
	for _, rcode := range []int{dns.RcodeServerFailure, dns.RcodeRefused, dns.RcodeNotImplemented, dns.RcodeFormatError, dns.RcodeYXDomain} {
		t.Run(dns.RcodeToString[rcode], func(t *testing.T) { testFailureReply(t, rcode) })
	}
}

func testFailureReply(t *testing.T, rcode int) {
	t.Helper()
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: day}), newClock()
	bad, good := makeReply(t, "a", rcode, ""), answer(t, "a", 300)
	c.Put(key("a"), replied(c, bad), clock.Time)
	if hit := c.Get(key("a"), clock.after(5*time.Second-1)); hit.State != cache.Failed || hit.Reply != bad || hit.Server != nameserver {
		t.Errorf("before 5 s %+v", hit)
	}
	wantHit(t, c.Get(key("a"), clock.after(1)), cache.Hit{})
	c.Put(key("a"), replied(c, good), clock.Time)
	c.Put(key("a"), replied(c, bad), clock.Time)
	if hit := c.Get(key("a"), clock.Time); hit.State != cache.Fresh || hit.Reply != good {
		t.Errorf("a failure replaced an answer: %+v", hit)
	}
}

// RFC 9520: a failure to ask is kept for 2 s.
func TestFailure(t *testing.T) {
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: day}), newClock()
	c.Put(key("a"), unanswered(c, "no route to host"), clock.Time)
	failed := cache.Hit{State: cache.Failed, Failure: "no route to host"}
	wantHit(t, c.Get(key("a"), clock.after(2*time.Second-1)), failed)
	wantHit(t, c.Get(key("a"), clock.after(1)), cache.Hit{})
	c.Put(key("a"), unanswered(c, "timeout"), clock.Time)
	wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{State: cache.Failed, Failure: "timeout"})
	r := answer(t, "a", 300)
	c.Put(key("a"), replied(c, r), clock.Time)
	wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{State: cache.Fresh, Reply: r, Age: reply.Age{}})
	if s := c.Stats(); s.Entries != 1 || s.Failures != 2 || s.Hits != 1 {
		t.Errorf("Stats = %+v", s)
	}
}

// F8: names that are asked for often are refreshed before they expire, by one caller.
func TestRefresh(t *testing.T) {
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: day}), newClock()
	c.Put(key("often"), replied(c, answer(t, "often", 100)), clock.Time)
	c.Put(key("seldom"), replied(c, answer(t, "seldom", 100)), clock.Time)
	c.Put(key("bad"), replied(c, failure(t, "bad")), clock.Time)
	for range 5 {
		if c.Get(key("often"), clock.Time).Refresh || c.Get(key("bad"), clock.Time.Add(4900*time.Millisecond)).Refresh {
			t.Fatal("refresh of a new reply, or of a failure")
		}
	}
	clock.after(90*time.Second + 1)
	for range 2 {
		if c.Get(key("seldom"), clock.Time).Refresh {
			t.Error("refresh of a name asked for twice")
		}
	}
	var refreshes atomic.Int32
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 100 {
				if c.Get(key("often"), clock.Time).Refresh {
					refreshes.Add(1)
				}
			}
		})
	}
	group.Wait()
	if n := refreshes.Load(); n != 1 {
		t.Errorf("%d callers were told to refresh, want 1", n)
	}

	// If that fails a later caller tries, but not at once.
	c.Put(key("often"), unanswered(c, "timeout"), clock.Time)
	if hit := c.Get(key("often"), clock.after(time.Second)); hit.Refresh || hit.State != cache.Fresh {
		t.Errorf("a second after the failure %+v", hit)
	}
	if hit := c.Get(key("often"), clock.after(4*time.Second)); !hit.Refresh {
		t.Errorf("five seconds after the failure %+v", hit)
	}
	c.Put(key("often"), replied(c, answer(t, "often", 100)), clock.Time)
	if hit := c.Get(key("often"), clock.after(95*time.Second)); hit.Refresh {
		t.Error("a refreshed reply has the count of queries of the previous one")
	}
}

// F8: the bound covers all memory, and names that are asked for stay.
func TestBound(t *testing.T) {
	const bound = 1 << 20
	c, clock := cache.New(cache.Config{MaxBytes: bound, Stale: day}), newClock()
	c.Put(key("asked"), replied(c, answer(t, "asked", 3600)), clock.Time)
	for i := range 20_000 {
		label := fmt.Sprintf("host-%d", i)
		if i%3 == 0 {
			c.Put(key(label), unanswered(c, "timeout"), clock.Time)
		} else {
			c.Put(key(label), replied(c, answer(t, label, 3600)), clock.Time)
		}
		if i%100 == 0 && c.Get(key("asked"), clock.Time).State != cache.Fresh {
			t.Fatalf("a name that is asked for is evicted after %d others", i)
		}
	}
	s := c.Stats()
	if s.Bytes > bound || s.Bytes < bound*9/10 || s.Evictions != uint64(20_001-s.Entries) {
		t.Errorf("Stats = %+v, bound %d", s, bound)
	}
	c.Flush(nil)
	if s := c.Stats(); s.Entries != 0 || s.Bytes != 0 {
		t.Errorf("after Flush %+v", s)
	}
}

// A reply that is longer than the cache must not evict all others.
func TestTooLarge(t *testing.T) {
	const bound = 16 << 10
	c, clock := cache.New(cache.Config{MaxBytes: bound, Stale: day}), newClock()
	c.Put(key("a"), replied(c, answer(t, "a", 300)), clock.Time)
	large := padded(t, "b", 20_000)
	c.Put(key("b"), replied(c, large), clock.Time)
	wantHit(t, c.Get(key("b"), clock.Time), cache.Hit{})
	c.Put(key("a"), replied(c, large), clock.Time)
	wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{})
	c.Put(key("a"), replied(c, answer(t, "a", 300)), clock.Time)
	if hit := c.Get(key("a"), clock.Time); hit.State != cache.Fresh {
		t.Errorf("Get = %+v", hit)
	}
}

// padded returns a reply with so many bytes in its record.
func padded(tb testing.TB, label string, length int) *reply.Reply {
	tb.Helper()
	return makeReply(tb, label, dns.RcodeSuccess, fmt.Sprintf(`%s. 300 TYPE65280 \# %d %s`, label, length, strings.Repeat("00", length)))
}

// F8: Stats.Bytes has the length of replies.
func TestBytes(t *testing.T) {
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: day}), newClock()
	bytes := func(length int) int64 {
		c.Put(key("a"), replied(c, padded(t, "a", length)), clock.Time)
		return c.Stats().Bytes
	}
	if short, long := bytes(4), bytes(4004); short < 100 || long-short < 4000 || long-short > 4600 {
		t.Errorf("%d bytes with a record of 4, %d with one of 4,004", short, long)
	}
}

// F17: replies to queries from before a flush are not stored.
func TestGeneration(t *testing.T) {
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: day}), newClock()
	r := answer(t, "a", 300)
	before, failure := replied(c, r), unanswered(c, "timeout")
	c.Flush(nil)
	c.Put(key("a"), before, clock.Time)
	c.Put(key("b"), failure, clock.Time)
	wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{})
	wantHit(t, c.Get(key("b"), clock.Time), cache.Hit{})
	// They do not replace replies to queries from after the flush, either.
	c.Put(key("a"), replied(c, r), clock.Time)
	before.Reply = nxdomain(t, 300)
	c.Put(key("a"), before, clock.Time)
	wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{State: cache.Fresh, Reply: r, Age: reply.Age{}})
}

// F21: a flush removes the replies to some questions and keeps others.
func TestFlushSome(t *testing.T) {
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: day}), newClock()
	for _, label := range []string{"a", "b"} {
		c.Put(key(label), replied(c, answer(t, label, 300)), clock.Time)
	}
	for range 3 {
		c.Get(key("b"), clock.Time)
	}
	if !c.Get(key("b"), clock.after(299*time.Second)).Refresh {
		t.Fatal("a name that is asked for often is not refreshed")
	}
	refreshed := replied(c, answer(t, "b", 300))
	c.Flush(func(k cache.Key) bool { return k == key("a") })
	wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{})
	c.Put(key("b"), refreshed, clock.Time)
	if hit := c.Get(key("b"), clock.Time); hit.State != cache.Fresh || hit.Age.Seconds != 299 || !hit.Refresh {
		t.Errorf("Get = %+v, want the previous reply, to be refreshed again", hit)
	}
	if s := c.Stats(); s.Entries != 1 {
		t.Errorf("Stats = %+v", s)
	}
}
