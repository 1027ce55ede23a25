package upstream

import "time"

// The numbers of the rules in the package comment.
const (
	minLate     = 50 * time.Millisecond
	maxLate     = 400 * time.Millisecond
	unknownLate = 200 * time.Millisecond
	// A name that its own nameservers make slow, seconds at times, says little about
	// the server that was asked for it.
	maxSample = time.Second

	// A reply counts one eighth (RFC 6298), the first ones in equal parts, and one
	// half after a pause: of a server that is asked twice a minute, old replies say
	// little, and the first must not be held against it for long.
	rttGain   = 8
	pauseGain = 2
	rttPause  = 15 * time.Second

	downUnanswered = 3
	downSilence    = time.Second
	failingCount   = 3
	maxDownWait    = 2 * time.Second

	fewReplies    = 4
	refreshCopy   = 30 * time.Second
	minCopy       = time.Second
	maxCopy       = 30 * time.Second
	rememberQuirk = 10 * time.Minute
)

// A State is what a server can be used for.
type State int

// The states of a server, in the order in which servers are preferred.
const (
	Up State = iota
	Failing
	Down
	Looping
)

// String returns the state's name in lower case.
func (s State) String() string {
	return [...]string{"up", "failing", "down", "looping"}[s]
}

// A history is what is known of a server. It is a plain value; who shares it locks.
type history struct {
	srtt, rttvar time.Duration // srtt is zero before the first reply
	replies      int           // so far, up to rttGain
	heard        time.Time     // last reply

	asked       time.Time // last
	silentSince time.Time // first query after the last reply; zero if there is none
	unanswered  int       // queries since then
	failures    int       // in a row, where another server had an answer
	copies      int       // sent since it became late, failing or down

	looping bool

	plainUntil  time.Time // no EDNS
	foldedUntil time.Time // no mixed case
}

// A standing is what a history amounts to at a moment.
type standing struct {
	state State
	rtt   time.Duration // to rank by
	late  time.Duration // when it is late
}

// lateAfter is rule 1.
func (h *history) lateAfter() time.Duration {
	if h.srtt == 0 {
		return unknownLate
	}
	return min(max(h.srtt+4*h.rttvar, minLate), maxLate)
}

// silence is how long the server has left a query unanswered.
func (h *history) silence(now time.Time) time.Duration {
	if h.silentSince.IsZero() {
		return 0
	}
	return now.Sub(h.silentSince)
}

// standing is rules 2 and 3.
func (h *history) standing(now time.Time) standing {
	st := standing{rtt: h.srtt, late: h.lateAfter()}
	silence := h.silence(now)
	if h.srtt == 0 {
		st.rtt = unknownLate
	}
	if silence > st.late {
		st.rtt = max(st.rtt, silence)
	}
	switch {
	case h.looping:
		st.state = Looping
	case h.unanswered >= downUnanswered && silence >= downSilence:
		st.state = Down
	case h.failures >= failingCount:
		st.state = Failing
	}
	return st
}

// sent notes a query.
func (h *history) sent(now time.Time) {
	h.asked = now
	h.unanswered++
	if h.silentSince.IsZero() {
		h.silentSince = now
	}
}

// copyDue is rule 6 for a server that is not the best; if it is true the copy is
// noted, but not as sent.
func (h *history) copyDue(now time.Time) bool {
	st := h.standing(now)
	troubled := st.state != Up || h.silence(now) > st.late
	wait := refreshCopy
	switch {
	case troubled:
		wait = min(minCopy<<min(h.copies, 8), maxCopy)
	case h.replies < fewReplies:
		wait = minCopy
	}
	if !h.asked.IsZero() && now.Sub(h.asked) < wait {
		return false
	}
	h.asked = now
	if troubled {
		h.copies++
	}
	return true
}

// replied notes a reply of any kind, which took rtt.
func (h *history) replied(now time.Time, rtt time.Duration) {
	rtt = min(max(rtt, 1), maxSample)
	h.replies = min(h.replies+1, rttGain)
	gain := time.Duration(h.replies)
	if h.replies > 1 && now.Sub(h.heard) > rttPause {
		gain = pauseGain
	}
	h.heard = now
	if h.srtt == 0 {
		h.srtt, h.rttvar = rtt, rtt/2
	} else {
		deviation := (h.srtt - rtt).Abs()
		if deviation > h.rttvar {
			h.rttvar += (deviation - h.rttvar) / 4
		} else {
			h.rttvar -= (h.rttvar - deviation) / 64
		}
		h.srtt += (rtt - h.srtt) / gain
	}
	h.silentSince, h.unanswered = time.Time{}, 0
	if h.failures < failingCount {
		h.copies = 0
	}
}

// answered notes that the reply was usable.
func (h *history) answered() { h.failures, h.copies = 0, 0 }

// outdone notes that the server failed where another had an answer.
func (h *history) outdone() { h.failures++ }
