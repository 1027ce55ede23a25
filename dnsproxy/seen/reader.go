package seen

import (
	"context"
	"sort"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/internal/chans"
)

// gatherTime is how long a reader waits for more queries after the first one, so that it does not wake for each query.
const gatherTime = 20 * time.Millisecond

// A Reader reads the queries that a filter selects. Only one goroutine may use it.
type Reader struct {
	recorder *Recorder
	filter   *Filter
	gaveWay  chan struct{} // closed when the reader has given way to another client; nil for a reader of the agent
	live     ring
	wake     chan struct{} // has an element when there may be a new query
	halfFull chan struct{} // has an element when live may be half full of new queries

	number  uint64              // the number of the next query in live
	pastIDs map[uint64]struct{} // the ids of the queries that Past has looked at
	lost    uint64              // how many queries the reader has missed since Next last returned
	missed  atomic.Uint64       // how many queries the filter might have selected, but their clients were not looked up

	exchanges *Exchanges // gets the queries in place of live; nil if no messages are read
}

// Close removes the reader. It may be called more than once.
func (r *Reader) Close() { r.recorder.remove(r) }

// put adds a query to the ring live.
func (r *Reader) put(q *Query) {
	if number := r.live.put(q); number%(liveSize/2) == 0 {
		chans.Wake(r.halfFull)
	}
	chans.Wake(r.wake)
}

// miss counts a query that the filter might have selected, but whose client was not looked up.
func (r *Reader) miss() {
	r.missed.Add(1)
	chans.Wake(r.wake)
}

// Past returns the noteworthy queries that are kept and were answered at the time start or later, sorted by time. Next
// does not return them again.
func (r *Reader) Past(start time.Time) []Record {
	var records []Record
	r.pastIDs = map[uint64]struct{}{}
	for _, kind := range []Kind{Failure, Odd} {
		all, _ := r.recorder.recent[kind].from(0)
		for _, q := range all {
			if q.Time.Before(start) {
				continue
			}
			r.pastIDs[q.id] = struct{}{}
			if r.filter.mayWant(q) && r.filter.wants(q) {
				records = r.append(records, q)
			}
		}
	}
	sort.SliceStable(records, func(i, j int) bool { return records[i].Time.Before(records[j].Time) })
	return records
}

// append appends the record of a query to records, unless the client belongs to a unit that the filter does not
// select.
func (r *Reader) append(records []Record, q *Query) []Record {
	path := r.recorder.units.path(q)
	if !r.filter.isUnit(path) {
		return records
	}
	return append(records, record(q, path))
}

// Next waits for queries and returns them, in the order in which they were answered. lost is how many queries were lost
// that the filter selects, or might have selected. After the end of ctx, Next returns the queries that it still finds. If
// it finds none, it returns the error of ctx. For a reader that has given way, that is [ErrGaveWay].
func (r *Reader) Next(ctx context.Context) (records []Record, lost uint64, err error) {
	for {
		records = r.drain()
		if lost, r.lost = r.lost+r.missed.Swap(0), 0; len(records) > 0 || lost > 0 {
			return records, lost, nil
		}
		select {
		case <-r.wake:
			gather(ctx, r.halfFull)
		case <-r.gaveWay:
			return nil, 0, ErrGaveWay
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		}
	}
}

// gather waits for gatherTime, so that more queries come. It ends earlier if halfFull has an element, or if ctx ends.
func gather(ctx context.Context, halfFull chan struct{}) {
	timer := time.NewTimer(gatherTime)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-halfFull:
	case <-ctx.Done():
	}
}

// drain returns the queries in the ring live that were not read yet.
func (r *Reader) drain() (records []Record) {
	all, next := r.live.from(r.number)
	r.lost += next - r.number - uint64(len(all))
	r.number = next
	for _, q := range all {
		if _, past := r.pastIDs[q.id]; !past {
			records = r.append(records, q)
		}
	}
	return records
}
