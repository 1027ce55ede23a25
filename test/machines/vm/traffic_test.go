package vm_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// queriesPerSecond is the rate of the queries of a machine's programs.
const queriesPerSecond = 2000

// A traffic is the queries of a machine's programs to the nameserver in its resolv.conf. A tenth
// is sent over IPv6. Four of five queries are for the mesh name, and one is for a name that is
// in no cache.
type traffic struct {
	t     *testing.T
	loads []*load.Load // the last one has the names that are forwarded
}

// startTraffic starts queries and returns when nametap answers them.
func startTraffic(t *testing.T, m *vm.Machine) *traffic {
	t.Helper()
	tr := &traffic{t: t}
	t.Cleanup(tr.end)
	mesh := load.Question{Name: vm.Mesh, Addresses: load.Addrs(vm.MeshIP)}
	forwarded := load.Question{Name: "*.example.org", Addresses: load.Addrs(vm.NamedIP)}
	for _, part := range []struct {
		server   string
		question load.Question
		share    float64
	}{{vm.Named, mesh, 0.7}, {vm.Named6, mesh, 0.1}, {vm.Named, forwarded, 0.2}} {
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
	n := int(during.Seconds() * queriesPerSecond)
	want := tr.count(load.Right) + n
	wait.Until(tr.t, "queries have answers", func() bool { return tr.count(load.Right) >= want })
}

// count returns the number of queries of some kinds.
func (tr *traffic) count(kinds ...load.Kind) int {
	sum := 0
	for _, l := range tr.loads {
		sum += l.Report().Count(kinds...)
	}
	return sum
}

// gap returns the longest time without a right answer since the previous call.
func (tr *traffic) gap() time.Duration {
	var longest time.Duration
	for _, l := range tr.loads {
		longest = max(longest, l.Cut().LongestGap)
	}
	return longest
}

// forwardedGap is like gap for names that the nameserver answers, also without an agent.
func (tr *traffic) forwardedGap() time.Duration {
	return tr.loads[len(tr.loads)-1].Cut().LongestGap
}

// wantOutage fails the test if names that the nameserver has were without an answer for longer than lapse since the
// last call of forwardedGap.
func (tr *traffic) wantOutage() {
	tr.t.Helper()
	gap := tr.forwardedGap()
	tr.t.Logf("longest time without an answer: %v", gap.Round(time.Millisecond))
	if gap > lapse {
		tr.t.Errorf("the machine has no DNS for %v, want at most 2 s", gap)
	}
}

// end stops the queries, and logs how many had no answer and how many passed the agent.
func (tr *traffic) end() {
	tr.t.Helper()
	for _, l := range tr.loads {
		l.Stop()
	}
	tr.t.Logf("of %d queries %d had no answer and %d passed the agent", tr.count(load.Kinds()...),
		tr.count(load.Lost, load.Unreachable, load.Failed, load.Unsent), tr.count(load.Foreign))
}

// stop stops the queries, logs the reports, and returns the number of queries for the mesh name
// and for other names that ended in other ways than allowed.
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
