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
			name: "rule 12: the first server has an answer", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{55 * ms, noAnswer(1), "wake at 100ms"},
				{60 * ms, answer(0), "answer of 0"},
			},
		},
		{
			name: "rule 12: until the first server is silent", servers: []standing{up, up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{55 * ms, noAnswer(1), "wake at 100ms"},
				{100 * ms, wake, "hedge 0, send 0, wake at 200ms"}, // the third server is not asked: it cannot outrank the second
				{200 * ms, stands(0, silent), "wake at 200ms"},
				{200 * ms, wake, "unsure negative answer of 1, late alone 0"},
			},
		},
		{
			name: "rule 12: until the first server has failed", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{55 * ms, noAnswer(1), "wake at 100ms"},
				{60 * ms, code(0, dns.RcodeServerFailure), "failure 0, unsure negative answer of 1, failed alone 0"},
			},
		},
		{
			name: "rule 12: a server that was not asked is asked", servers: []standing{failing, up}, want: "send 1, wake at 50ms",
			steps: []step{
				{1 * ms, noAnswer(1), "send 0, wake at 50ms"},
				{2 * ms, answer(0), "answer of 0"},
			},
		},
		{
			name: "rule 12: one that leaves queries unanswered is not", servers: []standing{mute, up}, want: "send 1, wake at 50ms",
			steps: []step{{1 * ms, noAnswer(1), "unsure negative answer of 1"}},
		},
		{
			name: "rule 12: a copy to a server that is down counts", servers: []standing{down, up}, copies: []int{0}, want: "send 0, send 1, wake at 50ms",
			steps: []step{
				{1 * ms, noAnswer(1), "wake at 50ms"},
				{2 * ms, answer(0), "answer of 0"},
			},
		},
		{
			name: "rule 12: until that is late", servers: []standing{down, up}, copies: []int{0}, want: "send 0, send 1, wake at 50ms",
			steps: []step{
				{1 * ms, noAnswer(1), "wake at 50ms"},
				{50 * ms, wake, "unsure negative answer of 1"},
			},
		},
		{
			name: "rule 12: not by time", servers: []standing{up90ms, up}, options: Options{Fastest: true}, want: "send 1, wake at 50ms",
			steps: []step{{1 * ms, noAnswer(1), "negative answer of 1"}},
		},
		{
			name: "rule 12: a truncated reply is an answer", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, cutReply(0), "send 0 over TCP, wake at 51ms"},
				{51 * ms, wake, "hedge 1, send 1, wake at 101ms"},
				{52 * ms, noAnswer(1), "wake at 101ms"},
				{60 * ms, lost(0, net.ErrClosed), "answer of 0"},
			},
		},
		{
			name: "rule 12: two servers have no answer", servers: []standing{up, up, up}, want: "send 0, wake at 50ms",
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
			name: "rule 12: the same in the other order", servers: []standing{up, up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{100 * ms, wake, "hedge 2, send 2, wake at 150ms"},
				{110 * ms, noAnswer(1), "wake at 150ms"},
				{120 * ms, noAnswer(2), "wake at 150ms"},
				{160 * ms, noAnswer(0), "negative answer of 0"},
			},
		},
	})
}
