package upstream

import "time"

// The numbers of the rules in the package comment.
const (
	minLate     = 50 * time.Millisecond
	maxLate     = 400 * time.Millisecond
	maxWait     = 2 * time.Second
	unknownLate = 200 * time.Millisecond
	// maxSample bounds the times that are measured. A name may be slow, for seconds at times, because of its own
	// nameservers. That says little about the server that was asked.
	maxSample = time.Second

	// The first eight replies count equally in the average. A later reply counts for one eighth (RFC 6298). A reply
	// after a pause of rttPause counts for one half. The replies before the pause say little about the server now, and
	// a slow first reply should soon be forgotten.
	rttGain   = 8
	pauseGain = 2
	rttPause  = 15 * time.Second

	// probePause is the least time between two probes, and downPause that after downUnanswered probes without a reply.
	probePause  = 250 * time.Millisecond
	downPause   = time.Second
	refreshTime = 30 * time.Second // with Options.Fastest

	// truncatedWait is how long a query waits for the whole reply after a truncated one, over
	// TCP or from another server.
	truncatedWait = time.Second

	downUnanswered = 3
	downSilence    = time.Second
)

// A State tells whether a server can be used.
type State int

// The states of a server, best first (rule 2).
const (
	Up State = iota
	Down
	Looping
)

// String returns the state's name in lower case.
func (s State) String() string {
	return [...]string{"up", "down", "looping"}[s]
}

// A history records how a server has behaved so far. It is a plain value without a clock;
// the server guards it with its mutex.
type history struct {
	srtt, rttvar time.Duration // srtt is zero before the first reply
	replies      int           // how many replies have come, up to rttGain
	heard        time.Time     // when the last reply came, to a query or a probe
	probed       time.Time     // when the last probe was sent

	// These fields describe what has happened since the last reply (rule 2).
	waiting     time.Time // when the first query was sent; zero if none was
	probes      int
	refusals    int       // how often a connection was refused
	silentSince time.Time // when the first of these probes and refused connections began; zero if there is none

	looping string // why its queries come back; empty if they do not
}

// A standing is a judgement of a server at one moment, derived from its history. Questions use it to choose a server.
type standing struct {
	state     State
	rtt       time.Duration // SRTT; a guess before the first reply
	lateAfter time.Duration // how long after a query the server is late
	usual     time.Duration // lateAfter without its upper bound
}

// lateAfter returns how long after a query the server is late (rule 1).
func (h *history) lateAfter() time.Duration { return min(h.usual(), maxLate) }

func (h *history) usual() time.Duration {
	if h.srtt == 0 {
		return unknownLate
	}
	return max(h.srtt+4*h.rttvar, minLate)
}

// silence returns the time since silentSince. It is zero if no probe is unanswered and no connection was refused.
func (h *history) silence(now time.Time) time.Duration {
	if h.silentSince.IsZero() {
		return 0
	}
	return now.Sub(h.silentSince)
}

// standing returns the standing of the server (rule 2).
func (h *history) standing(now time.Time) standing {
	st := standing{rtt: h.srtt, lateAfter: h.lateAfter(), usual: h.usual()}
	if h.srtt == 0 {
		st.rtt = unknownLate
	}
	silence := h.silence(now)
	switch {
	case h.looping != "":
		st.state = Looping
	case h.probes+h.refusals >= downUnanswered && silence >= downSilence:
		st.state = Down
	}
	return st
}

// sent notes a query.
func (h *history) sent(now time.Time) {
	if h.waiting.IsZero() {
		h.waiting = now
	}
}

// owes reports whether the server has left a query unanswered and has sent nothing since.
func (h *history) owes() bool { return !h.waiting.IsZero() && h.looping == "" }

// probeDue reports whether a probe is to be sent to the server, and notes the probe. A probe is due if the server has
// owed replies for longer than rule 1 allows, or if the time of its replies is to be measured (rule 2).
func (h *history) probeDue(now time.Time, fastest bool) bool {
	overdue := h.owes() && now.Sub(h.waiting) >= h.lateAfter()
	unmeasured := fastest && h.looping == "" && (h.heard.IsZero() || now.Sub(h.heard) >= refreshTime)
	pause := probePause
	if h.probes >= downUnanswered {
		pause = downPause
	}
	if !overdue && !unmeasured || !h.probed.IsZero() && now.Sub(h.probed) < pause {
		return false
	}
	h.probed = now
	h.probes++
	h.unanswered(now)
	return true
}

// refused records that the server refused a connection. requested is when the connection was requested.
func (h *history) refused(requested time.Time) {
	h.refusals++
	h.unanswered(requested)
}

// unanswered records the start of a probe that was sent, or of a connection that was refused.
func (h *history) unanswered(start time.Time) {
	if h.silentSince.IsZero() {
		h.silentSince = start
	}
}

// replied notes a reply of any kind to a query or a probe. The reply took rtt. The time of a failure that took long is
// not measured, because the server has probably waited for other servers.
func (h *history) replied(now time.Time, rtt time.Duration, r reading) {
	if r.usable() || h.srtt == 0 || rtt <= h.lateAfter() {
		h.measure(now, rtt)
	}
	h.replies = min(h.replies+1, rttGain)
	h.heard = now
	h.waiting, h.silentSince, h.probes, h.refusals = time.Time{}, time.Time{}, 0, 0
}

// measure adds a reply's time to srtt and rttvar (RFC 6298, rule 1).
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
