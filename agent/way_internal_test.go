package agent

import (
	"log/slog"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/nametap/nametap/internal/family"
)

// K19: to which destinations queries pass, for the states of the ways to the nameservers.
func TestPassing(t *testing.T) {
	t.Parallel()
	one, two := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	for name, test := range map[string]struct {
		targets []netip.Addr
		known   map[netip.Addr]WayState
		want    []netip.Prefix
	}{
		"reached":                       {[]netip.Addr{one}, map[netip.Addr]WayState{one: WayReached}, nil},
		"one of two is broken":          {[]netip.Addr{one, two}, map[netip.Addr]WayState{one: WayReached, two: WayBroken}, []netip.Prefix{netip.MustParsePrefix("192.0.2.2/32")}},
		"one is broken, one is unknown": {[]netip.Addr{one, two}, map[netip.Addr]WayState{two: WayBroken}, []netip.Prefix{netip.MustParsePrefix("192.0.2.2/32")}},
		"all are broken":                {[]netip.Addr{one, two}, map[netip.Addr]WayState{one: WayBroken, two: WayBroken}, []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}},
		"the agent may not forward":     {[]netip.Addr{one}, map[netip.Addr]WayState{one: WayBarred}, []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}},
		"the agent is silent":           {[]netip.Addr{one}, map[netip.Addr]WayState{one: WaySilent}, nil},
		"capture is off":                {nil, map[netip.Addr]WayState{one: WayBroken}, nil},
		"the broken one is not probed":  {[]netip.Addr{two}, map[netip.Addr]WayState{one: WayBroken, two: WayReached}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			known := make(map[netip.Addr]*way)
			for addr, state := range test.known {
				known[addr] = &way{Way: Way{Nameserver: addr, State: state}}
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

// V2: the lease is renewed while a listener is slow, for 3 s after its last answer, and interruptions have their causes.
func TestPatience(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		renewals, drops := 0, uint64(5)
		w := &ways{
			renew: func(family.Family) (bool, error) { renewals++; return false, nil }, drops: func() uint64 { return drops },
			lapses: lapses{log: slog.New(slog.DiscardHandler)}, leases: map[family.Family]*leaseState{family.IPv4: {}}, looked: time.Now(),
		}
		lease := w.leases[family.IPv4]
		look := func(times int, every time.Duration, want LapseCause, renewed int) {
			t.Helper()
			w.lapses.known, renewals, lease.answered, lease.drops = nil, 0, time.Now(), 5
			for range times {
				time.Sleep(every) //nolint:forbidigo // advances the clock of the bubble
				w.noteStandstill()
				w.renewLease(family.IPv4)
			}
			var got LapseCause
			for _, lapse := range w.lapses.list() {
				got += lapse.Cause
			}
			if got != want || renewals != renewed {
				t.Errorf("%d renewals, want %d; cause %q, want %q", renewals, renewed, got, want)
			}
		}
		look(6, wayInterval, "", 6)
		look(9, wayInterval, LapseSilent, 6)
		drops++
		look(9, wayInterval, LapseQueue, 6)
		look(2, 20*time.Second, LapseStandstill, 2) // the silence begins after the standstill
	})
}

// K15: which probes mean that the agent hangs: a listener that has answered is silent, or all are; not if none was sent.
func TestHangs(t *testing.T) {
	t.Parallel()
	both, answered := []Probe{{Network: "udp", To: "v4"}, {Network: "udp", To: "v6"}}, map[string]bool{}
	const yes, no, unsent = ProbeAgent, ProbeSilent, ProbeUnsent
	for i, step := range []struct {
		v4, v6 ProbeState
		want   bool
	}{{no, no, true}, {no, yes, false}, {unsent, unsent, false}, {yes, no, true}, {yes, unsent, false}, {no, yes, true}} {
		if both[0].State, both[1].State = step.v4, step.v6; hangs(answered, both) != step.want {
			t.Errorf("step %d: want %v", i, step.want)
		}
	}
}
