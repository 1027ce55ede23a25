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

// A traffic is the queries of a machine's programs to the nameserver in its resolv.conf, nine of
// ten over IPv4 and the others over IPv6. Four of five are for the mesh name, the others for
// names that are in no cache.
type traffic struct {
	t     *testing.T
	loads []*load.Load
}

// startTraffic starts queries and returns when nametap answers them.
func startTraffic(t *testing.T, m *vm.Machine) *traffic {
	t.Helper()
	tr := &traffic{t: t}
	for server, rate := range map[string]int{vm.Named: queriesPerSecond * 9 / 10, vm.Named6: queriesPerSecond / 10} {
		l, err := load.Start(load.Config{
			Server: netip.AddrPortFrom(netip.MustParseAddr(server), 53), Rate: rate,
			Kept: 0.2, TCP: 0.05, Enter: m.Net.Run,
			Expect: &load.Expectation{
				Questions: []load.Question{
					{Name: vm.Mesh, Addresses: load.Addrs(vm.MeshIP), Weight: 4},
					{Name: "*.example.org", Addresses: load.Addrs(vm.NamedIP)},
				},
				Foreign: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")},
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Stop() })
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

// stop stops the queries, logs the reports, and returns the number of queries that ended in
// other ways than those.
func (tr *traffic) stop(allowed ...load.Kind) (bad int) {
	tr.t.Helper()
	for _, l := range tr.loads {
		report := l.Stop()
		tr.t.Logf("%v", report)
		for kind, n := range report.Counts {
			if !slices.Contains(allowed, kind) {
				bad += n
			}
		}
	}
	return bad
}
