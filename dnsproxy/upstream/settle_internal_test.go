package upstream

import (
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// F3: failures move on to the next server, and the best of them is the last resort.
func TestFailures(t *testing.T) {
	t.Parallel()
	runSchedules(t, []scheduleTest{
		{
			name: "rule 5: moves on at once", servers: []standing{up, up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, code(0, dns.RcodeServerFailure), "failure 0, send 1, wake at 51ms"},
				{2 * ms, malformed(1), "malformed 1, send 2, wake at 52ms"},
				{3 * ms, answer(2), "provisional answer of 2"},
			},
		},
		{
			name: "rule 5: the best failure", servers: []standing{up, up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, code(0, dns.RcodeRefused), "failure 0, send 1, wake at 51ms"},
				{2 * ms, code(1, dns.RcodeServerFailure), "failure 1, send 2, wake at 52ms"},
				{3 * ms, lost(2, syscall.ECONNREFUSED), "SERVFAIL of 1"},
			},
		},
		{
			name: "rule 5: the others are down", servers: []standing{up, down}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, code(0, dns.RcodeServerFailure), "failure 0, send 1, wake at 51ms"},
				{51 * ms, wake, "SERVFAIL of 0"},
			},
		},
		{
			name: "rule 5: one that was down is back", servers: []standing{up, down, down}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, code(0, dns.RcodeServerFailure), "failure 0, send 1, send 2, wake at 51ms"},
				{2 * ms, lost(1, syscall.ECONNREFUSED), "wake at 51ms"},
				{3 * ms, answer(2), "provisional answer of 2"},
			},
		},
		{
			name: "rule 5: a message that is sent to one server at a time", servers: []standing{up, down, down}, once: true, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, code(0, dns.RcodeServerFailure), "failure 0, send 1, wake at 51ms"},
				{2 * ms, lost(1, syscall.ECONNREFUSED), "send 2, wake at 52ms"},
				{52 * ms, wake, "SERVFAIL of 0"},
			},
		},
		{
			name: "rule 5: without any reply the servers that are down are asked", servers: []standing{up, down}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, lost(0, syscall.ECONNREFUSED), "send 1, wake at 51ms"},
				{51 * ms, wake, "hedge 1, send 1, wake at 151ms"},
				{4 * time.Second, wake, "no reply: no reply in time"},
			},
		},
		{
			name: "rule 5: attempts in flight are waited for", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{60 * ms, code(0, dns.RcodeServerFailure), "failure 0, wake at 100ms"},
				{70 * ms, answer(1), "provisional answer of 1"},
			},
		},
		{
			name: "EDNS is rejected", servers: []standing{up}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, code(0, dns.RcodeFormatError), "send 0 plain, wake at 51ms"},
				{2 * ms, code(0, dns.RcodeFormatError), "failure 0, FORMERR of 0"},
			},
		},
		{
			name: "EDNS is known", servers: []standing{up}, want: "send 0, wake at 50ms",
			steps: []step{{1 * ms, reply(0, reading{code: dns.RcodeFormatError, edns: true}), "failure 0, FORMERR of 0"}},
		},
		{
			name: "EDNS is rejected twice", servers: []standing{up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 0, send 0, wake at 150ms"},
				{60 * ms, code(0, dns.RcodeNotImplemented), "send 0 plain, wake at 110ms"},
				{61 * ms, lateCode(0, dns.RcodeNotImplemented), "wake at 110ms"},
				{62 * ms, answer(0), "answer of 0"},
			},
		},
	})
}

// F2, F4: when a truncated reply is the answer.
func TestTruncatedReplies(t *testing.T) {
	t.Parallel()
	runSchedules(t, []scheduleTest{
		{
			name: "rule 8: the whole over TCP", servers: []standing{up}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, cutReply(0), "send 0 over TCP, wake at 51ms"},
				{2 * ms, answer(0), "answer of 0"},
			},
		},
		{
			name: "rule 8: no TCP", servers: []standing{up}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, cutReply(0), "send 0 over TCP, wake at 51ms"},
				{2 * ms, lost(0, syscall.ECONNREFUSED), "answer of 0"},
			},
		},
		{
			name: "rules 5 and 8: TCP breaks, the next server sends the whole", servers: []standing{up, up}, inTurn: true,
			want: "send 0 over TCP, wake at 50ms",
			steps: []step{
				{1 * ms, lost(0, syscall.ECONNRESET), "send 0, wake at 101ms"},
				{2 * ms, cutReply(0), "send 0 over TCP, wake at 52ms"},
				{3 * ms, lost(0, syscall.ECONNRESET), "send 1 over TCP, wake at 53ms"},
				{4 * ms, answer(1), "provisional answer of 1"},
			},
		},
		{
			name: "rules 5 and 8: no TCP, and the next server", servers: []standing{up, up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, cutReply(0), "send 0 over TCP, wake at 51ms"},
				{2 * ms, lost(0, syscall.ECONNREFUSED), "send 1, wake at 52ms"},
				{3 * ms, cutReply(1), "send 1 over TCP, wake at 53ms"},
				{4 * ms, lost(1, syscall.ECONNREFUSED), "send 2, wake at 54ms"},
				{5 * ms, answer(2), "provisional answer of 2"},
			},
		},
		{
			name: "rules 6 and 8: no TCP, and the next server has no answer", servers: []standing{up, up, up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, cutReply(0), "send 0 over TCP, wake at 51ms"},
				{2 * ms, lost(0, syscall.ECONNREFUSED), "send 1, wake at 52ms"},
				{52 * ms, wake, "hedge 2, send 2, wake at 102ms"},
				{53 * ms, noAnswer(2), "wake at 102ms"},
				{54 * ms, code(1, dns.RcodeServerFailure), "failure 1, answer of 0"},
			},
		},
		{
			name: "rule 8: the next server, and no longer than a second", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{1 * ms, cutReply(0), "send 0 over TCP, wake at 51ms"},
				{51 * ms, wake, "hedge 1, send 1, wake at 101ms"},
				{52 * ms, cutReply(1), "send 1 over TCP, wake at 102ms"},
				{900 * ms, wake, "hedge 0, send 0 over TCP, wake at 1.001s"},
				{1001 * ms, wake, "answer of 0"},
			},
		},
		{
			name: "rule 8: truncated over TCP, too", servers: []standing{up}, options: Options{UseVC: true}, want: "send 0 over TCP, wake at 50ms",
			steps: []step{{1 * ms, cutReply(0), "answer of 0"}},
		},
	})
}

// F4: the answer when the time is up.
func TestGivingUp(t *testing.T) {
	t.Parallel()
	runSchedules(t, []scheduleTest{
		{
			name: "without a reply", servers: []standing{up}, want: "send 0, wake at 50ms",
			steps: []step{{4 * time.Second, wake, "no reply: no reply in time"}, {5 * time.Second, answer(0), "no reply: no reply in time"}},
		},
		{
			name: "with a reply that is held", servers: []standing{up, up}, want: "send 0, wake at 50ms",
			steps: []step{
				{50 * ms, wake, "hedge 1, send 1, wake at 100ms"},
				{55 * ms, noAnswer(1), "wake at 100ms"},
				{4 * time.Second, wake, "provisional answer of 1"},
			},
		},
	})
}
