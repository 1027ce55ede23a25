// Package cache keeps nameservers' replies by question. It keeps positive and negative replies
// (RFC 2308), keeps failures for a moment (RFC 9520), and keeps expired replies to be used when no
// nameserver answers (RFC 8767).
//
// The memory of the cache is bounded in bytes. SIEVE (Zhang et al., NSDI 2024) chooses which entries are evicted. Among
// queries whose names are Zipf-distributed, it has as many hits as W-TinyLFU and a segmented LRU, and more than an LRU,
// at less cost for a lookup.
package cache

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/dnsproxy/reply"
)

// If no nameserver has answered a question, it is not asked again for failureTTL. RFC 9520, section 3.2, requires at
// least 1 s, and clients retry after 5 s.
const failureTTL = 2 * time.Second

// A Key identifies a question. DO and CD belong to it, because a nameserver's reply depends on them (RFC 4035, section
// 3.2).
type Key struct {
	// Name is the question's name in wire form, in lower case. Its memory may be
	// reused once a method returns.
	Name        string
	Type, Class uint16
	DO, CD      bool
}

// A State says whether a cache has a reply to a question, and what the caller should do.
type State uint8

// The states of a [Hit].
const (
	// Miss: there is no reply; ask nameservers.
	Miss State = iota
	// Fresh: use Reply.
	Fresh
	// Stale: Reply has expired; ask nameservers, and use Reply only if none answers.
	Stale
	// StaleNow: Reply has expired, and the last attempt to ask failed; use Reply.
	StaleNow
	// Failed: the last attempt to ask failed a moment ago, and there is no answer. If a nameserver has sent a failure
	// such as SERVFAIL, Reply is this failure. Otherwise Reply is nil, and Failure says why asking failed.
	Failed
)

// A Hit is the result of [Cache.Get].
type Hit struct {
	State   State
	Refresh bool         // this caller, and no other, should use Reply and also ask again
	Reply   *reply.Reply // set if State is Fresh, Stale or StaleNow; may be set if it is Failed
	Server  string       // the nameserver that sent Reply: see Value.Server
	Age     reply.Age    // of Reply, for [reply.Reply.Append]
	Failure string       // why asking failed, if State is StaleNow, or is Failed and Reply is nil; may be empty
}

// A Value is the result of asking nameservers a question.
type Value struct {
	Reply *reply.Reply // nil if no nameserver answered
	// Server names the nameserver that sent Reply. All replies of a nameserver should share one string, because the
	// cache does not count its memory.
	Server string
	// Failure says why there is no answer. It is used if Reply is nil, or if the response code of Reply is neither
	// NOERROR nor NXDOMAIN.
	Failure string
	// Generation is what [Cache.Generation] returned before the nameservers were
	// chosen.
	Generation uint64
	// MaxTTL bounds how long Reply is kept until it expires, and the TTLs that clients get; 0 is no bound.
	MaxTTL time.Duration
	// Provisional is true if another nameserver has not replied and may have a different answer. Then Reply is never
	// served stale.
	Provisional bool
}

// Stats are counts of a cache.
type Stats struct {
	Entries int   // replies and failures
	Bytes   int64 // bytes that the entries occupy, with the index

	// The numbers of questions for which Get returned Fresh (Hits), Miss (Misses), Stale or StaleNow (Stale), and
	// Failed (Failures).
	Hits, Misses, Stale, Failures uint64
	Evictions                     uint64 // entries that were removed to make room
}

// A Cache keeps replies by question. It is safe for concurrent use. The times that callers pass to its methods must
// all come from the same clock. If replies should also age while the machine is suspended, this must be a clock of
// package clock.
type Cache struct {
	seed   maphash.Seed
	origin time.Time // the times in entries count from here, so that each takes 8 bytes instead of 24
	shards [shardCount]shard
	off    atomic.Bool // the cache keeps nothing

	changing sync.Mutex // held by Flush and Configure
	// generation counts calls of Flush. Each shard has a copy, which Flush changes together with the content of the
	// shard.
	generation atomic.Uint64
}

// shardCount is the number of shards. With 16 shards, readers rarely wait for a lock. In a cache of the default size,
// a shard still has room for the longest reply.
const shardCount = 16

// The longest TTLs of positive and negative answers. They also bound the TTLs that clients get.
const (
	maxTTL         = 7 * 24 * time.Hour // RFC 8767, section 4, suggests it
	maxNegativeTTL = 3 * time.Hour      // RFC 2308, section 5, says that 1 to 3 hours work well
)

// A Config sets how much a cache keeps, and for how long.
type Config struct {
	// MaxBytes bounds the memory; with 0 or less the cache keeps nothing.
	MaxBytes int64
	// Stale is how long answers are kept after they have expired.
	Stale time.Duration
}

// New returns a cache.
func New(cfg Config) *Cache {
	c := &Cache{seed: maphash.MakeSeed(), origin: time.Now()}
	for i := range c.shards {
		c.shards[i].clear()
	}
	c.Configure(cfg, c.origin)
	return c
}

// Configure changes the limits. They also hold for entries that are in the cache already: if there is no room for all
// of them, some are evicted. A call of Get or Put waits only while the shard of its key is changed.
func (c *Cache) Configure(cfg Config, now time.Time) {
	cfg.MaxBytes = max(cfg.MaxBytes, 0)
	c.changing.Lock()
	defer c.changing.Unlock()
	c.off.Store(cfg.MaxBytes == 0)
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		s.max, s.stale = cfg.MaxBytes/shardCount, cfg.Stale
		for _, e := range s.entries {
			e.usableUntil = s.endOf(e)
		}
		s.evict(now.Sub(c.origin))
		s.mu.Unlock()
	}
}

// Off reports whether the cache keeps nothing.
func (c *Cache) Off() bool { return c.off.Load() }

// Get returns what the cache has for the question k, and counts the question in Stats. Get does not allocate.
func (c *Cache) Get(k Key, now time.Time) Hit {
	hash := c.hash(k)
	s := c.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	hit := s.get(hash, k, now.Sub(c.origin))
	switch hit.State {
	case Fresh:
		s.stats.Hits++
	case Stale, StaleNow:
		s.stats.Stale++
	case Failed:
		s.stats.Failures++
	case Miss:
		if s.max > 0 {
			s.stats.Misses++
		}
	}
	return hit
}

// Look is Get for a question that Get has counted before.
func (c *Cache) Look(k Key, now time.Time) Hit {
	hash := c.hash(k)
	s := c.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.get(hash, k, now.Sub(c.origin))
}

// Generation returns the number of calls of [Cache.Flush] so far, for [Value.Generation].
func (c *Cache) Generation() uint64 { return c.generation.Load() }

// Put stores v, which was received at the time now, for as long as it may be kept. It does not store the result of a
// question that was asked before the last Flush, because the result may come from nameservers that are no longer in
// use.
func (c *Cache) Put(k Key, v Value, now time.Time) {
	hash := c.hash(k)
	s := c.shard(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	if v.Generation < s.generation {
		return
	}
	t := now.Sub(c.origin)
	if v.Reply == nil {
		s.putFailure(hash, k, v.Failure, t)
		return
	}
	s.putReply(hash, k, v, t)
}

// Flush removes the entries of the questions for which match returns true, or all entries if match is nil. Replies
// to all queries that are in flight will not be stored, even if match is false for their question. Flush does not
// reset the counts of Stats.
func (c *Cache) Flush(match func(Key) bool) {
	c.changing.Lock()
	defer c.changing.Unlock()
	generation := c.generation.Add(1)
	for i := range c.shards {
		c.shards[i].flush(match, generation)
	}
}

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

// Stats returns the counts. Shards are read one after the other.
func (c *Cache) Stats() Stats {
	var sum Stats
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		sum.Entries += len(s.entries)
		sum.Bytes += s.bytes
		sum.Hits += s.stats.Hits
		sum.Misses += s.stats.Misses
		sum.Stale += s.stats.Stale
		sum.Failures += s.stats.Failures
		sum.Evictions += s.stats.Evictions
		s.mu.Unlock()
	}
	return sum
}

// hash returns the hash of k.
func (c *Cache) hash(k Key) uint64 {
	rest := uint64(k.Type)<<18 | uint64(k.Class)<<2
	if k.DO {
		rest |= 2
	}
	if k.CD {
		rest |= 1
	}
	// Multiplying by an odd number maps different values to different values. So two questions for the same name
	// never have the same hash. Questions for two different names have the same hash as rarely as two random numbers of
	// 64 bits are equal.
	const odd = 0x9E3779B97F4A7C15
	return maphash.String(c.seed, k.Name) ^ rest*odd
}

// shard returns the shard for keys with this hash.
func (c *Cache) shard(hash uint64) *shard { return &c.shards[hash>>32%shardCount] }
