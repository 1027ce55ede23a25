package condition

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

const (
	// Lasting is how long readings must show a problem before it is raised, and how long a raised problem must be
	// absent from all readings before it is cleared.
	Lasting = 15 * time.Second
	// recent is how old the last reading may be. What was read before that says nothing about the present.
	recent = Lasting
)

// A Window distinguishes lasting problems from passing problems. The zero value is ready. Its methods are safe for
// concurrent use.
type Window struct {
	mu    sync.Mutex
	known map[subject]*sighting
	read  []Condition // the last reading
	at    time.Time   // its time
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

// Add adds a reading: the conditions of all parts.
func (w *Window) Add(now time.Time, read []Condition) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.known == nil {
		w.known = make(map[subject]*sighting)
	}
	w.read, w.at = read, now
	explained := w.explainedLocked()
	for _, c := range read {
		if explained(c) {
			continue
		}
		for _, p := range c.Problems {
			key := subject{c.Code, p.Subject}
			known := w.known[key]
			if known == nil {
				known = &sighting{problem: Problem{Since: now}}
				w.known[key] = known
			}
			p.Code, p.Since = c.Code, known.problem.Since
			known.problem, known.last = p, now
			known.raised = known.raised || p.Certain || now.Sub(p.Since) >= Lasting
		}
	}
	for key, known := range w.known {
		gone := now.Sub(known.last)
		if gone > 0 && !known.raised || gone >= Lasting {
			delete(w.known, key)
		}
	}
}

// explainedLocked returns a function that reports whether a problem that the last reading has shown, or a raised one,
// explains what a check finds.
func (w *Window) explainedLocked() func(Condition) bool {
	there := map[Code]bool{}
	for _, c := range w.read {
		there[c.Code] = len(c.Problems) > 0
	}
	for key, known := range w.known {
		there[key.code] = there[key.code] || known.raised
	}
	return func(c Condition) bool {
		return slices.ContainsFunc(c.Causes, func(code Code) bool { return there[code] })
	}
}

// Conditions returns the conditions of the last reading, with the raised problems as Problems, and the known problems
// that are not raised as Suspected. If there was no reading lately, nothing else is known.
func (w *Window) Conditions(now time.Time) []Condition {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := slices.Clone(w.read)
	for i := range all {
		c := &all[i]
		c.Problems, c.Suspected = nil, nil
		for key, known := range w.known {
			switch {
			case key.code != c.Code:
			case known.raised:
				c.Problems = append(c.Problems, known.problem)
			default:
				c.Suspected = append(c.Suspected, known.problem)
			}
		}
		for _, list := range [][]Problem{c.Problems, c.Suspected} {
			slices.SortFunc(list, func(a, b Problem) int {
				return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Subject, b.Subject))
			})
		}
		if now.Sub(w.at) > recent {
			c.Unknown = "the agent has not looked since " + w.at.Format(time.TimeOnly)
		}
	}
	return all
}
