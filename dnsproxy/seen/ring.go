package seen

import "sync"

// A ring holds the queries that were kept last.
type ring struct {
	size uint64

	mu    sync.Mutex
	slots []*Query // allocated by the first writer
	next  uint64   // the number of the next query
}

// put adds a query, which nobody may change any more, and returns its number.
func (r *ring) put(q *Query) (number uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.slots == nil {
		r.slots = make([]*Query, r.size)
	}
	number = r.next
	r.slots[number%r.size] = q
	r.next++
	return number
}

// from returns the queries from the number first on, and the number of the next query that will be added. Those that
// others have replaced are left out.
func (r *ring) from(first uint64) (all []*Query, next uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for number := max(first, r.next-min(r.next, r.size)); number < r.next; number++ {
		all = append(all, r.slots[number%r.size])
	}
	return all, r.next
}
