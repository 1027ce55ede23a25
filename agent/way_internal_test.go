package agent

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/internal/family"
)

// K19: to which destinations queries pass, for the states of the ways to the nameservers.
func TestPassing(t *testing.T) {
	t.Parallel()
	one, two := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	for name, test := range map[string]struct {
		targets []netip.Addr
		known   map[netip.Addr]problems.WayState
		want    []netip.Prefix
	}{
		"reached":                       {[]netip.Addr{one}, map[netip.Addr]problems.WayState{one: problems.WayReached}, nil},
		"one of two is broken":          {[]netip.Addr{one, two}, map[netip.Addr]problems.WayState{one: problems.WayReached, two: problems.WayBroken}, []netip.Prefix{netip.MustParsePrefix("192.0.2.2/32")}},
		"one is broken, one is unknown": {[]netip.Addr{one, two}, map[netip.Addr]problems.WayState{two: problems.WayBroken}, []netip.Prefix{netip.MustParsePrefix("192.0.2.2/32")}},
		"all are broken":                {[]netip.Addr{one, two}, map[netip.Addr]problems.WayState{one: problems.WayBroken, two: problems.WayBroken}, []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}},
		"the agent may not forward":     {[]netip.Addr{one}, map[netip.Addr]problems.WayState{one: problems.WayBarred}, []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}},
		"the agent is silent":           {[]netip.Addr{one}, map[netip.Addr]problems.WayState{one: problems.WaySilent}, nil},
		"capture is off":                {nil, map[netip.Addr]problems.WayState{one: problems.WayBroken}, nil},
		"the broken one is not probed":  {[]netip.Addr{two}, map[netip.Addr]problems.WayState{one: problems.WayBroken, two: problems.WayReached}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			known := make(map[netip.Addr]*way)
			for addr, state := range test.known {
				known[addr] = &way{Way: problems.Way{Nameserver: addr, State: state}}
			}
			var got []netip.Prefix
			w := ways{known: known,
				targets:    func(family.Family) []netip.Addr { return test.targets },
				setPassing: func(_ family.Family, to []netip.Prefix) { got = to }}
			w.updatePassing(family.IPv4)
			if diff := cmp.Diff(test.want, got, cmpopts.EquateComparable(netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("passing (-want +got):\n%s", diff)
			}
		})
	}
}
