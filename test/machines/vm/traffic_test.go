package vm_test

import (
	"net/netip"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// queriesPerSecond is the rate of the load of a machine.
const queriesPerSecond = 2000

// A traffic is the queries of a machine's programs to the nameserver in its resolv.conf.
type traffic struct {
	*load.Load
	t *testing.T
}

// startTraffic starts queries. Four of five are for the mesh name, the others for names that
// are in no cache. nametap must be running.
func startTraffic(t *testing.T, m *vm.Machine) *traffic {
	t.Helper()
	l, err := load.Start(load.Config{
		Server: netip.AddrPortFrom(netip.MustParseAddr(vm.Named), 53), Rate: queriesPerSecond,
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
	tr := &traffic{l, t}
	tr.more(queriesPerSecond)
	return tr
}

// more returns when n more queries have the right answer.
func (tr *traffic) more(n int) {
	tr.t.Helper()
	want := tr.Report().Count(load.Right) + n
	wait.Until(tr.t, "queries have answers", func() bool { return tr.Report().Count(load.Right) >= want })
}
