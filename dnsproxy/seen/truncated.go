package seen

import (
	"hash/maphash"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/dnsproxy/wire"
)

const (
	// truncatedSize is how many truncated responses over UDP are kept.
	truncatedSize = 256
	// retryWait is how long a client may take to ask again over TCP.
	retryWait = 5 * time.Second
)

// truncatedResponses has the last truncated responses over UDP. A response becomes noteworthy if its client does not
// ask again over TCP within retryWait. No response has a timer: readers look at the age of responses with the method
// visitOverdue.
type truncatedResponses struct {
	ring

	seed maphash.Seed
	// keys has, for each slot of the ring, a hash of the client and the question. It is 0 if the client has asked
	// again.
	keys [truncatedSize]atomic.Uint64
}

// key returns a hash of a client and a question. It is never 0.
func (t *truncatedResponses) key(client netip.Addr, name wire.Name, qtype uint16) uint64 {
	var h maphash.Hash
	h.SetSeed(t.seed)
	addr := client.As16()
	_, _ = h.Write(addr[:]) // it never fails
	_, _ = h.WriteString(string(name))
	_ = h.WriteByte(byte(qtype >> 8)) //nolint:gosec,mnd // its bytes
	_ = h.WriteByte(byte(qtype))      //nolint:gosec // its bytes
	return h.Sum64() | 1
}

// keep stores a packed query of n bytes.
func (t *truncatedResponses) keep(b *packedQuery, n int, q *Query) {
	number := t.put(b, n)
	// The key is stored after put, and a reader loads the key before it copies the query. So if a reader copies the
	// previous query of the slot, it has loaded the key of that query.
	t.keys[number%truncatedSize].Store(t.key(q.Client.Addr(), q.Name, q.Type))
}

// retried notes that a client has asked a question over TCP.
func (t *truncatedResponses) retried(client netip.Addr, name wire.Name, qtype uint16) {
	n := t.next.Load()
	if n == 0 {
		return
	}
	key := t.key(client, name, qtype)
	for i := range min(n, truncatedSize) {
		t.keys[i].CompareAndSwap(key, 0)
	}
}

// visitOverdue looks at the queries that are older than retryWait, from the query with the given number on. If the
// client of such a query has not asked again, visitOverdue calls visit with the query, which then has the kind Odd.
// next is the number of the first query that is younger than retryWait, and due is when this query reaches that age. If
// there is no such query, next is the number of the next query that will be kept, and due is zero.
func (t *truncatedResponses) visitOverdue(number uint64, now time.Time, visit func(q *Query)) (next uint64, due time.Time) {
	end := t.next.Load()
	number = max(number, end-min(end, truncatedSize))
	unwritten := end // the first query that is still being written, if no later query is older than retryWait
	for ; number < end; number++ {
		var b packedQuery
		key := t.keys[number%truncatedSize].Load()
		switch t.get(number, &b) {
		case notWritten:
			unwritten = min(unwritten, number)
			continue
		case replaced:
			continue
		case written:
		}
		if due = b.time().Add(retryWait); due.After(now) {
			return min(unwritten, number), due
		}
		unwritten = end // the queries before this one are too old to be still written: they are lost
		if key == 0 {
			continue
		}
		q := b.unpack()
		q.Kind, q.Rows, q.Reason = Odd, []string{"A9"}, "truncated, and not asked again over TCP within 5s"
		visit(&q)
	}
	if unwritten < end {
		return unwritten, now.Add(retryWait)
	}
	return end, time.Time{}
}
