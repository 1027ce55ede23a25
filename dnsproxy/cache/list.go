package cache

import (
	"time"

	"github.com/nametap/nametap/dnsproxy/reply"
)

// An Entry describes what a cache has for one question.
type Entry struct {
	Key     Key
	Reply   *reply.Reply  // nil if no nameserver answered
	Server  string        // the nameserver that sent Reply
	Left    time.Duration // until Reply expires; negative if it has expired
	Failure string        // why the last attempt to ask failed; empty if it did not fail
}

// Entries returns up to limit entries of questions for which match returns true, in no particular order. It also
// returns the number of all such entries. Being listed does not count as a use of an entry.
func (c *Cache) Entries(match func(Key) bool, limit int, now time.Time) (entries []Entry, total int) {
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		for _, e := range s.entries {
			left := e.expires - now.Sub(c.origin)
			if !match(e.key) || max(e.usableUntil, e.retryAt)-now.Sub(c.origin) <= 0 {
				continue
			}
			if total++; len(entries) < limit {
				entries = append(entries, Entry{Key: e.key, Reply: e.reply, Server: e.server, Left: left, Failure: e.failure})
			}
		}
		s.mu.Unlock()
	}
	return entries, total
}
