package forward

import (
	"hash/maphash"
	"sync/atomic"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// slots bound the queries that wait for nameservers or for the first table, and share the
// slots among domains: names whose nameservers are dead wait until they time out, and must
// not take the slots of all others.
//
// A domain of two labels gets at most as many slots as are free, and one with more labels
// half of that for each further label, so that a dead domain reaches its bound before its
// parent does. A dead domain of two labels thus has at most half of all slots, two of them
// have a third each, and so on: some are always left. A name does not tell a domain from a
// host, so each suffix of two to five labels counts as a domain.
type slots struct {
	all  int64
	free atomic.Int64
	seed maphash.Seed
	// waiting counts queries by two hashes of each suffix of their names. The lower count
	// holds: suffixes that share a count with a dead domain rarely do so by both hashes.
	waiting [2][4096]atomic.Int32
}

// minSuffix and maxSuffixes say which suffixes of a name count.
const (
	minSuffix   = 2 // labels of the shortest
	maxSuffixes = 4
)

func newSlots(n int) *slots {
	s := &slots{all: int64(n), seed: maphash.MakeSeed()}
	s.free.Store(int64(n))
	return s
}

// taken returns how many slots are taken.
func (s *slots) taken() int64 { return s.all - s.free.Load() }

// A slot is what one query takes of slots.
type slot struct {
	slots    *slots
	suffixes [maxSuffixes][2]uint16 // indexes of both counts in waiting, the shortest suffix first
	n        int                    // of suffixes in use
}

// slotFor returns a slot for a query for name, which has yet to be taken.
func (s *slots) slotFor(name wire.Name) slot {
	sl := slot{slots: s}
	var starts [maxSuffixes + minSuffix - 1]int // of the last labels, a ring
	labels := 0
	for i := 0; i < len(name); i += 1 + int(name[i]) {
		starts[labels%len(starts)] = i
		labels++
	}
	for n := minSuffix; n <= labels && n < minSuffix+maxSuffixes; n++ {
		suffix := name[starts[(labels-n)%len(starts)]:]
		hash := maphash.String(s.seed, string(suffix))
		for i := range s.waiting {
			sl.suffixes[sl.n][i] = uint16(hash>>(32*i)) % uint16(len(s.waiting[i]))
		}
		sl.n++
	}
	return sl
}

// available reports whether a query may have the slot now.
func (sl *slot) available() bool {
	free := sl.slots.free.Load()
	for i, at := range sl.suffixes[:sl.n] {
		waiting := min(sl.slots.waiting[0][at[0]].Load(), sl.slots.waiting[1][at[1]].Load())
		if int64(waiting) >= max(free>>i, 1) {
			return false
		}
	}
	return free > 0
}

// take takes the slot. It reports false if it is not available.
func (sl *slot) take() bool {
	if !sl.available() {
		return false
	}
	if sl.slots.free.Add(-1) < 0 {
		sl.slots.free.Add(1)
		return false
	}
	sl.add(1)
	return true
}

// release returns a slot that was taken.
func (sl *slot) release() {
	sl.add(-1)
	sl.slots.free.Add(1)
}

func (sl *slot) add(n int32) {
	for _, at := range sl.suffixes[:sl.n] {
		sl.slots.waiting[0][at[0]].Add(n)
		sl.slots.waiting[1][at[1]].Add(n)
	}
}

const (
	// shortQuery is the length in bytes up to which queries are bounded by their number
	// alone, as nearly all are.
	shortQuery = 1 << 10
	// maxLongQueries bounds the longer ones that wait, in bytes. A query is copied about
	// five times on its way to nameservers.
	maxLongQueries = 8 << 20
)

// A longQueries counts the bytes of long queries that wait. The zero value is ready for
// use.
type longQueries struct{ bytes atomic.Int64 }

// take counts a query of n bytes, unless there are too many bytes. The caller calls release
// if it reports true.
func (l *longQueries) take(n int) bool {
	if n <= shortQuery {
		return true
	}
	if l.bytes.Add(int64(n)) > maxLongQueries {
		l.bytes.Add(-int64(n))
		return false
	}
	return true
}

// release ends what take began.
func (l *longQueries) release(n int) {
	if n > shortQuery {
		l.bytes.Add(-int64(n))
	}
}
