package seen

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// queueSize is how many queries may wait for a reader.
	queueSize = 1024
	// maxReaders is how many readers clients may have at a time.
	maxReaders = 8
)

// ErrGaveWay is the error of [Reader.Next] after maxReaders clients have begun to read later.
var ErrGaveWay = errors.New("8 other clients have begun to read queries")

// A Recorder records queries. Make one with [New]. Its methods are safe for concurrent use.
type Recorder struct {
	origin       time.Time
	readers      atomic.Pointer[[]*Reader] // nil if there are none
	wantOrdinary atomic.Bool               // whether a reader may want ordinary queries
	ids          atomic.Uint64             // the id of the last query
	recent       [kinds]ring               // by kind; that of Ordinary is not used
	clients      *clients
	units        *units

	changing sync.Mutex // held while readers are added and removed
}

// New returns a Recorder.
func New() *Recorder {
	return &Recorder{origin: time.Now(), clients: newClients(), units: newUnits(cgroupRoot())}
}

// Run looks up the names of cgroups until ctx ends, because a name can only be found while its cgroup exists. It then
// closes what the Recorder has opened.
func (r *Recorder) Run(ctx context.Context) {
	defer r.clients.close()
	r.units.run(ctx)
}

// Start returns the time if a reader may want ordinary queries. Otherwise it returns 0, without reading the clock.
func (r *Recorder) Start() Moment {
	if !r.Watched() {
		return 0
	}
	return r.Now()
}

// Watched reports whether a reader may want ordinary queries.
func (r *Recorder) Watched() bool { return r.wantOrdinary.Load() }

// Now returns the time. It is never 0. Now is not inlined, so that Start can be inlined.
//
//go:noinline
func (r *Recorder) Now() Moment { return Moment(time.Since(r.origin) + 1) }

// Wants reports whether a reader may want a query. The fields Rows, Reason and Who of the query need not be set yet.
// wantOwner is true if such a reader wants to know the owner of the client's socket.
func (r *Recorder) Wants(q *Query) (wanted, wantOwner bool) {
	readers := r.readers.Load()
	if readers == nil {
		return false, false
	}
	for _, reader := range *readers {
		if reader.filter.mayWant(q) {
			wanted, wantOwner = true, wantOwner || reader.filter.wantOwner
		}
	}
	return wanted, wantOwner
}

// Find returns the owner of the socket from which a query came, unless the time for queries of this kind is spent.
func (r *Recorder) Find(q *Query, sent Sent) Who {
	who := r.clients.find(q, sent)
	if who.Cgroup != 0 {
		r.units.want(who.Cgroup)
	}
	return who
}

// Record keeps a query if it is noteworthy, and gives it to the readers that want it. It does not block.
func (r *Recorder) Record(q *Query) {
	q.id = r.ids.Add(1)
	var kept *Query
	if q.Kind.noteworthy() {
		kept = q.kept()
		r.recent[q.Kind].put(kept)
	}
	readers := r.readers.Load()
	if readers == nil {
		return
	}
	for _, reader := range *readers {
		if !reader.filter.mayWant(q) {
			continue
		}
		if q.Who.skipped && reader.filter.byOwner() {
			reader.miss()
			continue
		}
		if !reader.filter.wants(q) {
			continue
		}
		if kept == nil {
			kept = q.kept()
		}
		reader.put(kept, q)
	}
}

// Failures returns the failures that are kept and were answered at the time start or later, sorted by time.
func (r *Recorder) Failures(start time.Time) []Record {
	return newReader(r, Failures()).Past(start)
}

// Read adds a reader for a client. If there are maxReaders already, the oldest one gives way, because a client may have
// been left behind: a command that `kubectl exec` started runs on after it. The caller must close the reader.
func (r *Recorder) Read(filter *Filter) *Reader {
	reader := newReader(r, filter)
	reader.gaveWay = make(chan struct{})
	r.add(reader)
	return reader
}

// ReadOwn adds a reader for the agent itself. The limit of readers does not apply to it. The caller must close the
// reader.
func (r *Recorder) ReadOwn(filter *Filter) *Reader {
	reader := newReader(r, filter)
	r.add(reader)
	return reader
}

// ReadMessages is like ReadOwn, but the reader also gets the messages of each query. When messages are dropped because
// the reader is too slow, onDrop is called with their number, on the goroutine that answers the query.
func (r *Recorder) ReadMessages(filter *Filter, onDrop func(messages int)) *Reader {
	reader := newReader(r, filter)
	reader.onDrop = onDrop
	r.add(reader)
	return reader
}

func newReader(r *Recorder, filter *Filter) *Reader {
	return &Reader{recorder: r, filter: filter, queue: make(chan *Query, queueSize)}
}

// add adds a reader after all others.
func (r *Recorder) add(reader *Reader) {
	r.changing.Lock()
	defer r.changing.Unlock()
	all := []*Reader{reader}
	if readers := r.readers.Load(); readers != nil {
		all = append(slices.Clone(*readers), reader)
	}
	clients := slices.DeleteFunc(slices.Clone(all), func(r *Reader) bool { return r.gaveWay == nil })
	if len(clients) > maxReaders {
		close(clients[0].gaveWay)
		all = slices.DeleteFunc(all, func(r *Reader) bool { return r == clients[0] })
	}
	r.useLocked(all)
}

// remove removes a reader.
func (r *Recorder) remove(reader *Reader) {
	r.changing.Lock()
	defer r.changing.Unlock()
	if readers := r.readers.Load(); readers != nil {
		r.useLocked(slices.DeleteFunc(slices.Clone(*readers), func(other *Reader) bool { return other == reader }))
	}
}

// useLocked puts readers into use.
func (r *Recorder) useLocked(readers []*Reader) {
	r.wantOrdinary.Store(slices.ContainsFunc(readers, func(reader *Reader) bool { return reader.filter.ordinary() }))
	if len(readers) == 0 {
		r.readers.Store(nil)
		return
	}
	r.readers.Store(&readers)
}

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
