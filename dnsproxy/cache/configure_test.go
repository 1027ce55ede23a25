package cache_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
)

// F8, F9, R10: after a change of the limits, an entry is as if it had been stored with them.
func TestConfigureLimits(t *testing.T) {
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes}), newClock()
	positive, negative, provisional := answer(t, "a", 3600), nxdomain(t, 60), nxdomain(t, 600)
	c.Put(key("a"), replied(c, positive), clock.Time)
	c.Put(key("b"), replied(c, negative), clock.Time)
	value := replied(c, provisional)
	value.Provisional, value.MaxTTL = true, 30*time.Second
	c.Put(key("c"), value, clock.Time)
	c.Put(key("d"), unanswered(c, "timeout"), clock.Time)
	clock.after(time.Second)
	c.Configure(cache.Config{MaxBytes: maxBytes, Stale: day}, clock.Time)
	for k, r := range map[string]*reply.Reply{"a": positive, "b": negative, "c": provisional} {
		if hit := c.Get(key(k), clock.Time); hit.State != cache.Fresh || hit.Reply != r {
			t.Errorf("%s: Get = %+v, want a fresh reply", k, hit)
		}
	}
	if hit := c.Get(key("d"), clock.Time); hit.State != cache.Failed || hit.Failure != "timeout" {
		t.Errorf("Get = %+v, want the failure", hit)
	}
	clock.after(time.Hour)
	for _, k := range []string{"a", "b"} {
		if hit := c.Get(key(k), clock.Time); hit.State != cache.Stale {
			t.Errorf("%s: Get = %+v, want it stale", k, hit)
		}
	}
	wantHit(t, c.Get(key("c"), clock.Time), cache.Hit{})
	c.Configure(cache.Config{MaxBytes: maxBytes}, clock.Time)
	wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{})
}

// F8, R10: a larger cache keeps its entries, and a smaller one the used entries. Counts go on.
func TestConfigureSize(t *testing.T) {
	const n = 2000
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes}), newClock()
	label := func(i int) string { return fmt.Sprintf("host-%d", i) }
	for i := range n {
		c.Put(key(label(i)), replied(c, answer(t, label(i), 300)), clock.after(time.Millisecond))
	}
	used := []string{label(1), label(n / 2), label(n - 1)}
	hits := uint64(0)
	wantUsed := func() {
		t.Helper()
		for _, l := range used {
			if hit := c.Get(key(l), clock.Time); hit.State != cache.Fresh {
				t.Errorf("%s: Get = %+v, want a fresh reply", l, hit)
			}
			hits++
		}
		if s := c.Stats(); s.Hits != hits {
			t.Errorf("%+v, want %d hits", s, hits)
		}
	}
	wantUsed()
	for _, size := range []int64{4 * maxBytes, maxBytes / 2, 64 << 10, maxBytes} {
		before := c.Stats()
		c.Configure(cache.Config{MaxBytes: size}, clock.Time)
		s := c.Stats()
		evicted := int(s.Evictions - before.Evictions)
		if s.Bytes > size || s.Entries != before.Entries-evicted || (size >= before.Bytes*2) != (evicted == 0) {
			t.Errorf("with %d bytes %+v, before %+v", size, s, before)
		}
		wantUsed()
	}
	c.Configure(cache.Config{}, clock.Time)
	c.Put(key("a"), replied(c, answer(t, "a", 300)), clock.Time)
	wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{})
	if s := c.Stats(); !c.Off() || s.Entries != 0 || s.Bytes != 0 || s.Hits != hits {
		t.Errorf("without a cache %+v", s)
	}
	c.Configure(cache.Config{MaxBytes: maxBytes}, clock.Time)
	wantHit(t, c.Get(key(used[0]), clock.Time), cache.Hit{})
	before := replied(c, answer(t, "a", 300))
	c.Flush(nil)
	c.Configure(cache.Config{MaxBytes: maxBytes / 2}, clock.Time)
	c.Put(key("a"), before, clock.Time) // F17
	wantHit(t, c.Get(key("a"), clock.Time), cache.Hit{})
}

// F17, R10: a flush removes what was stored before it, whenever the limits change.
func TestConfigureWhileUsed(t *testing.T) {
	c, clock := cache.New(cache.Config{MaxBytes: maxBytes}), newClock()
	stop := make(chan struct{})
	var group sync.WaitGroup
	for i := range 3 {
		r := answer(t, "a", 300)
		group.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				k := key(fmt.Sprintf("n%d", (n*7+i)%700))
				if c.Get(k, clock.Time).State == cache.Miss {
					c.Put(k, replied(c, r), clock.Time)
				}
			}
		})
	}
	group.Go(func() {
		for n := range 100 {
			c.Configure(cache.Config{MaxBytes: int64(n%3) * maxBytes / 4}, clock.Time)
		}
	})
	mine := key("mine") // of this goroutine alone
	for range 200 {
		c.Put(mine, replied(c, answer(t, "a", 300)), clock.Time)
		c.Flush(nil)
		if hit := c.Get(mine, clock.Time); hit.State != cache.Miss {
			t.Fatalf("after Flush Get = %+v", hit)
		}
	}
	close(stop)
	group.Wait()
}
