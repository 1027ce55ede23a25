package vm

import (
	"flag"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

func TestMain(m *testing.M) {
	os.Exit(lab.Main(m, "debootstrap", "systemd-nspawn", "unshare", "nsenter", "ip", "conntrack", "dnsmasq", "make", "go"))
}

// rounds is how often the agent's process is replaced.
var rounds = flag.Int("vm.rounds", 10, "how often a test replaces the agent's process under load")

const (
	// binary is where `make install` puts the agent.
	binary = "/usr/local/bin/nametap"
	// queriesPerSecond is the rate of the queries of a machine's programs.
	queriesPerSecond = 1000
	// lapse is the longest time without DNS after the last answer of an agent: the lease of its rules, and the time of
	// the next queries on a busy machine.
	lapse = 2*time.Second + 200*time.Millisecond
)

// A traffic is the queries of a machine's programs to the nameserver in its resolv.conf. A tenth is sent over IPv6. Four
// of five queries are for the mesh name, and one is for a name that is in no cache.
type traffic struct {
	t     *testing.T
	loads []*load.Load // the last one has the names that are forwarded
}

// startTraffic starts queries and returns when nametap answers them.
func startTraffic(t *testing.T, m *lab.Machine) *traffic {
	t.Helper()
	tr := &traffic{t: t}
	t.Cleanup(tr.end)
	mesh := load.Question{Name: lab.Mesh, Addresses: load.Addrs(lab.MeshIP)}
	forwarded := load.Question{Name: "*.example.org", Addresses: load.Addrs(lab.NamedIP)}
	for _, part := range []struct {
		server   string
		question load.Question
		share    float64
	}{{lab.Named, mesh, 0.7}, {lab.Named6, mesh, 0.1}, {lab.Named, forwarded, 0.2}} {
		l, err := load.Start(load.Config{
			Server: netip.AddrPortFrom(netip.MustParseAddr(part.server), 53), Rate: int(queriesPerSecond * part.share),
			Kept: 0.2, TCP: 0.05, Enter: m.Net.Run,
			Expect: &load.Expectation{
				Questions: []load.Question{part.question},
				Foreign:   []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")},
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		tr.loads = append(tr.loads, l)
	}
	tr.more(time.Second)
	return tr
}

// more returns when as many more queries have the right answer as are sent in a time.
func (tr *traffic) more(during time.Duration) {
	tr.t.Helper()
	want := tr.count(load.Right) + int(during.Seconds()*queriesPerSecond)
	wait.Until(tr.t, "queries have answers", func() bool { return tr.count(load.Right) >= want })
}

// past returns when queries of a time have passed the agent: the nameserver has answered them.
func (tr *traffic) past(during time.Duration) {
	tr.t.Helper()
	want := tr.count(load.Foreign) + max(1, int(during.Seconds()*queriesPerSecond))
	wait.Until(tr.t, "the nameserver answers instead of the agent", func() bool { return tr.count(load.Foreign) >= want })
}

// count returns the number of queries of some kinds.
func (tr *traffic) count(kinds ...load.Kind) int {
	sum := 0
	for _, l := range tr.loads {
		sum += l.Report().Count(kinds...)
	}
	return sum
}

// outage disturbs the agent, and fails the test if names that the nameserver has were without an answer for longer than
// lapse, or if the nameserver does not answer instead of the agent.
func (tr *traffic) outage(disturb func()) {
	tr.t.Helper()
	forwarded := tr.loads[len(tr.loads)-1]
	forwarded.Cut()
	disturb()
	tr.past(0)
	tr.more(time.Second / 10)
	tr.wantGap(forwarded.Cut())
}

// wantGap fails the test if there was no answer for longer than lapse. The time that the load did not get the processor
// does not count: nor did the agent and systemd.
func (tr *traffic) wantGap(r load.Report) {
	tr.t.Helper()
	tr.t.Logf("longest time without an answer: %v, lag %v", r.LongestGap.Round(time.Millisecond), r.Lag.Round(time.Millisecond))
	if r.LongestGap-r.Lag > lapse {
		tr.t.Errorf("the machine has no DNS for %v, want at most 2 s", r.LongestGap)
	}
}

// end stops the queries.
func (tr *traffic) end() {
	for _, l := range tr.loads {
		l.Stop()
	}
}

// stop stops the queries, logs the reports, and returns the number of queries for the mesh name and for other names that
// ended in other ways than allowed.
func (tr *traffic) stop(allowed ...load.Kind) (mesh, forwarded int) {
	tr.t.Helper()
	for i, l := range tr.loads {
		report := l.Stop()
		tr.t.Logf("%v", report)
		for kind, n := range report.Counts {
			switch {
			case slices.Contains(allowed, kind):
			case i == len(tr.loads)-1:
				forwarded += n
			default:
				mesh += n
			}
		}
	}
	return mesh, forwarded
}

// none stops the queries, and fails the test if one ended in another way than allowed. While the load did not get the
// processor for seconds, others did not, either: then queries may be lost or fail.
func (tr *traffic) none(allowed ...load.Kind) {
	tr.t.Helper()
	for _, l := range tr.loads {
		if l.Report().Lag > 2*time.Second {
			allowed = append(allowed, load.Lost, load.Failed)
		}
	}
	if mesh, forwarded := tr.stop(allowed...); mesh+forwarded > 0 {
		tr.t.Errorf("%d queries for the mesh name and %d for others did not end as %v", mesh, forwarded, allowed)
	}
}

// replace calls change some times, each after a second with answers.
func replace(tr *traffic, rounds int, change func(round int)) {
	tr.t.Helper()
	for round := range rounds {
		change(round)
		tr.more(time.Second)
	}
}

// setDNSAddr sets the address on which the agent answers; an empty one removes the setting.
func setDNSAddr(m *lab.Machine, addr string) {
	m.Run("sed", "-i", "/^DNS_PROXY_ADDR=/ d", "/etc/default/nametap")
	if addr != "" {
		m.Run("sed", "-i", "$ a DNS_PROXY_ADDR="+addr, "/etc/default/nametap")
	}
}

// kill kills the agent's process.
func kill(m *lab.Machine) {
	m.Run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "nametap.service")
}

// remove moves the agent's program away, and restore back.
func remove(m *lab.Machine)  { m.Run("mv", binary, binary+".good") }
func restore(m *lab.Machine) { m.Run("mv", binary+".good", binary) }

// running returns the agent's process and the state of its unit, both of one moment.
func running(m *lab.Machine) string {
	return m.Run("systemctl", "show", "--property=MainPID,ActiveState", "nametap")
}

// dies kills the agent, and returns when another one runs.
func dies(t *testing.T, m *lab.Machine) {
	t.Helper()
	before := running(m)
	kill(m)
	wait.Until(t, "systemd has started another agent", func() bool {
		now := running(m)
		return now != before && strings.Contains(now, "ActiveState=active")
	})
}

// wantActive fails the test unless all units of a running agent are active.
func wantActive(t *testing.T, m *lab.Machine, when string) {
	t.Helper()
	all := append(lab.Units(), "nametap-rules.service", "nametap-captured.target", "nametap-resolved.socket")
	if states, err := m.Try("systemctl", append([]string{"is-active"}, all...)...); err != nil {
		t.Errorf("%s, the states of %v are:\n%s", when, all, states)
	}
}

// wantNotCaptured fails the test if rules of nametap are left.
func wantNotCaptured(t *testing.T, m *lab.Machine) {
	t.Helper()
	if m.Captured() {
		t.Errorf("rules are left:\n%s", m.Net.Rules())
	}
}

// wantNames fails the test unless names have their addresses.
func wantNames(t *testing.T, m *lab.Machine, names map[string]string) {
	t.Helper()
	for name, want := range names {
		if got := m.Lookup(name); got != want {
			t.Errorf("%s has %s, want %s", name, got, want)
		}
	}
}

// awaitStatus waits until systemctl status shows a reason.
func awaitStatus(t *testing.T, m *lab.Machine, reason string) {
	t.Helper()
	wait.Until(t, "systemctl status shows the reason: "+reason, func() bool {
		status, _ := m.Try("systemctl", "status", "--lines=20", "nametap.service")
		return strings.Contains(status, reason)
	})
}
