package upstream

import (
	"sync"
	"time"
)

// An Attempt is what was sent to one server for a traced query, and what came of it.
type Attempt struct {
	Server string `json:"server"`
	// Protocol is udp, tcp or tls. It is empty for a server that was not asked.
	Protocol string `json:"protocol,omitempty"`
	// Sent is how long after the first attempt, in seconds; Took is how long the result took.
	Sent float64 `json:"sentSeconds"`
	Took float64 `json:"tookSeconds,omitempty"`
	// Result is a response code, the error, or why the server was not asked. It is empty if the answer was there
	// before the result.
	Result string `json:"result,omitempty"`
	// Usual is how long replies of the server usually take, 0 if that is unknown. Patience is how long the query
	// waits for this result before it asks the next server.
	Usual    float64 `json:"usualSeconds,omitempty"`
	Patience float64 `json:"patienceSeconds,omitempty"`
	// Repeated is true if the query was sent because another server was late.
	Repeated bool `json:"repeated,omitempty"`
	Plain    bool `json:"plain,omitempty"` // without an OPT record
	Used     bool `json:"used,omitempty"`  // Result is the answer
}

// A trace notes what an exchange does. A nil trace notes nothing.
type trace struct {
	repeated bool // the next attempt is a repetition

	mu       sync.Mutex
	attempts []traced
}

// traced is an attempt of a trace: the one in which the schedule has asked a server for the n-th time.
type traced struct {
	Attempt
	at         time.Time
	try, asked int
}

// repeats notes that the next attempt is a repetition.
func (t *trace) repeats() {
	if t != nil {
		t.repeated = true
	}
}

// sent notes that an exchange sends its query to a server.
func (t *trace) sent(e *exchange, a *attempt) {
	if t == nil {
		return
	}
	s := &e.schedule
	made := traced{at: a.sent, try: a.try, asked: a.asked, Attempt: Attempt{
		Server: a.server.name, Protocol: a.protocol(), Plain: a.plain, Repeated: t.repeated,
		Usual: seconds(a.server.rtt()), Patience: seconds(max(0, earlier(s.late, s.deadline).Sub(a.sent))),
	}}
	t.repeated = false
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.attempts) > 0 {
		made.Sent = seconds(a.sent.Sub(t.attempts[0].at))
	}
	t.attempts = append(t.attempts, made)
}

// ended notes the outcome of an attempt.
func (t *trace) ended(o *outcome, now time.Time) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.attempts {
		if a := &t.attempts[i]; a.try == o.try && a.asked == o.asked {
			a.Result, a.Took = o.text(), seconds(now.Sub(a.at))
		}
	}
}

// text says what the outcome is.
func (o *outcome) text() string {
	switch {
	case o.err != nil:
		return cause(o.err).Error()
	case o.reading.err != nil:
		return ErrMalformed.Error() + ": " + o.reading.err.Error()
	}
	text := RcodeName(o.reading.code)
	if o.reading.truncated {
		text += ", truncated"
	}
	return text
}

// soFar returns the attempts until now. It may be called while the exchange runs.
func (t *trace) soFar() []Attempt {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]Attempt, 0, len(t.attempts))
	for i := range t.attempts {
		all = append(all, t.attempts[i].Attempt)
	}
	return all
}

// whole returns the attempts of an exchange that has an answer, and the servers that were not asked.
func (t *trace) whole(e *exchange) []Attempt {
	all := t.soFar()
	if t == nil {
		return nil
	}
	s := &e.schedule
	if s.reply != nil {
		for i := len(all) - 1; i >= 0; i-- {
			if t.attempts[i].try == s.winner && all[i].Result != "" {
				all[i].Used = true
				break
			}
		}
	}
	for i := range s.tries {
		if try := &s.tries[i]; try.asked == 0 {
			why := try.standing.state.String()
			if try.err != nil {
				why = try.err.Error()
			}
			all = append(all, Attempt{Server: e.servers[i].name, Result: why})
		}
	}
	return all
}

// seconds returns a duration in seconds, to 10 µs.
func seconds(d time.Duration) float64 { return d.Round(10 * time.Microsecond).Seconds() }
