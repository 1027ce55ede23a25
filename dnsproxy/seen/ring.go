package seen

import (
	"slices"
	"sync"
)

// recentSize is how many failures, and how many other noteworthy queries, are kept.
const recentSize = 1000

// A ring holds the queries that were kept last.
type ring struct {
	mu      sync.Mutex
	queries []*Query
	oldest  int // the index of the query to replace, once there are recentSize
}

// put adds a query, which nobody may change any more.
func (r *ring) put(q *Query) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queries) < recentSize {
		r.queries = append(r.queries, q)
		return
	}
	r.queries[r.oldest] = q
	r.oldest = (r.oldest + 1) % recentSize
}

// all returns the queries, in any order.
func (r *ring) all() []*Query {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.queries)
}
