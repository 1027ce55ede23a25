package upstream

import (
	"net"
	"testing"

	"github.com/miekg/dns"
)

// F4: when a negative answer is the answer.
func TestHold(t *testing.T) {
	t.Parallel()
	runSchedules(t, []scheduleTest{
		{
			name: "rule 6: the first server has an answer", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{55 * ms, noAnswer(1), "wake at 100ms"},
				{60 * ms, answer(0), "answer of 0"},
			},
		},
		{
			name: "rule 6: until the first server is silent", servers: []standing{up, up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{55 * ms, noAnswer(1), "wake at 100ms"},
				{100 * ms, wake, "hedge 0, send 0, wake at 200ms"}, // the third server is not asked: it cannot outrank the second
				{200 * ms, stands(0, silent), "wake at 200ms"},
				{200 * ms, wake, "provisional answer of 1"},
			},
		},
		{
			name: "rule 6: until the first server has failed", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{55 * ms, noAnswer(1), "wake at 100ms"},
				{60 * ms, code(0, dns.RcodeServerFailure), "failure 0, provisional answer of 1"},
			},
		},
		{
			name: "rule 6: a server that was not asked is asked", servers: []standing{silent, up}, want: "send 1, wake at 50ms",
			steps: []step{
				{1 * ms, stands(0, up), "wake at 50ms"},
				{1 * ms, noAnswer(1), "send 0, wake at 50ms"},
				{2 * ms, answer(0), "answer of 0"},
			},
		},
		{
			name: "rule 6: a silent one is not", servers: []standing{silent, up}, want: "send 1, wake at 50ms",
			steps: []step{{1 * ms, noAnswer(1), "provisional answer of 1"}},
		},
		{
			name: "rule 6: nor one that is down", servers: []standing{down, up}, want: "send 1, wake at 50ms",
			steps: []step{{1 * ms, noAnswer(1), "provisional answer of 1"}},
		},
		{
			name: "rule 6: not by time", servers: []standing{up90ms, up}, options: Options{Fastest: true}, want: "send 1, wake at 50ms",
			steps: []step{{1 * ms, noAnswer(1), "answer of 1"}},
		},
		{
			name: "rule 6: a truncated reply is an answer", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, cutReply(0), "send 0 over TCP, wake at 51ms"},
				{51 * ms, wake, "hedge 1, send 1, wake at 101ms"},
				{52 * ms, noAnswer(1), "wake at 101ms"},
				{60 * ms, lost(0, net.ErrClosed), "answer of 0"},
			},
		},
		{
			name: "rule 6: two servers have no answer", servers: []standing{up, up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{100 * ms, wake, "hedge 2, send 2, wake at 150ms"},
				{110 * ms, noAnswer(2), "wake at 150ms"},
				{120 * ms, noAnswer(1), "wake at 150ms"},
				{150 * ms, wake, "hedge 0, send 0, wake at 250ms"},
				{160 * ms, answer(0), "answer of 0"},
			},
		},
		{
			name: "rule 6: the same in the other order", servers: []standing{up, up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{100 * ms, wake, "hedge 2, send 2, wake at 150ms"},
				{110 * ms, noAnswer(1), "wake at 150ms"},
				{120 * ms, noAnswer(2), "wake at 150ms"},
				{160 * ms, noAnswer(0), "answer of 0"},
			},
		},
	})
}

// F4: a positive answer of a server that is not the first is used at once. It is final if the earlier servers have
// said that the question is not for them.
func TestProvisional(t *testing.T) {
	t.Parallel()
	refuses, second := step{1 * ms, code(0, dns.RcodeRefused), "failure 0, send 1, wake at 51ms"}, step{2 * ms, answer(1), "provisional answer of 1"}
	runSchedules(t, []scheduleTest{
		{
			name: "rule 6: REFUSED", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{refuses, {2 * ms, answer(1), "answer of 1"}},
		},
		{
			name: "rule 6: NOTIMP", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, code(0, dns.RcodeNotImplemented), "send 0 plain, wake at 51ms"},
				{1 * ms, code(0, dns.RcodeNotImplemented), "failure 0, send 1, wake at 51ms"},
				{2 * ms, answer(1), "answer of 1"},
			},
		},
		{
			name: "rule 6: SERVFAIL", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{{1 * ms, code(0, dns.RcodeServerFailure), "failure 0, send 1, wake at 51ms"}, second},
		},
		{
			name: "rule 6: malformed", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{{1 * ms, malformed(0), "malformed 0, send 1, wake at 51ms"}, second},
		},
		{name: "rule 6: silent", servers: []standing{silent, up}, want: "send 1, wake at 50ms", steps: []step{second}},
		{name: "rule 6: down", servers: []standing{down, up}, want: "send 1, wake at 50ms", steps: []step{second}},
		{
			name: "rule 6: by time no answer is provisional", servers: []standing{silent, up}, options: Options{Fastest: true},
			want: "send 1, wake at 50ms", steps: []step{{2 * ms, answer(1), "answer of 1"}},
		},
		{
			name: "rule 8: an UPDATE has one answer", servers: []standing{silent, up}, once: true,
			want: "send 1, wake at 50ms", steps: []step{{2 * ms, answer(1), "answer of 1"}},
		},
		{
			name: "rule 6: late", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{{50 * ms, wake, "hedge 1, send 1, wake at 100ms"}, {55 * ms, answer(1), "provisional answer of 1"}},
		},
	})
}
