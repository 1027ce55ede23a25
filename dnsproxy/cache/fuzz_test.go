package cache_test

import (
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
)

// A model is the entry of a question, by the rules in their plainest form.
type model struct {
	reply          *reply.Reply
	answer         bool
	stored         time.Time
	ttl            time.Duration
	failed         time.Time // do not ask again before
	failure        string
	fails          int // since reply was stored
	hits           int
	beingRefreshed bool
}

// get is [cache.Cache.Get] with a stale time of stale.
func (m *model) get(now time.Time, stale time.Duration) cache.Hit {
	failing := now.Before(m.failed)
	if m.reply == nil {
		if failing {
			return cache.Hit{State: cache.Failed, Failure: m.failure}
		}
		return cache.Hit{}
	}
	age := now.Sub(m.stored)
	hit := cache.Hit{Reply: m.reply, Server: nameserver, Age: reply.Age{Seconds: uint32(age / time.Second), Max: 604800}}
	if m.reply.Negative() {
		hit.Age.Max = 10800
	}
	switch {
	case age < m.ttl:
		if hit.State = cache.Fresh; !m.answer {
			hit.State = cache.Failed
		}
		m.hits++
		if m.answer && m.hits >= 3 && !m.beingRefreshed && !failing && m.ttl-age < m.ttl/10 {
			hit.Refresh, m.beingRefreshed = true, true
		}
		return hit
	case m.answer && age < m.ttl+stale:
		hit.Age.Stale = true
		hit.State = cache.Stale
		if m.fails > 0 {
			hit.State, hit.Failure, hit.Refresh = cache.StaleNow, m.failure, !failing
		}
		if hit.Refresh {
			m.failed = now.Add(30 * time.Second)
		}
		return hit
	case failing:
		return cache.Hit{State: cache.Failed, Failure: m.failure}
	}
	return cache.Hit{}
}

// failAgain notes a failed attempt to ask if there is a reply.
func (m *model) failAgain(now time.Time, text string) {
	m.fail(now.Add(min(5*time.Second<<min(m.fails, 8), 30*time.Second)), text)
	m.fails++
}

// fail notes a failed attempt to ask.
func (m *model) fail(until time.Time, text string) {
	m.failed, m.failure, m.beingRefreshed = until, text, false
}

// FuzzCache compares a cache with a map of models. Each pair of bytes is an operation.
func FuzzCache(f *testing.F) {
	f.Add([]byte("\x00\x00\x40\x00\x10\x00\x00\x00\x03\x10\x00\x00\x80\xF0\x00\x00"))
	f.Add([]byte{1, 0, 0x10, 0, 0, 0, 0x43, 0, 4, 0, 0, 0})
	f.Fuzz(func(t *testing.T, ops []byte) {
		const stale = 20 * time.Second
		var replies []*reply.Reply
		for _, ttl := range []uint32{0, 1, 10, 30} {
			replies = append(replies, answer(t, "a", ttl), nxdomain(t, ttl))
		}
		c, clock := cache.New(cache.Config{MaxBytes: maxBytes, Stale: stale}), newClock()
		models := map[cache.Key]*model{}
		for ; len(ops) >= 2; ops = ops[2:] {
			k := key(string('a' + rune(ops[0]>>4&3)))
			k.DO = ops[0]&0x40 != 0
			if models[k] == nil {
				models[k] = new(model)
			}
			m := models[k]
			arg := int(ops[1])
			switch ops[0] & 15 {
			case 0, 1, 2:
				r := replies[arg%len(replies)]
				c.Put(k, replied(c, r), clock.Time)
				ttl, _ := r.TTL()
				*m = model{}
				if ttl > 0 {
					*m = model{reply: r, answer: true, stored: clock.Time, ttl: ttl}
				}
			case 3:
				bad := failure(t, "a")
				c.Put(k, replied(c, bad), clock.Time)
				if m.answer && clock.Sub(m.stored) < m.ttl+stale {
					m.failAgain(clock.Time, "")
				} else {
					*m = model{reply: bad, stored: clock.Time, ttl: 5 * time.Second}
				}
			case 4:
				c.Put(k, unanswered(c, "timeout"), clock.Time)
				life := m.ttl
				if m.answer {
					life += stale
				}
				if m.reply != nil && clock.Sub(m.stored) < life {
					m.failAgain(clock.Time, "timeout")
				} else {
					*m = model{}
					m.fail(clock.Add(2*time.Second), "timeout")
				}
			case 5:
				c.Flush(nil)
				clear(models)
			case 6, 7, 8:
				clock.after(time.Duration(arg) * 100 * time.Millisecond)
			default:
				if got, want := c.Get(k, clock.Time), m.get(clock.Time, stale); got != want {
					t.Fatalf("Get(%+v) = %+v, want %+v", k, got, want)
				}
			}
		}
	})
}
