package upstream

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

const ms = time.Millisecond

// An event happens to a schedule at a time.
type event func(s *schedule, now time.Time)

func wake(s *schedule, now time.Time) { s.wake(now) }

// stands returns the event that a server's standing has changed.
func stands(i int, st standing) event { return func(s *schedule, _ time.Time) { s.setStanding(i, st) } }

// receives returns the event that an attempt has an outcome. Whether it was sent over a
// connection, and without EDNS, is what the schedule wants at that time.
func receives(o outcome) event {
	return func(s *schedule, now time.Time) {
		sent := o // tests that run at once share events
		sent.stream, sent.noOPT = s.tries[o.try].stream, s.tries[o.try].noOPT
		s.receive(sent, now)
	}
}

func reply(i int, r reading) event {
	return receives(outcome{try: i, reply: []byte{}, reading: r})
}

func answer(i int) event { return reply(i, reading{}) }

func noAnswer(i int) event { return reply(i, reading{negative: true, code: dns.RcodeNameError}) }

func cutReply(i int) event { return reply(i, reading{truncated: true}) }

func code(i, rcode int) event { return reply(i, reading{code: rcode}) }

// lateCode is code for an attempt that was sent before the server was asked without.
func lateCode(i, rcode int) event {
	return func(s *schedule, now time.Time) {
		s.receive(outcome{try: i, reply: []byte{}, reading: reading{code: rcode}}, now)
	}
}

func malformed(i int) event { return reply(i, reading{err: errMalformedQuery}) }

func lost(i int, err error) event { return receives(outcome{try: i, err: err}) }

// A step is an event at a time since the start. want is the description of the schedule after
// it: the actions, and either when it wants to be woken or what the answer is.
type step struct {
	at    time.Duration
	event event
	want  string
}

// count is 1 if b is true, otherwise 0.
func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Standings of servers that are late after 50 ms, and rank by 10 ms.
var (
	up      = standing{rtt: 10 * ms, lateAfter: 50 * ms}
	silent  = standing{rtt: 500 * ms, lateAfter: 50 * ms, silent: true}
	down    = standing{rtt: 10 * ms, lateAfter: 50 * ms, state: Down, silent: true}
	looping = standing{rtt: 10 * ms, lateAfter: 50 * ms, state: Looping}
	up12ms  = standing{rtt: 12 * ms, lateAfter: 50 * ms}
	up90ms  = standing{rtt: 90 * ms, lateAfter: 100 * ms}
)

type scheduleTest struct {
	name    string
	servers []standing
	options Options
	once    bool   // rule 8
	inTurn  bool   // TCPThenUDP
	want    string // after start
	steps   []step
}

// runSchedules runs tests of a schedule.
func runSchedules(t *testing.T, tests []scheduleTest) {
	t.Helper()
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) { t.Parallel(); tc.run(t) })
	}
}

// F4: when the query is sent again, and to which server.
func TestRepetitions(t *testing.T) {
	t.Parallel()
	runSchedules(t, []scheduleTest{
		{
			name: "rule 4: one server, waits doubled up to 2 s", servers: []standing{up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 0, send 0, wake at 150ms"},
				{150 * ms, wake, "hedge 0, send 0, wake at 350ms"},
				{350 * ms, wake, "hedge 0, send 0, wake at 750ms"},
				{750 * ms, wake, "hedge 0, send 0, wake at 1.55s"},
				{1550 * ms, wake, "hedge 0, send 0, wake at 3.15s"},
				{3150 * ms, wake, "hedge 0, send 0, wake at 4s"},
				{3200 * ms, answer(0), "answer of 0"},
			},
		},
		{
			name: "rule 4: round and round", servers: []standing{up, up90ms}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 150ms"},
				{150 * ms, wake, "hedge 0, send 0, wake at 250ms"},
				{250 * ms, wake, "hedge 1, send 1, wake at 450ms"},
				{260 * ms, answer(0), "answer of 0"},
			},
		},
		{
			name: "woken early", servers: []standing{up}, want: "send 0, wake at 50ms",
			steps: []step{{49 * ms, wake, "wake at 50ms"}},
		},
		{
			name: "rule 7: all down", servers: []standing{down, down}, want: "send 0, send 1, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 0, send 0, wake at 150ms"},
				{150 * ms, wake, "hedge 1, send 1, wake at 250ms"},
				{250 * ms, wake, "hedge 0, send 0, wake at 450ms"},
				{450 * ms, wake, "hedge 1, send 1, wake at 650ms"},
				{650 * ms, wake, "hedge 0, send 0, wake at 1.05s"},
				{1050 * ms, wake, "hedge 1, send 1, wake at 1.45s"},
				{1450 * ms, wake, "hedge 0, send 0, wake at 2.25s"},
			},
		},
		{
			name: "rule 8: sent once", servers: []standing{up, up}, once: true,
			want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "wake at 2.05s"},
				{60 * ms, lost(0, syscall.ECONNREFUSED), "send 1, wake at 110ms"},
				{110 * ms, wake, "wake at 2.11s"},
				{120 * ms, noAnswer(1), "answer of 1"},
			},
		},
		{
			name: "rules 7 and 8: sent to one of the servers that are down", servers: []standing{down, down}, once: true, want: "send 0, wake at 50ms",
			steps: []step{{50 * ms, wake, "wake at 2.05s"}},
		},
	})
}

func (tc scheduleTest) run(t *testing.T) {
	t.Helper()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s := schedule{
		options: tc.options, deadline: start.Add(defaultTimeout), sendOnce: tc.once, edns: true, retryTCP: true,
	}
	for i, st := range tc.servers {
		s.tries = append(s.tries, try{stream: tc.options.UseVC || tc.inTurn, inTurn: tc.inTurn})
		s.setStanding(i, st)
	}
	s.start(start)
	if got := s.describe(start); got != tc.want {
		t.Fatalf("at the start: %s; want %s", got, tc.want)
	}
	for _, step := range tc.steps {
		step.event(&s, start.Add(step.at))
		if got := s.describe(start); got != step.want {
			t.Fatalf("at %v: %s; want %s", step.at, got, step.want)
		}
	}
}

// describe describes what the schedule wants, and takes its actions.
func (s *schedule) describe(start time.Time) string {
	var parts []string
	for _, action := range s.actions {
		text := fmt.Sprintf("%s %d", [...]string{"send", "hedge", "malformed", "failure"}[action.kind], action.try)
		t := &s.tries[action.try]
		if action.kind == actSend && t.stream {
			text += " over TCP"
		}
		if action.kind == actSend && t.noOPT {
			text += " plain"
		}
		parts = append(parts, text)
	}
	s.actions = s.actions[:0]
	if s.over {
		parts = append(parts, s.describeAnswer())
	} else {
		parts = append(parts, "wake at "+s.wakeAt().Sub(start).String())
	}
	return strings.Join(parts, ", ")
}

// describeAnswer describes the answer, which is "provisional" or not.
func (s *schedule) describeAnswer() string {
	text := ""
	if s.provisional {
		text = "provisional "
	}
	switch {
	case s.reply == nil && s.cause != nil:
		return "no reply: " + s.cause.Error()
	case s.reply == nil:
		return "no reply"
	case s.tries[s.winner].failure != nil:
		return fmt.Sprintf("%s of %d", dns.RcodeToString[s.tries[s.winner].code], s.winner)
	}
	return text + fmt.Sprintf("answer of %d", s.winner)
}
