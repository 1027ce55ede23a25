package seen

import "sync"

// A ring holds the queries that were written last. Its lock is held for the copy of one query, by writers and by readers.
type ring struct {
	size uint64

	mu    sync.Mutex
	slots []packedQuery // allocated by the first writer
	next  uint64        // the number of the next query
}

// put writes a packed query of n bytes and returns its number.
func (r *ring) put(b *packedQuery, n int) (number uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.slots == nil {
		r.slots = make([]packedQuery, r.size)
	}
	number = r.next
	copy(r.slots[number%r.size][:], b[:n])
	r.next++
	return number
}

// get copies the query with the given number into b. It reports false if there is no such query yet, or if another one
// has replaced it. next is the number of the next query that will be written.
func (r *ring) get(number uint64, b *packedQuery) (next uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if number >= r.next || r.next-number > r.size {
		return r.next, false
	}
	*b = r.slots[number%r.size]
	return r.next, true
}

// all calls visit with each query in the ring, the oldest first.
func (r *ring) all(visit func(b *packedQuery)) {
	var b packedQuery
	end, _ := r.get(0, &b)
	for number := end - min(end, r.size); number < end; number++ {
		if _, ok := r.get(number, &b); ok {
			visit(&b)
		}
	}
}
