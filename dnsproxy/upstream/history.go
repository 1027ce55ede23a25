package upstream

import (
	"sync"
	"time"
)

// The numbers of the rules in the package comment.
const (
	minLate     = 50 * time.Millisecond
	maxLate     = 400 * time.Millisecond
	unknownLate = 200 * time.Millisecond
	// maxSample bounds the times that are measured. A name may be slow, for seconds at times,
	// because of its own nameservers, which says little about the server that was asked.
	maxSample = time.Second

	// A reply counts for one eighth (RFC 6298), the first ones equally, and one after a pause
	// for one half: old replies say little about a server that is asked twice a minute, and its
	// first one must not count against it for long.
	rttGain   = 8
	pauseGain = 2
	rttPause  = 15 * time.Second

	// livenessPause is the least time between two rounds of probes; after
	// downUnanswered rounds without a reply it doubles, up to maxLivenessPause.
	livenessPause    = 250 * time.Millisecond
	maxLivenessPause = 2 * time.Second

	// truncatedWait is how long the whole of a truncated reply is waited for, over TCP or from
	// another server.
	truncatedWait = time.Second

	downUnanswered = 3
	downSilence    = time.Second
	failingCount   = 3
	maxDownWait    = 2 * time.Second

	fewReplies    = 4
	refreshCopy   = 30 * time.Second
	minCopy       = time.Second
	maxCopy       = 30 * time.Second
	rememberQuirk = 10 * time.Minute
	ednsLost      = 3 // probes in a row without an OPT record that were answered, and those with one not
)

// A State tells whether a server can be used.
type State int

// The states of a server, best first (rule 2).
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

// A history is what is known about a server. It is a plain value without a clock; the server
// guards it with its mutex.
type history struct {
	srtt, rttvar time.Duration // srtt is zero before the first reply
	replies      int           // so far, up to rttGain
	heard        time.Time     // last reply, to a query or a probe

	asked  time.Time // last query
	copies int       // sent since it became silent, failing or down

	// Whether the server lives (rule 2). A reply of any kind resets all of these.
	waiting     time.Time // first query after the last reply; zero if there is none
	probed      time.Time // last round of probes
	silentSince time.Time // first round after the last reply; zero if there is none
	unanswered  int       // rounds since then

	// Whether it has answers where others have (rule 2).
	failedAlone int       // failures in a row where another server had an answer
	lateAlone   int       // queries left unanswered that another server answered
	pending     time.Time // first query after the last reply to a query

	looping bool

	plainUntil  time.Time // until then it is asked without EDNS
	ednsHeard   time.Time // last reply to a query or probe with an OPT record
	plainOnly   int       // replies since then to probes that were sent with and without one
	foldedUntil time.Time // until then it is asked without mixed case
}

// A standing is what follows from a history at a time.
type standing struct {
	state  State
	silent bool          // probes have been unanswered for longer than patience
	full   bool          // it is silent and owes many replies (rule 8)
	mute   bool          // it is failing because it leaves queries unanswered
	rtt    time.Duration // to rank by
	late   time.Duration // when it is late
}

// lateAfter returns how long after a query the server is late (rule 1).
func (h *history) lateAfter() time.Duration {
	if h.srtt == 0 {
		return unknownLate
	}
	return min(max(h.srtt+4*h.rttvar, minLate), maxLate)
}

// patience returns how long probes may be unanswered before the server is silent (rule 2): as
// in rule 1, but up to a second for a server that is known to be slow.
func (h *history) patience() time.Duration {
	if h.srtt == 0 {
		return maxLate
	}
	return min(max(h.srtt+4*h.rttvar, minLate), maxSample)
}

// silence returns how long probes have been unanswered.
func (h *history) silence(now time.Time) time.Duration {
	if h.silentSince.IsZero() {
		return 0
	}
	return now.Sub(h.silentSince)
}

// standing returns the standing of the server (rule 2).
func (h *history) standing(now time.Time) standing {
	st := standing{rtt: h.srtt, late: h.lateAfter()}
	silence := h.silence(now)
	if h.srtt == 0 {
		st.rtt = unknownLate
	}
	if silence > h.patience() {
		st.silent, st.rtt = true, max(st.rtt, silence)
	}
	switch {
	case h.looping:
		st.state = Looping
	case h.unanswered >= downUnanswered && silence >= downSilence:
		st.state = Down
	case h.lateAlone >= failingCount && now.Sub(h.pending) >= downSilence:
		st.state, st.mute = Failing, true
	case h.failedAlone >= failingCount:
		st.state = Failing
	}
	return st
}

// sent notes a query.
func (h *history) sent(now time.Time) {
	h.asked = now
	if h.waiting.IsZero() {
		h.waiting = now
	}
	if h.pending.IsZero() {
		h.pending = now
	}
}

// livenessDue reports whether the server is to be probed, and notes the round of probes: it has
// left a query unanswered for longer than rule 1 allows, and sent nothing since (rule 2).
func (h *history) livenessDue(now time.Time) bool {
	if h.looping || h.waiting.IsZero() || now.Sub(h.waiting) < h.lateAfter() {
		return false
	}
	pause := min(livenessPause<<min(max(h.unanswered-downUnanswered, 0), 8), maxLivenessPause)
	if !h.probed.IsZero() && now.Sub(h.probed) < pause {
		return false
	}
	h.probed = now
	h.refused(now)
	return true
}

// refused notes a sign that the server does not serve, such as a refused connection, or a
// round of probes, which is unanswered so far.
func (h *history) refused(now time.Time) {
	h.unanswered++
	if h.silentSince.IsZero() {
		h.silentSince = now
	}
}

// copyDue reports whether a server that is not the best is to get a copy of a query, and
// notes the copy (rule 6).
func (h *history) copyDue(now time.Time) bool {
	st := h.standing(now)
	troubled := st.state != Up || st.silent
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

// replied notes a reply of any kind to a query or a probe, which took rtt. The time of a
// failure that took long is not measured: the server has waited for others.
func (h *history) replied(now time.Time, rtt time.Duration, usable bool) {
	if usable || h.srtt == 0 || rtt <= h.lateAfter() {
		h.measure(now, rtt)
	}
	h.replies = min(h.replies+1, rttGain)
	h.heard = now
	h.waiting, h.silentSince, h.unanswered = time.Time{}, time.Time{}, 0
	if h.failedAlone < failingCount && h.lateAlone < failingCount {
		h.copies = 0
	}
}

// heardEDNS notes a reply to a query or a probe with an OPT record.
func (h *history) heardEDNS(now time.Time) { h.ednsHeard, h.plainOnly = now, 0 }

// heardPlain notes a reply to a probe that was sent with an OPT record, too. If the one with
// it is lost time and again, so are queries with one.
func (h *history) heardPlain(now time.Time) {
	if h.plainOnly++; h.plainOnly >= ednsLost {
		h.plainOnly, h.plainUntil = 0, now.Add(rememberQuirk)
	}
}

// measure adds a reply's time to the smoothed ones (RFC 6298, rule 1).
func (h *history) measure(now time.Time, rtt time.Duration) {
	rtt = min(max(rtt, 1), maxSample)
	if h.srtt == 0 {
		h.srtt, h.rttvar = rtt, rtt/2
		return
	}
	gain := time.Duration(min(h.replies+1, rttGain))
	if now.Sub(h.heard) > rttPause {
		gain = pauseGain
	}
	deviation := (h.srtt - rtt).Abs()
	if deviation > h.rttvar {
		h.rttvar += (deviation - h.rttvar) / 4
	} else {
		h.rttvar -= (h.rttvar - deviation) / 64
	}
	h.srtt += (rtt - h.srtt) / gain
}

// served notes a reply to a query: the server replies to clients' questions, and not only
// to probes.
func (h *history) served() { h.lateAlone, h.pending = 0, time.Time{} }

// answered notes that the reply was usable.
func (h *history) answered() { h.failedAlone, h.copies = 0, 0 }

// noteFailedAlone notes that the server failed where another had an answer.
func (h *history) noteFailedAlone() { h.failedAlone++ }

// noteLateAlone notes that the server was late for a query that another has answered.
func (h *history) noteLateAlone() { h.lateAlone++ }

// The numbers of rule 10.
const (
	budgetMax    = 256
	budgetReply  = 2   // earned by a usable reply
	budgetSecond = 100 // earned in a second
)

// A budget bounds how often the queries of a group are sent again because a server is late
// (rule 10). The zero budget is full. It is safe for concurrent use.
type budget struct {
	mu     sync.Mutex
	spent  float64
	filled time.Time // when spent was last reduced for the time
}

// take spends one, and reports whether there was one left.
func (b *budget) take(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spent = max(0, b.spent-now.Sub(b.filled).Seconds()*budgetSecond)
	b.filled = now
	if b.spent+1 > budgetMax {
		return false
	}
	b.spent++
	return true
}

// earn adds what a usable reply earns.
func (b *budget) earn() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spent = max(0, b.spent-budgetReply)
}

// mayRepeat reports whether the query may be sent again, to a server with this standing,
// because a server is late (rule 10). The first repetition is free unless that server is
// silent too.
func (s *schedule) mayRepeat(st *standing, now time.Time) bool {
	return !s.repeated && st.state < Down && !st.silent || s.budget.take(now)
}
