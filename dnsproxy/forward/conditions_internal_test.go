package forward

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// examined returns what is wrong with two nameservers of all names, and one of corp.example. They have answered before
// change was called.
func examined(change func(first, second, corp *server, now time.Time)) condition.Report {
	now := time.Unix(1_000_000, 0)
	e := examination{now: now}
	for _, address := range []string{"10.96.0.10", "10.96.0.11", "2001:db8::53"} {
		s := server{Status: upstream.Status{Spec: upstream.Spec{Addr: netip.AddrPortFrom(netip.MustParseAddr(address), 53)}, Heard: now}}
		s.TCP.Heard = now
		e.servers = append(e.servers, s)
	}
	e.servers[2].suffix = "corp.example"
	change(&e.servers[0], &e.servers[1], &e.servers[2], now)
	return condition.Judge(e.conditions())
}

// down marks nameservers as down.
func down(now time.Time, servers ...*server) {
	for _, s := range servers {
		s.State, s.LastError, s.LastErrorAt, s.Heard = upstream.Down, "no reply in time", now, now.Add(-time.Hour)
	}
}

// R15: what is said of nameservers with a defect.
func TestBrokenNameservers(t *testing.T) {
	t.Parallel()
	for want, breaks := range map[string]func(first, second, corp *server, now time.Time){
		"warning nameserver_down: 10.96.0.11, the second nameserver, does not reply":                 func(_, second, _ *server, now time.Time) { down(now, second) },
		"problem nameserver_down: 10.96.0.10, the first nameserver, does not reply":                  func(first, second, _ *server, now time.Time) { down(now, first, second) },
		"problem nameserver_down: 2001:db8::53, the only nameserver of corp.example, does not reply": func(_, _, corp *server, now time.Time) { down(now, corp) },
		"warning nameserver_loops: 10.96.0.10, the first nameserver, forwards to this agent": func(first, _, _ *server, _ time.Time) {
			first.State, first.Looping = upstream.Looping, "its queries come back to this agent"
		},
		"warning nameserver_refuses: 10.96.0.10, the first nameserver, answers no query": func(first, _, _ *server, now time.Time) {
			first.Refusing, first.RefusedAt, first.Responses = true, now, map[string]uint64{"REFUSED": 12}
		},
		"problem nameserver_barred: 10.96.0.10, the first nameserver, cannot be queried: a firewall of this host drops": func(first, second, _ *server, now time.Time) {
			down(now, first, second)
			first.Barred, second.Barred = true, true
		},
		"warning nameserver_tcp: 10.96.0.10, the first nameserver, does not reply over TCP": func(first, _, _ *server, now time.Time) {
			first.TCP = upstream.TCPStatus{LastError: "timeout", Since: now.Add(-time.Minute), LastErrorAt: now}
		},
		// A person has asked a nameserver that no client uses.
		"problem nameserver_down: 2001:db8::53, the only nameserver of corp.example, does not reply ": func(_, _, corp *server, now time.Time) {
			corp.Heard, corp.Unanswered, corp.LastError, corp.LastErrorAt = time.Time{}, now, "no reply in time", now
		},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			report := examined(breaks)
			if len(report.Problems) == 0 {
				t.Fatal("no problem found")
			}
			p := report.Problems[0]
			if got := fmt.Sprintf("%s %s: %s", p.Severity, p.Code, p.What); !strings.HasPrefix(got, strings.TrimSpace(want)) {
				t.Errorf("got %q", got)
			}
			for _, other := range report.Problems {
				if dig, ok := strings.CutPrefix(other.Mend, "dig @"); ok && !strings.HasPrefix(dig, strings.Fields(other.Subject)[0]+" example.org") {
					t.Errorf("another server is queried: %s", other.Mend)
				}
				if other.Code != p.Code || other.Evidence == "" || other.Effect == "" || other.Mend == "" || len(other.Rows) == 0 {
					t.Errorf("incomplete, or a consequence: %+v", other)
				}
			}
		})
	}
}

// R15: a nameserver that was not heard lately is neither ok nor a problem.
func TestOddNameservers(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		odd     func(first, second, corp *server, now time.Time)
		unknown int
	}{
		"usual":            {func(_, _, _ *server, _ time.Time) {}, 0},
		"never used":       {func(_, second, _ *server, _ time.Time) { second.Heard, second.TCP.Heard = time.Time{}, time.Time{} }, 5},
		"long ago":         {func(first, _, _ *server, now time.Time) { down(now.Add(-time.Hour), first) }, 5},
		"refused long ago": {func(first, _, _ *server, now time.Time) { first.Refusing, first.RefusedAt = true, now.Add(-time.Hour) }, 0},
		"a connection over TCP broke": {func(first, _, _ *server, now time.Time) {
			first.TCP.LastError, first.TCP.Since, first.TCP.LastErrorAt = "connection reset", now.Add(-time.Second), now
		}, 0},
		"nothing came over TCP":         {func(first, _, _ *server, _ time.Time) { first.TCP.Heard = time.Time{} }, 1},
		"asked in vain, and then heard": {func(first, _, _ *server, now time.Time) { first.Unanswered = now.Add(-time.Second) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			report := examined(tc.odd)
			if len(report.Problems) > 0 || len(report.Unknown) != tc.unknown || len(report.OK)+tc.unknown != 5 {
				t.Errorf("problems %+v, not known %+v", report.Problems, report.Unknown)
			}
		})
	}
}

// R15: a forwarder without nameservers, and one whose nameserver is asked by a person.
func TestAsk(t *testing.T) {
	t.Parallel()
	answers := fakedns.Start(t, fakedns.Answer())
	silent := fakedns.Start(t, fakedns.Silence)
	forwarder := func(servers ...*fakedns.Server) *Forwarder {
		cfg := Config{ResolvConf: "/dev/null"}
		for _, s := range servers {
			cfg.Upstreams = append(cfg.Upstreams, upstream.Spec{Addr: s.Addr})
		}
		f, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(f.client.Close)
		return f
	}
	first := func(f *Forwarder) string {
		report := condition.Judge(f.Conditions())
		if len(report.Problems) == 0 {
			return fmt.Sprintf("%d ok, %d not known", len(report.OK), len(report.Unknown))
		}
		return string(report.Problems[0].Code) + " " + report.Problems[0].Subject
	}
	if got := first(forwarder()); got != "nameservers_none " {
		t.Error(got)
	}
	f := forwarder(answers)
	if got := first(f); got != "2 ok, 5 not known" {
		t.Errorf("before: %s", got)
	}
	f.Ask(t.Context())
	if got := first(f); got != "6 ok, 1 not known" { // of TCP nothing was seen
		t.Errorf("a nameserver that answers: %s", got)
	}
	f = forwarder(answers, silent)
	f.Ask(t.Context())
	if got := first(f); got != "nameserver_down "+silent.Addr.String() {
		t.Errorf("a silent nameserver: %s", got)
	}
	silent.Handle(fakedns.Rcode(dns.RcodeRefused)) // any reply shows that it lives
	f.Ask(t.Context())
	if got := first(f); got != "6 ok, 1 not known" {
		t.Errorf("after its recovery: %s", got)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	f.Ask(ended)
}
