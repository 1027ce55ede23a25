package seen

import (
	"context"
	"sort"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// gatherTime is how long a reader waits for more queries after the first one, so that it does not wake for each query.
const gatherTime = 5 * time.Millisecond

// A Reader reads the queries that a filter selects. Only one goroutine may use it.
type Reader struct {
	recorder *Recorder
	filter   *Filter
	gaveWay  chan struct{}       // closed when the reader has given way to another client; nil for a reader of the agent
	queue    chan *Query         // new queries, or nil if one was missed
	lost     atomic.Uint64       // how many queries were missed, since Next last returned, that the filter selects or might have
	pastIDs  map[uint64]struct{} // the ids of the queries that Past has looked at

	// onDrop is called when messages are dropped; nil for a reader without messages. bytes is the length of all messages in
	// queue.
	onDrop func(messages int)
	bytes  atomic.Int64
}

// Close removes the reader, and drops the queries that it has not read. It may be called more than once.
func (r *Reader) Close() {
	r.recorder.remove(r)
	for range len(r.queue) {
		r.drop(<-r.queue)
	}
}

// maxBytes bounds the length of all messages together that wait for a reader.
const maxBytes = 1 << 20

// put gives the reader a query, unless too many wait, or too long ones. kept is the copy of q. It does not block.
func (r *Reader) put(kept, q *Query) {
	if r.onDrop != nil {
		if r.bytes.Add(q.size()) > maxBytes || len(r.queue) == cap(r.queue) {
			r.drop(q)
			return
		}
		kept = q.withMessages(kept)
	}
	select {
	case r.queue <- kept:
	default:
		r.drop(q)
	}
}

// drop counts a query that the reader does not get.
func (r *Reader) drop(q *Query) {
	r.lost.Add(1)
	if q != nil && r.onDrop != nil {
		r.bytes.Add(-q.size())
		r.onDrop(messages(q.Response))
	}
}

// miss counts a query that the filter might have selected, but whose client was not looked up.
func (r *Reader) miss() {
	r.lost.Add(1)
	select {
	case r.queue <- nil: // wakes the reader
	default:
	}
}

// Past returns the noteworthy queries that are kept and were answered at the time start or later, sorted by time. Next
// does not return them again.
func (r *Reader) Past(start time.Time) []Record {
	var records []Record
	r.pastIDs = map[uint64]struct{}{}
	for _, kind := range []Kind{Failure, Odd} {
		for _, q := range r.recorder.recent[kind].all() {
			if q.Time.Before(start) {
				continue
			}
			if r.filter.mayWant(q) && r.filter.wants(q) {
				records = r.append(records, q)
			}
			r.pastIDs[q.id] = struct{}{}
		}
	}
	sort.SliceStable(records, func(i, j int) bool { return records[i].Time.Before(records[j].Time) })
	return records
}

// append appends the record of a query to records, unless Past has looked at the query, or its client belongs to a unit that
// the filter does not select.
func (r *Reader) append(records []Record, q *Query) []Record {
	if q == nil {
		return records
	}
	if r.onDrop != nil {
		r.bytes.Add(-q.size())
	}
	if _, past := r.pastIDs[q.id]; past {
		return records
	}
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
	for err == nil {
		select {
		case q := <-r.queue:
			records = r.append(records, q)
			clock.Sleep(ctx, gatherTime)
		case <-r.gaveWay:
			return nil, 0, ErrGaveWay
		case <-ctx.Done():
			err = ctx.Err()
		}
		for range len(r.queue) {
			records = r.append(records, <-r.queue)
		}
		if lost = r.lost.Swap(0); len(records) > 0 || lost > 0 {
			return records, lost, nil
		}
	}
	return nil, 0, err
}
