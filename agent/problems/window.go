package problems

import (
	"cmp"
	"slices"
	"sort"
	"sync"
	"time"
)

// Lasting is how long readings must show a problem before it is raised, and how long a raised problem must be absent
// from all readings before it is cleared.
const Lasting = 15 * time.Second

// A Window distinguishes lasting problems from passing problems. The zero value is ready. Its methods are safe for
// concurrent use.
type Window struct {
	mu     sync.Mutex
	known  map[subject]*sighting
	unread map[Code]string
}

// A subject identifies a problem from reading to reading.
type subject struct {
	code    Code
	subject string
}

// A sighting is a problem that at least one reading has shown.
type sighting struct {
	problem Problem   // as the last reading with the problem has shown it
	last    time.Time // the time of that reading
	raised  bool
}

// Add adds the problems that a reading has found. now is the time of the reading. unread has the reasons why checks
// were not made.
func (w *Window) Add(now time.Time, found []Problem, unread map[Code]string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unread = unread
	if w.known == nil {
		w.known = make(map[subject]*sighting)
	}
	for _, p := range w.unexplainedLocked(found) {
		key := subject{p.Code, p.Subject}
		known := w.known[key]
		if known == nil {
			known = &sighting{problem: Problem{Since: now}}
			w.known[key] = known
		}
		p.Since = known.problem.Since
		known.problem, known.last = p, now
		known.raised = known.raised || now.Sub(p.Since) >= Lasting
	}
	for key, known := range w.known {
		gone := now.Sub(known.last)
		if gone > 0 && !known.raised || gone >= Lasting {
			delete(w.known, key)
		}
	}
}

// unexplainedLocked returns the problems in found that neither another problem in found nor a raised problem explains.
func (w *Window) unexplainedLocked(found []Problem) []Problem {
	there := map[Code]bool{}
	for _, p := range found {
		there[p.Code] = true
	}
	for key, known := range w.known {
		if known.raised {
			there[key.code] = true
		}
	}
	explained := map[Code]bool{}
	for _, c := range checks() {
		explained[c.code] = slices.ContainsFunc(c.grounds, func(ground Code) bool { return there[ground] })
	}
	return slices.DeleteFunc(slices.Clone(found), func(p Problem) bool { return explained[p.Code] })
}

// Report returns a report with the raised problems as Problems, and the known problems that are not raised as
// Suspected.
func (w *Window) Report() Report {
	w.mu.Lock()
	defer w.mu.Unlock()
	var raised, suspected []Problem
	for _, known := range w.known {
		if known.raised {
			raised = append(raised, known.problem)
		} else {
			suspected = append(suspected, known.problem)
		}
	}
	for _, list := range [][]Problem{raised, suspected} {
		sort.Slice(list, func(i, j int) bool {
			return cmp.Or(list[i].Since.Compare(list[j].Since), cmp.Compare(list[i].Subject, list[j].Subject)) < 0
		})
	}
	own := slices.DeleteFunc(checks(), func(c check) bool { return c.host })
	return judge(own, raised, suspected, w.unread)
}
