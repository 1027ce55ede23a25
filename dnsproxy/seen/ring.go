package seen

import (
	"encoding/binary"
	"sync"
	"sync/atomic"
)

const slotWords = slotSize / 8

// A slot holds one packed query. Its words are atomic, because a reader may copy them while a writer replaces them.
// The reader notices this, because the field sequence has changed.
type slot struct {
	// sequence is 2n+1 while the query with the number n is being written, and 2n+2 once it is there.
	sequence atomic.Uint64
	words    [slotWords]atomic.Uint64
}

// A ring holds the queries that were written last. A writer never waits.
type ring struct {
	size  int
	next  atomic.Uint64 // the number of the next query
	once  sync.Once
	slots []slot // allocated by the first writer
	ready atomic.Bool
}

// put writes a packed query of n bytes and returns its number. If another writer is still writing into the slot,
// because the whole ring was filled meanwhile, put does not wait for it, and the query is lost.
func (r *ring) put(b *packedQuery, n int) (number uint64) {
	r.once.Do(func() {
		r.slots = make([]slot, r.size)
		r.ready.Store(true)
	})
	number = r.next.Add(1) - 1
	s := &r.slots[number%uint64(r.size)] //nolint:gosec // positive
	previous := s.sequence.Load()
	if previous%2 == 1 || previous > 2*number || !s.sequence.CompareAndSwap(previous, 2*number+1) {
		return number
	}
	for i := range (n + 7) / 8 {
		s.words[i].Store(binary.LittleEndian.Uint64(b[8*i:]))
	}
	s.sequence.Store(2*number + 2)
	return number
}

// A state says whether a ring has the query with a given number.
type state uint8

const (
	written    state = iota
	notWritten       // the query is not written yet
	replaced         // another query has replaced it
)

// get copies the query with the given number into b, if the ring has it.
func (r *ring) get(number uint64, b *packedQuery) state {
	if !r.ready.Load() {
		return notWritten
	}
	s := &r.slots[number%uint64(r.size)] //nolint:gosec // positive
	sequence := s.sequence.Load()
	switch {
	case sequence < 2*number+2:
		return notWritten
	case sequence > 2*number+2:
		return replaced
	}
	for i := range s.words {
		binary.LittleEndian.PutUint64(b[8*i:], s.words[i].Load())
	}
	if s.sequence.Load() != sequence {
		return replaced
	}
	return written
}

// all calls visit with each query in the ring, the oldest first.
func (r *ring) all(visit func(b *packedQuery)) {
	end := r.next.Load()
	start := end - min(end, uint64(r.size)) //nolint:gosec // positive
	var b packedQuery
	for number := start; number < end; number++ {
		if r.get(number, &b) == written {
			visit(&b)
		}
	}
}
