package upstream

import (
	"slices"
	"strings"
	"sync"
	"time"
)

// An Attempt is a query that was sent to one server, and its result; or a server that was not asked.
type Attempt struct {
	Server string `json:"server"`
	// Protocol is udp, tcp or tls. It is empty for a server that was not asked.
	Protocol string `json:"protocol,omitempty"`
	// Sent is the time from the first attempt to this one, in seconds. Took is the time from this attempt to its
	// result. If there is no result yet, Took is the time that has passed since this attempt.
	Sent float64 `json:"sentSeconds"`
	Took float64 `json:"tookSeconds,omitempty"`
	// Result is a response code, the error, or why the server was not asked. It is empty if the attempt had no result
	// yet when the query was answered.
	Result string `json:"result,omitempty"`
	// Usual is the average time that replies of the server take, 0 if that is unknown. Patience is how long the query
	// waits for this result before it asks the next server.
	Usual    float64 `json:"usualSeconds,omitempty"`
	Patience float64 `json:"patienceSeconds,omitempty"`
	// Repeated is true if the query was sent because another server was late.
	Repeated bool `json:"repeated,omitempty"`
	Plain    bool `json:"plain,omitempty"` // without an OPT record
	Used     bool `json:"used,omitempty"`  // the reply to this attempt is the answer
}

// A trace notes what an exchange does. A nil trace notes nothing.
type trace struct {
	repeated bool // the next attempt is a repetition

	mu       sync.Mutex
	attempts []traced
}

// traced is an attempt of a trace. try is the index of the server, and sends is how often the query was sent to it,
// including this time.
type traced struct {
	Attempt
	sentAt     time.Time
	try, sends int
}

// markRepeated notes that the next attempt is a repetition.
func (t *trace) markRepeated() {
	if t != nil {
		t.repeated = true
	}
}

// addAttempt adds an attempt. patience is how long the exchange waits for the reply before it asks the next server.
func (t *trace) addAttempt(a *attempt, patience time.Duration) {
	if t == nil {
		return
	}
	made := traced{sentAt: a.sent, try: a.try, sends: a.sends, Attempt: Attempt{
		Server: a.server.name, Protocol: a.server.protocol(a.stream), Plain: a.noOPT, Repeated: t.repeated,
		Usual: seconds(a.server.rtt()), Patience: seconds(max(0, patience)),
	}}
	t.repeated = false
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.attempts) > 0 {
		made.Sent = seconds(a.sent.Sub(t.attempts[0].sentAt))
	}
	t.attempts = append(t.attempts, made)
}

// addOutcome adds the outcome of an attempt.
func (t *trace) addOutcome(o *outcome, now time.Time) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.attempts {
		if a := &t.attempts[i]; a.try == o.try && a.sends == o.sends {
			a.Result, a.Took = o.text(), seconds(now.Sub(a.sentAt))
		}
	}
}

// soFar returns the attempts that were made so far. It may be called while the exchange runs.
func (t *trace) soFar(now time.Time) []Attempt {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]Attempt, 0, len(t.attempts))
	for i := range t.attempts {
		a := t.attempts[i].Attempt
		if a.Result == "" {
			a.Took = seconds(now.Sub(t.attempts[i].sentAt))
		}
		all = append(all, a)
	}
	return all
}

// Others returns a short text about the servers whose replies were not used: the result of each. The text is empty if
// there are no such servers.
func Others(attempts []Attempt) string {
	var texts []string
	for i := range attempts {
		server := attempts[i].Server
		same := func(a Attempt) bool { return a.Server == server }
		if slices.ContainsFunc(attempts[:i], same) {
			continue
		}
		ended, used := "", false
		for j := range attempts[i:] {
			a := &attempts[i+j]
			switch {
			case !same(*a):
				continue
			case a.Result != "":
				ended = a.Result
			case ended == "":
				ended = "no reply for " + time.Duration(a.Took*float64(time.Second)).Round(time.Millisecond).String()
			}
			used = used || a.Used
		}
		if !used {
			texts = append(texts, server+": "+ended)
		}
	}
	return strings.Join(texts, "; ")
}

// seconds returns a duration in seconds, rounded to 10 µs.
func seconds(d time.Duration) float64 { return d.Round(10 * time.Microsecond).Seconds() }
