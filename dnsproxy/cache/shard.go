package cache

import (
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/nametap/nametap/dnsproxy/reply"
)

// A reply that is in use is refreshed: nameservers are asked again before it expires. This happens if there is a
// query in the last tenth of its TTL, and if this query is at least the third since the reply was stored
// (refreshHits). If queries arrive at random, and as often as before, the new reply is used with a probability of
// 95 % (1 - e^-3), so one refresh in 20 is wasted. If one query sufficed instead of three, one refresh in three would
// be wasted.
const (
	refreshHits  = 3
	refreshTenth = 10
)

// An entry is what the cache has for a question. Its times count from the field origin of the cache.
type entry struct {
	key        Key
	hash       uint64
	prev, next *entry // the neighbours in the shard's ring
	size       int32
	maxTTL     uint32 // the longest TTL that clients get, in seconds

	reply       *reply.Reply  // nil if no nameserver has replied
	server      string        // the nameserver that sent reply; other entries share the string
	stored      time.Duration // when reply was stored
	expires     time.Duration // when reply becomes stale
	usableUntil time.Duration // when reply can no longer be used
	retryAt     time.Duration // if asking has failed: when nameservers may be asked again
	failure     string        // why asking failed

	fails       uint8 // how often asking failed in a row, up to maxFails
	isAnswer    bool  // reply is an answer, not a failure
	hits        uint8 // how often the fresh reply was used, up to refreshHits
	refreshing  bool  // a caller has been told to ask again
	visited     bool  // used since shard.hand last passed it (SIEVE's bit)
	provisional bool  // see Value.Provisional
}

// A shard is a part of the cache with a lock of its own.
type shard struct {
	mu         sync.Mutex
	generation uint64            // the generation of the last flush
	entries    map[uint64]*entry // by hash; a new entry replaces one with the same hash
	ring       entry             // the sentinel of the ring of entries: next is the newest entry, prev the oldest
	hand       *entry            // where the search for an entry to evict continues
	bytes      int64             // the size of all entries
	max        int64             // the bound of bytes
	stale      time.Duration     // how long answers are kept after they have expired
	stats      Stats             // Entries and Bytes are not used
}

// endOf returns when the reply of an entry can no longer be used.
func (s *shard) endOf(e *entry) time.Duration {
	if e.isAnswer && !e.provisional {
		return e.expires + s.stale
	}
	return e.expires
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
		e.refreshing = false // the reply that is in flight will not be stored
	}
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
	age := reply.Age{Seconds: uint32(max(0, now-e.stored) / time.Second), Max: e.maxTTL}
	e.visited = true
	switch {
	case now < e.expires:
		e.hits = min(e.hits+1, refreshHits)
		state := Fresh
		if !e.isAnswer {
			state = Failed
		}
		aging := e.expires-now < (e.expires-e.stored)/refreshTenth // in the last tenth of its time
		refresh := !e.refreshing && e.isAnswer && e.hits >= refreshHits && now >= e.retryAt && aging
		e.refreshing = e.refreshing || refresh
		return Hit{State: state, Reply: e.reply, Server: e.server, Age: age, Refresh: refresh}
	case now < e.usableUntil:
		age.Stale = true
		if e.fails == 0 {
			return Hit{State: Stale, Reply: e.reply, Server: e.server, Age: age}
		}
		recheck := now >= e.retryAt
		if recheck {
			e.retryAt = now + maxRecheck // unless a result is stored before; so only one caller asks
		}
		return Hit{State: StaleNow, Reply: e.reply, Server: e.server, Age: age, Failure: e.failure, Refresh: recheck}
	case now < e.retryAt:
		return Hit{State: Failed, Failure: e.failure}
	default:
		return Hit{}
	}
}

// putReply stores a reply that was received at the time now. If the reply is an answer that must not be kept, putReply
// removes the previous reply. A failure such as SERVFAIL does not replace an answer that can still be used, fresh or
// stale. It only counts as a failed attempt to ask.
func (s *shard) putReply(hash uint64, k Key, v Value, now time.Duration) {
	const noError, nxDomain = 0, 3
	r, rcode := v.Reply, v.Reply.Rcode()
	isAnswer := rcode == noError || rcode == nxDomain
	longest := maxTTL
	if r.Negative() {
		longest = maxNegativeTTL
	}
	if v.MaxTTL > 0 {
		longest = min(longest, v.MaxTTL)
	}
	ttl, _ := r.TTL()
	ttl = min(ttl, longest)
	old := s.find(hash, k)
	switch {
	case ttl <= 0:
		if old != nil && isAnswer && !r.Truncated() {
			s.remove(old)
		}
	case !isAnswer && old != nil && old.isAnswer && now < old.usableUntil:
		s.fail(old, now, v.Failure)
	default:
		e := &entry{
			reply: r, server: v.Server, isAnswer: isAnswer, provisional: v.Provisional,
			stored: now, expires: now + ttl, maxTTL: uint32(longest / time.Second),
		}
		e.usableUntil = s.endOf(e)
		s.put(hash, k, e)
	}
}

// putFailure notes that no nameserver answered. A reply that can still be used stays.
func (s *shard) putFailure(hash uint64, k Key, text string, now time.Duration) {
	if old := s.find(hash, k); old != nil && old.reply != nil && now < old.usableUntil {
		s.fail(old, now, text)
		return
	}
	s.put(hash, k, &entry{stored: now, expires: now, usableUntil: now, retryAt: now + failureTTL, failure: text})
}

// If a reply is to be replaced, and asking fails, the question is asked again after minRecheck at the earliest. This
// time doubles with each failure, up to maxRecheck, the failure recheck timer of RFC 8767, section 5. The first of
// these times may be shorter than the RFC says, because no client waits for these attempts.
const (
	minRecheck = 5 * time.Second
	maxRecheck = 30 * time.Second
	maxFails   = 8 // more doublings would overflow
)

// fail records that nameservers were asked for a newer reply than that of e, and failed.
func (s *shard) fail(e *entry, now time.Duration, text string) {
	e.retryAt = now + min(minRecheck<<e.fails, maxRecheck)
	e.failure, e.refreshing, e.fails = text, false, min(e.fails+1, maxFails)
	s.resize(e)
	s.evict(now)
}

// put stores e for the question k. It replaces the previous entry.
func (s *shard) put(hash uint64, k Key, e *entry) {
	if old := s.entries[hash]; old != nil {
		e.visited = old.visited && old.key == k
		s.remove(old)
	}
	e.key, e.hash = k, hash
	e.key.Name = strings.Clone(k.Name)
	if int64(size(e)) > s.max {
		return // there is no room for it, even if all other entries are evicted
	}
	e.prev, e.next = &s.ring, s.ring.next
	e.prev.next, e.next.prev = e, e
	s.entries[hash] = e
	s.resize(e)
	s.evict(e.stored)
}

// remove removes e.
func (s *shard) remove(e *entry) {
	if s.hand == e {
		s.hand = e.prev
	}
	e.prev.next, e.next.prev = e.next, e.prev
	delete(s.entries, e.hash)
	s.bytes -= int64(e.size)
}

// evict removes entries until the shard fits its bound. The hand points to the next entry to look at, and moves from
// old entries to new ones. If the entry was used (visited), the hand clears visited and moves on. Otherwise, or if the
// entry is of no use any more, evict removes it.
func (s *shard) evict(now time.Duration) {
	for s.bytes > s.max {
		e := s.hand
		for e == &s.ring || e.visited && now < max(e.usableUntil, e.retryAt) {
			e.visited = false
			e = e.prev
		}
		s.hand = e
		s.remove(e)
		s.stats.Evictions++
	}
}

// resize updates the size of e.
func (s *shard) resize(e *entry) {
	s.bytes -= int64(e.size)
	e.size = int32(size(e))
	s.bytes += int64(e.size)
}

// size returns the bytes that e occupies on the heap.
func size(e *entry) int {
	// A map of this type uses 17 bytes for each slot, and 44 to 88 % of its slots are in use.
	const slot = 28
	n := slot + int(unsafe.Sizeof(*e)) + len(e.key.Name) + len(e.failure)
	if e.reply != nil {
		n += e.reply.Size()
	}
	// Go's allocator rounds up to its size classes, by at most 1/8 and by 1/16 on
	// average.
	return n + n/16
}
