package upstream

import (
	"sync"
	"time"
)

// The numbers of rule 10.
const (
	budgetMax    = 256
	budgetReply  = 2   // earned by a usable reply
	budgetSecond = 100 // earned in a second
)

// A budget bounds how often the queries of a group are sent again because a server is late
// (rule 10). The zero budget is full. It is safe for concurrent use.
type budget struct {
	mu     sync.Mutex
	spent  float64
	filled time.Time // when spent was last reduced for the time
}

// take spends one, and reports whether there was one left.
func (b *budget) take(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spent = max(0, b.spent-now.Sub(b.filled).Seconds()*budgetSecond)
	b.filled = now
	if b.spent+1 > budgetMax {
		return false
	}
	b.spent++
	return true
}

// earn adds what a usable reply earns.
func (b *budget) earn() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spent = max(0, b.spent-budgetReply)
}

// mayRepeat reports whether the query may be sent again, to a server with this standing,
// because a server is late (rule 10). The first repetition is free unless that server is
// silent too.
func (s *schedule) mayRepeat(st *standing, now time.Time) bool {
	return !s.repeated && st.state < Down && !st.silent || s.budget.take(now)
}
