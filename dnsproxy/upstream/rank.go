package upstream

import "time"

// next returns the index of the server to ask next: the best (rule 3) of those that were
// asked least, or -1 if none may be asked again. While a reply is held (rule 12) only
// servers that outrank its server are asked.
func (s *schedule) next() int {
	best, least := -1, 0
	for i := range s.tries {
		t := &s.tries[i]
		if t.done || s.held >= 0 && i > s.held {
			continue
		}
		if best < 0 || t.asked < least || t.asked == least && t.standing.better(s.tries[best].standing, s.options.byTime()) {
			best, least = i, t.asked
		}
	}
	if best < 0 || !s.options.byTime() || !s.tries[best].standing.serves() {
		return best
	}
	return s.amongEqual(best, least)
}

// amongEqual returns the server to ask of those about as fast as the best: the first in
// the order of configuration, or with Options.Rotate one at random (rule 3).
func (s *schedule) amongEqual(best, asked int) int {
	limit, equal := s.tries[best].standing.rtt*3/2+5*time.Millisecond, uint64(0)
	for i := range s.tries {
		t := &s.tries[i]
		if t.done || t.asked != asked || !t.standing.serves() || t.standing.rtt > limit {
			continue
		}
		if !s.options.Rotate {
			return i
		}
		equal++
		if s.random%equal == 0 {
			best = i
		}
		s.random /= equal
	}
	return best
}

// byTime reports whether servers are ranked by time, and in the order of configuration
// only among those about equally fast (rule 3).
func (o Options) byTime() bool { return o.Fastest || o.Rotate }

// serves reports whether the server is up and, as far as is known, answers.
func (s standing) serves() bool { return s.state == Up && !s.silent }

// better reports whether s ranks before other by rule 3, except for the order of
// configuration.
func (s standing) better(other standing, byTime bool) bool {
	switch {
	case s.state != other.state:
		return s.state < other.state
	case byTime || s.silent && other.silent:
		return s.rtt < other.rtt
	}
	return !s.silent && other.silent
}
