package cache

import (
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/nametap/nametap/dnsproxy/reply"
)

// A name that was asked for at least refreshHits times since its reply came, the
// last time in the last tenth of its TTL, is asked for anew before it expires. If
// queries come at random, as often as so far, the chance that the new reply is
// asked for at all is then 1 - e^-3, 95 %: one refresh in 20 is for nothing. With
// one query it would be one in three.
const (
	refreshHits  = 3
	refreshTenth = 10
)

// An entry is what is known of a question. Times count from the cache's origin.
type entry struct {
	key        Key
	hash       uint64
	prev, next *entry // in the shard's ring
	size       int32
	maxTTL     uint32 // bounds the TTLs that clients see

	reply   *reply.Reply  // nil if there are only failures
	answer  bool          // reply is an answer, not a failure
	stored  time.Duration // when reply came
	expires time.Duration // from when on reply is stale
	until   time.Duration // from when on reply is of no use
	failed  time.Duration // until when not to ask, since that failed
	failure string        // why it did
	fails   int           // how often it did, one time after the other

	hits       uint8 // of the fresh reply, up to refreshHits
	refreshing bool  // somebody was told to ask anew
	visited    bool  // since the hand came by
}

// A shard is a part of the cache with a lock of its own.
type shard struct {
	mu         sync.Mutex
	generation uint64            // of the last flush
	entries    map[uint64]*entry // by hash; of two with the same the later one stays
	ring       entry             // before the newest and after the oldest
	hand       *entry            // where the search for one to evict goes on
	bytes      int64
	max        int64
	stats      Stats // but for entries and bytes
}

func (s *shard) init(maxBytes int64) {
	s.max = maxBytes
	s.clear()
}

func (s *shard) clear() {
	s.entries = make(map[uint64]*entry)
	s.ring.prev, s.ring.next, s.hand = &s.ring, &s.ring, &s.ring
	s.bytes = 0
}

// flush is [Cache.Flush] for one shard.
func (s *shard) flush(match func(Key) bool, generation uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.generation = max(s.generation, generation)
	if match == nil {
		s.clear()
		return
	}
	for _, e := range s.entries {
		if match(e.key) {
			s.remove(e)
		}
		e.refreshing = false // the reply that is on its way will not be kept
	}
}

func (s *shard) addStats(sum *Stats) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sum.Entries += len(s.entries)
	sum.Bytes += s.bytes
	sum.Hits += s.stats.Hits
	sum.Stale += s.stats.Stale
	sum.Failures += s.stats.Failures
	sum.Evictions += s.stats.Evictions
}

// find returns the entry for k, or nil.
func (s *shard) find(hash uint64, k Key) *entry {
	if e := s.entries[hash]; e != nil && e.key == k {
		return e
	}
	return nil
}

func (s *shard) get(hash uint64, k Key, now time.Duration) Hit {
	e := s.find(hash, k)
	if e == nil {
		return Hit{}
	}
	age := reply.Age{Cached: true, Seconds: uint32(max(0, now-e.stored) / time.Second), Max: e.maxTTL}
	e.visited = true
	switch {
	case now < e.expires:
		e.hits = min(e.hits+1, refreshHits)
		return Hit{
			State: Fresh, Reply: e.reply, Age: age, Refresh: e.refresh(now),
			Left: e.expires - now, Aging: e.aging(now),
		}
	case now < e.until:
		age.Stale = true
		if e.fails == 0 {
			return Hit{State: Stale, Reply: e.reply, Age: age}
		}
		return Hit{State: StaleNow, Reply: e.reply, Age: age, Failure: e.failure, Refresh: e.recheck(now)}
	case now < e.failed:
		return Hit{State: Failed, Failure: e.failure}
	default:
		return Hit{}
	}
}

// refresh reports whether who asks now is to ask anew, and notes that.
func (e *entry) refresh(now time.Duration) bool {
	if e.refreshing || !e.answer || e.hits < refreshHits || now < e.failed || !e.aging(now) {
		return false
	}
	e.refreshing = true
	return true
}

// recheck reports whether who asks now is to ask anew although that failed, and notes
// that.
func (e *entry) recheck(now time.Duration) bool {
	if now < e.failed {
		return false
	}
	e.failed = now + maxRecheck // if nothing comes of it
	return true
}

// aging reports whether e is in the last part of its time.
func (e *entry) aging(now time.Duration) bool {
	return e.expires-now < (e.expires-e.stored)/refreshTenth
}

// A lifetime says for how long a reply is kept.
type lifetime struct {
	now   time.Duration // when it came
	ttl   time.Duration // until it expires, 0: it must not be kept
	stale time.Duration // how much longer an answer is kept
	max   time.Duration // bounds the TTLs that clients see
}

// putReply keeps a reply and returns for how long it is fresh. An answer that must not be
// kept ends what was kept before it. A SERVFAIL or the like does not: it counts as a
// failure to ask if there is an answer that is fresh or may be used stale.
func (s *shard) putReply(hash uint64, k Key, r *reply.Reply, life lifetime) time.Duration {
	const noError, nxDomain = 0, 3
	rcode := r.Rcode()
	answer := rcode == noError || rcode == nxDomain
	old := s.find(hash, k)
	switch {
	case life.ttl <= 0:
		if old != nil && answer && !r.Truncated() {
			s.remove(old)
		}
	case !answer && old != nil && old.answer && life.now < old.until:
		s.fail(old, life.now, "")
	default:
		expires := life.now + life.ttl
		e := &entry{reply: r, answer: answer, stored: life.now, expires: expires, until: expires}
		e.maxTTL = uint32(life.max / time.Second) //nolint:gosec // of 68 years at most
		if answer {
			e.until += life.stale
		}
		s.put(hash, k, e)
		return life.ttl
	}
	return 0
}

// putFailure notes that no nameserver answered. An answer that is kept stays.
func (s *shard) putFailure(hash uint64, k Key, text string, now time.Duration) {
	if old := s.find(hash, k); old != nil && old.reply != nil && now < old.until {
		s.fail(old, now, text)
		return
	}
	s.put(hash, k, &entry{stored: now, expires: now, until: now, failed: now + failureTTL, failure: text})
}

// The time until a reply that could not be replaced is asked for again doubles from
// minRecheck to maxRecheck, the failure recheck timer of RFC 8767, section 5. No client
// waits for that, so the first times may be shorter.
const (
	minRecheck = 5 * time.Second
	maxRecheck = 30 * time.Second
)

// fail notes a failure to replace e.
func (s *shard) fail(e *entry, now time.Duration, text string) {
	const enough = 8 // doublings
	e.failed = now + min(minRecheck<<min(e.fails, enough), maxRecheck)
	e.failure, e.refreshing, e.fails = text, false, e.fails+1
	s.resize(e)
	s.evict(now)
}

// put keeps e for k, in the place of what was there.
func (s *shard) put(hash uint64, k Key, e *entry) {
	if old := s.entries[hash]; old != nil {
		e.visited = old.visited && old.key == k
		s.remove(old)
	}
	e.key, e.hash = k, hash
	if int64(size(e)) > s.max {
		return // all others would have to go, and then this one
	}
	e.key.Name = strings.Clone(k.Name)
	e.prev, e.next = &s.ring, s.ring.next
	e.prev.next, e.next.prev = e, e
	s.entries[hash] = e
	s.resize(e)
	s.evict(e.stored)
}

// remove forgets e.
func (s *shard) remove(e *entry) {
	if s.hand == e {
		s.hand = e.prev
	}
	e.prev.next, e.next.prev = e.next, e.prev
	delete(s.entries, e.hash)
	s.bytes -= int64(e.size)
}

// evict makes the shard fit its bound. The hand goes from old to new, spares what
// was asked for since it came by, and takes the first that was not.
func (s *shard) evict(now time.Duration) {
	for s.bytes > s.max {
		e := s.hand
		for e == &s.ring || e.visited && now < max(e.until, e.failed) {
			e.visited = false
			e = e.prev
		}
		s.hand = e
		s.remove(e)
		s.stats.Evictions++
	}
}

// resize measures e.
func (s *shard) resize(e *entry) {
	s.bytes -= int64(e.size)
	e.size = int32(size(e))
	s.bytes += int64(e.size)
}

// size returns the bytes that e occupies on the heap.
func size(e *entry) int {
	// A map has 17 bytes for a pair like ours, and is 44 to 88 % full.
	const slot = 28
	n := slot + int(unsafe.Sizeof(*e)) + len(e.key.Name) + len(e.failure)
	if e.reply != nil {
		n += e.reply.Size()
	}
	// Go's allocator rounds up to its size classes, by 1/8 at most and 1/16 on
	// average.
	return n + n/16
}
