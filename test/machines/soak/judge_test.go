package soak

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/test/machines/load"
)

// A timeline is what the test has done, and the bad answers that it may have caused. Its
// methods are safe for concurrent use.
type timeline struct {
	mu      sync.Mutex
	notes   []note
	outages []outage
	absent  []span      // without an agent that repairs rules: from its end until it runs again
	repairs []time.Time // when the agent had installed or repaired rules
	bad     []badQuery
	missed  int // bad queries beyond the limit
}

type note struct {
	at   time.Time
	text string
}

// An outage is a cause of bad answers.
type outage struct {
	what        string
	from, until time.Time
	// covers reports whether the outage can be the cause of a query's end. The query was in
	// flight at some time of the outage.
	covers func(kind load.Kind, q load.Example) bool
}

// A badQuery is a query without a right answer.
type badQuery struct {
	load.Example
	kind load.Kind
}

// maxBad bounds the memory for bad queries.
const maxBad = 500_000

func (l *timeline) note(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.notes = append(l.notes, note{time.Now(), text})
}

// withoutAgent notes a time in which no agent repairs rules.
func (l *timeline) withoutAgent(from, until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.absent = append(l.absent, span{from, until})
}

// captured returns when queries are captured again after a flush. It is due at a time, later
// if there was no agent, or if a busy machine delayed the repair, which judge reports.
func (l *timeline) captured(flushed, due time.Time) time.Time {
	for _, s := range l.absent { // ordered by time
		if s.from.Before(due) && s.until.Add(repairTime).After(due) {
			due = s.until.Add(repairTime)
		}
	}
	if repaired := l.repaired(flushed); repaired.Add(repairTime).After(due) && repaired.Sub(flushed) < slowestRepair {
		return repaired.Add(repairTime)
	}
	return due
}

// slowestRepair is the longest time for a repair. Later ones are those of another flush.
const slowestRepair = 30 * time.Second

// repaired returns when the rules were repaired after a flush; zero if they were not.
func (l *timeline) repaired(flushed time.Time) time.Time {
	at, _ := slices.BinarySearchFunc(l.repairs, flushed, time.Time.Compare)
	if at == len(l.repairs) {
		return time.Time{}
	}
	return l.repairs[at]
}

// readRepairs reads the times of repairs from the agent's log. It returns the longest time from a
// flush to its repair, and the longest while an agent ran and the machine was not busy.
func (l *timeline) readRepairs(log string) (longest, undelayed time.Duration) {
	for line := range strings.Lines(log) {
		if !strings.Contains(line, "had drifted and were repaired") && !strings.Contains(line, `"DNS is captured"`) {
			continue
		}
		text, _, _ := strings.Cut(strings.TrimPrefix(line, "time="), " ")
		if at, err := time.Parse(time.RFC3339, text); err == nil {
			l.repairs = append(l.repairs, at)
		}
	}
	for _, o := range l.outages {
		repaired := l.repaired(o.from)
		if took := repaired.Sub(o.from); o.what == rulesFlushed && took < slowestRepair {
			longest = max(longest, took)
			if !l.delayed(o.from, repaired) {
				undelayed = max(undelayed, took)
			}
		}
	}
	return longest, undelayed
}

// delayed reports whether the machine was busy, or there was no agent, at some time between two.
func (l *timeline) delayed(from, until time.Time) bool {
	overlaps := func(s span) bool { return s.from.Before(until) && s.until.After(from) }
	return slices.ContainsFunc(l.absent, overlaps) || slices.ContainsFunc(l.outages, func(o outage) bool {
		return o.what == machineBusy && overlaps(span{o.from, o.until})
	})
}

func (l *timeline) add(o outage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.outages = append(l.outages, o)
}

// onBad notes a query without a right answer.
func (l *timeline) onBad(kind load.Kind, q load.Example) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.bad) == maxBad {
		l.missed++
		return
	}
	l.bad = append(l.bad, badQuery{q, kind})
}

// forwarded reports whether a query was for a name that is not in the table.
func forwarded(q load.Example) bool { return strings.HasSuffix(q.Name, ".example.") }

// forwardedFails covers forwarded queries while no nameserver answers.
func forwardedFails(kind load.Kind, q load.Example) bool { return kind == load.Failed && forwarded(q) }

// escaped covers queries that reach nameservers, which may be dead, or that were in flight
// when rules were flushed.
func escaped(kind load.Kind, _ load.Example) bool {
	// Without the zone, a query from a port that the agent uses may not be sent.
	return slices.Contains([]load.Kind{load.Foreign, load.Failed, load.Unreachable, load.Lost, load.Unsent}, kind)
}

// inFlight returns a function that covers queries that the agent had read when it was killed.
// It answers mesh names at once, but on a busy machine it may not get the processor.
func inFlight(killed time.Time, mesh bool) func(kind load.Kind, q load.Example) bool {
	return func(kind load.Kind, q load.Example) bool {
		recent := forwarded(q) != mesh && (!mesh || q.Sent.After(killed.Add(-2*time.Second)))
		return recent && q.Sent.Before(killed) && (kind == load.Lost || kind == load.Unreachable)
	}
}

// stopped covers forwarded queries while the agent is stopped: it answers them up to 4 s later,
// when their clients may have given up.
func stopped(kind load.Kind, q load.Example) bool {
	return forwarded(q) && (kind == load.Lost || kind == load.Failed)
}

// pastAgent covers queries for mesh names that reach nameservers.
func pastAgent(kind load.Kind, q load.Example) bool { return !forwarded(q) && kind == load.Foreign }

// cause returns the outage that explains a bad query; empty if there is none. The causes that
// always apply, or to all names, come last.
func (l *timeline) cause(q badQuery) string {
	end, cause := q.Sent.Add(q.Took), ""
	for _, o := range l.outages {
		until := o.until
		if o.what == rulesFlushed {
			until = l.captured(o.from, until)
		}
		if q.Sent.Before(until) && end.After(o.from) && o.covers(q.kind, q.Example) {
			switch {
			case o.what != rulesFlushed && o.what != machineBusy:
				return o.what
			case cause != rulesFlushed:
				cause = o.what
			}
		}
	}
	return cause
}

// judge returns the numbers of bad queries by cause and kind, how many of these are due to a busy
// machine, and the queries without a cause.
func (l *timeline) judge() (explained map[string]int, busy int, unexplained []badQuery) {
	l.mu.Lock()
	defer l.mu.Unlock()
	explained = map[string]int{}
	for _, q := range l.bad {
		if cause := l.cause(q); cause != "" {
			explained[fmt.Sprintf("%s: %s over %s", cause, q.kind, q.Transport)]++
			if cause == machineBusy {
				busy++
			}
			continue
		}
		unexplained = append(unexplained, q)
	}
	return explained, busy, unexplained
}

// around returns what the test did shortly before and after a time.
func (l *timeline) around(at time.Time) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	for _, n := range l.notes {
		if d := n.at.Sub(at); -10*time.Second < d && d < 6*time.Second {
			fmt.Fprintf(&b, "\n\t\t%+.3fs %s", d.Seconds(), n.text)
		}
	}
	return b.String()
}

// write writes everything that the test did, and all bad queries.
func (l *timeline) write(w io.Writer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range l.notes {
		_, _ = fmt.Fprintln(w, n.at.Format(timeFormat), n.text)
	}
	for _, q := range l.bad {
		_, _ = fmt.Fprintln(w, "bad:", q.kind, q.Example, "cause:", l.cause(q))
	}
}
