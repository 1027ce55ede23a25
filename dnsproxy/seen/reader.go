package seen

import (
	"context"
	"sort"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/internal/chans"
)

// A writer takes a number, then writes the query. holeWait is how long a reader waits for the query of a number that
// was taken, because the query may be lost.
const holeWait = 100 * time.Millisecond

// gatherTime is how long a reader waits for more queries after the first one, so that it does not wake for each query.
const gatherTime = 20 * time.Millisecond

// A Reader reads the queries that a filter selects. Only one goroutine may use it.
type Reader struct {
	recorder *Recorder
	filter   *Filter
	limited  bool // it counts as one of maxReaders
	live     ring
	wake     chan struct{} // there may be a new query
	half     chan struct{} // there may be half a ring of new queries

	number uint64              // of the next query in live
	past   map[uint64]struct{} // the queries that Past has returned
	cut    uint64              // number, in Recorder.cut, of the next truncated response that may become noteworthy
	lost   uint64
	missed atomic.Uint64 // queries that the filter may select, but whose clients were not looked up

	exchanges *Exchanges // takes the queries in place of live; nil if no messages are read
}

// Close removes the reader. It may be called more than once.
func (r *Reader) Close() { r.recorder.remove(r) }

// put writes a packed query of n bytes.
func (r *Reader) put(b *packed, n int) {
	if number := r.live.put(b, n); number%(liveSize/2) == 0 {
		chans.Wake(r.half)
	}
	chans.Wake(r.wake)
}

// miss counts a query that the filter may select, but whose client was not looked up.
func (r *Reader) miss() {
	r.missed.Add(1)
	chans.Wake(r.wake)
}

// Past returns the noteworthy queries since a time, sorted by time. Next does not return them again.
func (r *Reader) Past(since time.Time) []Record {
	var records []Record
	r.past = map[uint64]struct{}{}
	for _, kind := range []Kind{Failure, Odd} {
		r.recorder.recent[kind].all(func(b *packed) {
			if b.time().Before(since) {
				return
			}
			r.past[b.id()] = struct{}{}
			if q := b.unpack(); r.filter.mayWant(&q) && r.filter.wants(&q) {
				records = r.append(records, &q)
			}
		})
	}
	r.cut, _ = r.recorder.cut.overdue(0, time.Now(), func(q *Query) {
		if q.Time.Before(since) {
			return
		}
		r.past[q.id] = struct{}{}
		if r.filter.mayWant(q) && r.filter.wants(q) {
			records = r.append(records, q)
		}
	})
	sort.SliceStable(records, func(i, j int) bool { return records[i].Time.Before(records[j].Time) })
	return records
}

// append appends the record of a query, unless the filter selects another unit.
func (r *Reader) append(records []Record, q *Query) []Record {
	path := r.recorder.units.path(q)
	if !r.filter.isUnit(path) {
		return records
	}
	return append(records, record(q, path))
}

// overdue appends the truncated responses that have become noteworthy. due is when the next one may become noteworthy,
// zero if there is none. For a reader that also wants other queries, overdue does nothing: that reader gets these
// responses when they are sent, if its filter selects them.
func (r *Reader) overdue(records []Record) (all []Record, due time.Time) {
	if !r.filter.noteworthy {
		return records, due
	}
	r.cut, due = r.recorder.cut.overdue(r.cut, time.Now(), func(q *Query) {
		if r.filter.mayWant(q) && r.filter.wants(q) {
			records = r.append(records, q)
		}
	})
	return records, due
}

// Next waits for queries and returns them, in the order in which they were answered; for a reader of noteworthy queries
// only, truncated responses come when they have become noteworthy. lost is how many other queries, which the filter
// selects or may select, were lost meanwhile. After the end of ctx, Next returns the queries that it still finds; if
// it finds none, it returns the error of ctx.
func (r *Reader) Next(ctx context.Context) (records []Record, lost uint64, err error) {
	for {
		var due time.Time
		records, due = r.overdue(r.drain())
		if lost, r.lost = r.lost+r.missed.Swap(0), 0; len(records) > 0 || lost > 0 {
			return records, lost, nil
		}
		var hole, wait <-chan time.Time
		if !due.IsZero() {
			wait = time.After(time.Until(due))
		}
		if r.number < r.live.next.Load() {
			hole = time.After(holeWait)
		}
		select {
		case <-r.wake:
			gather(ctx, r.half)
		case <-wait:
		case <-hole:
			var b packed
			if r.live.get(r.number, &b) == early {
				r.number++
				r.lost++
			}
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		}
	}
}

// gather waits while queries come, until there are many or gatherTime is over.
func gather(ctx context.Context, many chan struct{}) {
	timer := time.NewTimer(gatherTime)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-many:
	case <-ctx.Done():
	}
}

// drain returns the queries that are in the ring.
func (r *Reader) drain() (records []Record) {
	var b packed
	for r.number < r.live.next.Load() {
		switch r.live.get(r.number, &b) {
		case early:
			return records
		case gone:
			first := r.live.next.Load() - min(r.live.next.Load(), liveSize/2) // not the oldest, which is about to be replaced
			first = max(first, r.number+1)
			r.lost += first - r.number
			r.number = first
			continue
		case there:
		}
		r.number++
		if _, past := r.past[b.id()]; past {
			continue
		}
		q := b.unpack()
		records = r.append(records, &q)
	}
	return records
}
