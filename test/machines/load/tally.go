package load

import (
	"maps"
	"math/bits"
	"slices"
	"sync"
	"time"
)

// mostExamples is the number of examples of each kind.
const mostExamples = 10

// A tally counts. All methods are safe for concurrent use.
type tally struct {
	mu         sync.Mutex
	total, cur counts
	end        time.Time // of sending; zero while the load sends
}

// counts are the numbers of a report.
type counts struct {
	began       time.Time
	kinds       map[Kind]int
	transports  map[Transport]map[Kind]int
	late, stray int
	lastRight   time.Time
	gap         time.Duration
	gapBegan    time.Time
	lag         time.Duration
	latencies   histogram
	examples    map[Kind][]Example
}

func newCounts(now time.Time) counts {
	return counts{
		began: now, lastRight: now, gapBegan: now,
		kinds: map[Kind]int{}, transports: map[Transport]map[Kind]int{}, examples: map[Kind][]Example{},
	}
}

func (t *tally) begin(now time.Time) { t.total, t.cur = newCounts(now), newCounts(now) }

// both calls f for the counts of the whole load and for the current ones.
func (t *tally) both(f func(c *counts)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f(&t.total)
	f(&t.cur)
}

// sent notes that no more queries are sent.
func (t *tally) sent(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end = now
}

// lag notes how much too late a query is sent.
func (t *tally) lag(lag time.Duration) { t.both(func(c *counts) { c.lag = max(c.lag, lag) }) }

// stray notes a packet that answers no query.
func (t *tally) stray(detail string) {
	t.both(func(c *counts) {
		c.stray++
		c.example(stray, Example{Sent: time.Now(), Detail: detail})
	})
}

// note notes the end of a query.
func (t *tally) note(kind Kind, e Example) {
	t.both(func(c *counts) {
		c.kinds[kind]++
		if c.transports[e.Transport] == nil {
			c.transports[e.Transport] = map[Kind]int{}
		}
		c.transports[e.Transport][kind]++
		if kind != Right {
			c.example(kind, e)
			return
		}
		c.latencies.add(e.Took)
		if e.Took > lateAfter {
			c.late++
			c.example(late, e)
		}
		c.rightAt(e.Sent.Add(e.Took))
	})
}

// rightAt notes the time of a right answer. Goroutines may note them out of order.
func (c *counts) rightAt(at time.Time) {
	if gap := at.Sub(c.lastRight); gap > c.gap {
		c.gap, c.gapBegan = gap, c.lastRight
	}
	if at.After(c.lastRight) {
		c.lastRight = at
	}
}

func (c *counts) example(kind Kind, e Example) {
	if len(c.examples[kind]) < mostExamples {
		c.examples[kind] = append(c.examples[kind], e)
	}
}

// cut returns the report of the current counts, and begins new ones.
func (t *tally) cut(config Config) Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.reportLocked(&t.cur, config)
	last := t.cur.lastRight
	t.cur = newCounts(r.Ended)
	t.cur.lastRight, t.cur.gapBegan = last, last // a gap may be open
	return r
}

// report returns the report of the whole load.
func (t *tally) report(config Config) Report {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.reportLocked(&t.total, config)
}

// reportLocked returns the report of counts.
func (t *tally) reportLocked(c *counts, config Config) Report {
	end := t.end
	if end.IsZero() {
		end = time.Now()
	}
	open := *c
	open.rightAt(end) // the gap at the end
	r := Report{
		Server: config.Server, Began: c.began, Ended: end,
		Counts: maps.Clone(c.kinds), Transports: map[Transport]map[Kind]int{}, Examples: map[Kind][]Example{},
		Late: c.late, Stray: c.stray, LongestGap: open.gap, GapBegan: open.gapBegan, Lag: c.lag, Latency: c.latencies.percentiles(),
	}
	for transport, kinds := range c.transports {
		r.Transports[transport] = maps.Clone(kinds)
	}
	for kind, examples := range c.examples {
		r.Examples[kind] = slices.Clone(examples)
	}
	for _, n := range r.Counts {
		r.Queries += n
	}
	if seconds := end.Sub(c.began).Seconds(); seconds > 0 {
		r.Rate = float64(r.Queries) / seconds
	}
	return r
}

// A histogram counts durations in buckets whose width is 1/32 of their lower bound.
type histogram struct {
	buckets [64 * 32]int
	n       int
	max     time.Duration
}

func (h *histogram) add(d time.Duration) {
	h.buckets[bucket(d)]++
	h.n++
	h.max = max(h.max, d)
}

// bucket returns the index of the bucket of a duration.
func bucket(d time.Duration) int {
	v := uint64(max(d, 0)) //nolint:gosec // not negative
	shift := max(bits.Len64(v)-6, 0)
	return shift*32 + int(v>>shift) //nolint:gosec // below 64
}

// bound returns the lower bound of a bucket.
func bound(index int) time.Duration {
	shift := max(index/32-1, 0)
	return time.Duration(index-shift*32) << shift
}

// at returns a lower bound of the duration that a share of all durations does not exceed.
func (h *histogram) at(share float64) time.Duration {
	left := int(share * float64(h.n))
	for i, n := range h.buckets {
		if left -= n; left < 0 {
			return bound(i)
		}
	}
	return h.max
}

func (h *histogram) percentiles() Latency {
	return Latency{P50: h.at(0.5), P90: h.at(0.9), P99: h.at(0.99), P999: h.at(0.999), Max: h.max}
}
