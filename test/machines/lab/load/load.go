package load

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Config describes a load.
type Config struct {
	// Server is the nameserver that is queried.
	Server netip.AddrPort
	// Rate is the number of queries a second.
	Rate int
	// TCP is the share of queries over TCP, each over a new connection.
	TCP float64
	// Kept is the share of queries from a few sockets that stay open as long as the load. These sockets are not
	// connected, like musl's. All other queries over UDP have a connected socket of their own, as from glibc.
	Kept float64
	// Expect says what is asked, and which answers are right.
	Expect *Expectation
	// Enter calls f in the place where the sockets are to be opened, such as the method Run of a netns.NS. nil calls f.
	Enter func(f func())
}

// timeout is the time after which a query without an answer is lost, as in glibc.
const timeout = 5 * time.Second

// A Kind is how a query ended.
type Kind string

// The kinds. Every query has one of them.
const (
	Right       Kind = "right"       // an expected answer
	Wrong       Kind = "wrong"       // an answer that was not expected
	Foreign     Kind = "foreign"     // an answer of another server than the agent: see Expectation.Foreign
	Failed      Kind = "failed"      // SERVFAIL where it was not expected
	Unreachable Kind = "unreachable" // refused by the kernel: no process listens
	Lost        Kind = "lost"        // no answer within the timeout
	Unsent      Kind = "unsent"      // the load itself could not send it
)

// Kinds returns all kinds.
func Kinds() []Kind { return []Kind{Right, Wrong, Foreign, Failed, Unreachable, Lost, Unsent} }

// A Report says how queries ended.
type Report struct {
	Began   time.Time    `json:"began"`
	Ended   time.Time    `json:"ended"`
	Queries int          `json:"queries"`
	Counts  map[Kind]int `json:"counts"`
	// LongestGap is the longest time without a right answer.
	LongestGap time.Duration `json:"longest_gap_ns"`
	// Lag is the longest time that a query was sent too late, because the load itself did not get the processor.
	Lag time.Duration `json:"lag_ns"`
	// Examples are the first queries without a right answer.
	Examples []string `json:"examples,omitempty"`
}

// mostExamples is the number of examples.
const mostExamples = 5

// Count returns the number of queries of some kinds.
func (r Report) Count(kinds ...Kind) int {
	n := 0
	for _, kind := range kinds {
		n += r.Counts[kind]
	}
	return n
}

// Bad returns the number of queries without a right answer.
func (r Report) Bad() int { return r.Queries - r.Counts[Right] }

// String returns the report as some lines of text.
func (r Report) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%d queries in %v:", r.Queries, r.Ended.Sub(r.Began).Round(time.Millisecond))
	for _, kind := range Kinds() {
		if n := r.Counts[kind]; n > 0 || kind == Right {
			fmt.Fprintf(&text, " %d %s", n, kind)
		}
	}
	fmt.Fprintf(&text, ", longest gap %v, lag of the load %v\n\t%s", r.LongestGap, r.Lag, strings.Join(r.Examples, "\n\t"))
	return text.String()
}

// A tally counts since a time.
type tally struct {
	Report
	lastRight time.Time
}

func newTally(now, lastRight time.Time) *tally {
	return &tally{Report{Began: now, Counts: map[Kind]int{}}, lastRight}
}

// right notes the time of a right answer. Goroutines may note them out of order.
func (t *tally) right(at time.Time) {
	t.LongestGap = max(t.LongestGap, at.Sub(t.lastRight))
	if at.After(t.lastRight) {
		t.lastRight = at
	}
}

// A Load is a running load. Its methods are safe for concurrent use.
type Load struct {
	config  Config
	stop    context.CancelFunc
	done    chan struct{}  // closed when the last query has an answer or is lost
	flights sync.WaitGroup // queries without an end

	mu         sync.Mutex
	total, cut *tally
	ended      time.Time // of sending; zero while the load sends
}

// Start starts a load that runs until Stop.
func Start(config Config) (*Load, error) {
	if !config.Server.IsValid() || config.Rate <= 0 || config.Expect == nil || len(config.Expect.Questions) == 0 {
		return nil, errors.New("starting a load: it needs a server, a rate and questions")
	}
	if config.Enter == nil {
		config.Enter = func(f func()) { f() }
	}
	now := time.Now()
	l := &Load{
		config: config, done: make(chan struct{}), total: newTally(now, now), cut: newTally(now, now),
	}
	var sending context.Context
	sending, l.stop = context.WithCancel(context.Background())
	sockets, err := l.openKept()
	if err != nil {
		l.stop()
		return nil, err
	}
	random := rand.New(rand.NewPCG(0, 0)) //nolint:gosec // a test's choice
	go func() {
		defer close(l.done)
		config.Enter(func() { l.send(sending, random, sockets) })
		l.mu.Lock()
		l.ended = time.Now()
		l.mu.Unlock()
		l.flights.Wait()
		for _, s := range sockets {
			_ = s.conn.Close() // no query is in flight
		}
	}()
	return l, nil
}

// Report returns the report of all queries so far, except queries in flight.
func (l *Load) Report() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reportLocked(l.total)
}

// Cut returns the report since the previous Cut, or since the start. A query belongs to the report of the time when it
// ended.
func (l *Load) Cut() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.reportLocked(l.cut)
	l.cut = newTally(r.Ended, l.cut.lastRight) // a gap may be open
	return r
}

func (l *Load) reportLocked(t *tally) Report {
	r := t.Report
	r.Ended = l.ended
	if r.Ended.IsZero() {
		r.Ended = time.Now()
	}
	r.LongestGap = max(r.LongestGap, r.Ended.Sub(t.lastRight)) // the gap at the end
	r.Counts, r.Examples = maps.Clone(r.Counts), slices.Clone(r.Examples)
	return r
}

// Stop stops sending, waits until the last query has an answer or is lost, and returns the report of the whole load.
// Later calls return the same.
func (l *Load) Stop() Report {
	l.stop()
	<-l.done
	return l.Report()
}

// both calls f for the counts of the whole load and for the current ones.
func (l *Load) both(f func(t *tally)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(l.total)
	f(l.cut)
}

// note notes the end of a query.
func (l *Load) note(q *query, kind Kind, detail string, at time.Time) {
	defer l.flights.Done()
	l.both(func(t *tally) {
		t.Queries++
		t.Counts[kind]++
		if kind == Right {
			t.right(at)
		} else if len(t.Examples) < mostExamples {
			t.Examples = append(t.Examples, fmt.Sprintf("%s: %s +%v %s %s %s", kind, q.sent.Format("15:04:05.000"), at.Sub(q.sent), q.transport, q.name, detail))
		}
	})
}
