package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/internal/family"
)

// K19: to which destinations queries pass, for the states of the ways to the nameservers.
func TestPassing(t *testing.T) {
	t.Parallel()
	const one, two, over6, all, all6 = "192.0.2.1", "192.0.2.2", "100::53", "0.0.0.0/0", "::/0"
	for name, test := range map[string]struct {
		known map[string]WayState
		want  []string
	}{
		"reached":                       {map[string]WayState{one: WayReached}, nil},
		"one of two is broken":          {map[string]WayState{one: WayReached, two: WayBroken}, []string{two + "/32"}},
		"one is broken, one is unknown": {map[string]WayState{one: WayUnknown, two: WayBroken}, []string{two + "/32"}},
		"all are broken":                {map[string]WayState{one: WayBroken, two: WayBroken, over6: WayReached}, []string{all}},
		"the other is not known":        {map[string]WayState{one: WayBroken, over6: WayUnknown}, []string{all, all6}},
		"the agent may not forward":     {map[string]WayState{one: WayBarred}, []string{all, all6}},
		"the agent is silent":           {map[string]WayState{one: WaySilent}, nil},
		"capture is off":                {nil, nil},
		"IPv6 alone is broken":          {map[string]WayState{one: WayReached, over6: WayBroken}, []string{all6}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var ways []Way
			for addr, state := range test.known {
				ways = append(ways, Way{Nameserver: netip.MustParseAddr(addr), State: state})
			}
			var got []string
			for _, prefix := range slices.Concat(passing(ways)[family.IPv4], passing(ways)[family.IPv6]) {
				got = append(got, prefix.String())
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("%v, want %v", got, test.want)
			}
		})
	}
}

// K10, K19: what a probe and that of the listener after it show. The rules are looked at, also if nothing accepts TCP.
func TestStateOf(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		result, direct probe.State
		want           WayState
	}{
		{probe.Agent, "", WayReached},
		{probe.Other, probe.Agent, WayElsewhere}, {probe.Other, probe.Silent, WayElsewhere},
		{probe.Silent, probe.Agent, WayBroken}, {probe.Closed, probe.Agent, WayBroken}, {probe.Barred, probe.Barred, WayBroken},
		{probe.Absent, probe.Agent, WayUnknown}, {probe.Unsent, probe.Agent, WayUnknown}, {probe.Silent, probe.Absent, WayUnknown},
		{probe.Silent, probe.Silent, WaySilent}, {probe.Barred, probe.Closed, WaySilent},
	} {
		if got := stateOf(probe.Result{State: test.result}, probe.Result{State: test.direct}); got != test.want {
			t.Errorf("%s, %s: %s, want %s", test.result, test.direct, got, test.want)
		}
	}
	looks, server := 0, netip.MustParseAddr("192.0.2.1")
	ended, end := context.WithCancel(t.Context())
	end() // the probe is not sent
	w := &ways{onMiss: func() { looks++ }, isBarred: func() bool { return false }, log: slog.New(slog.DiscardHandler),
		known: map[netip.Addr]*way{server: {}}, families: map[family.Family]*probedFamily{family.IPv4: {}},
		direct: func(context.Context, family.Family, string) probe.Result { return probe.Result{State: probe.Silent} }}
	if way := w.ask(ended, server, []string{"tcp"}); way.State != WayReached || looks != 1 {
		t.Errorf("state %q, %d looks", way.State, looks)
	}
	for range 2 * wayLooks {
		w.record([]Way{{Nameserver: server, State: WayElsewhere}})
	}
	if looks != 1+wayLooks {
		t.Errorf("%d looks", looks)
	}
}

// V2: the lease is renewed while a listener is slow, for 3 s after its last answer, and interruptions have their causes.
func TestPatience(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		renewals := 0
		w := &ways{
			renew:  func(family.Family) error { renewals++; return nil },
			lapses: lapses{log: slog.New(slog.DiscardHandler)}, families: map[family.Family]*probedFamily{family.IPv4: {}}, looked: time.Now(),
		}
		lease := w.families[family.IPv4]
		look := func(times int, every time.Duration, want LapseCause, renewed int) {
			t.Helper()
			w.lapses.known, renewals, lease.answered = nil, 0, time.Now()
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
		look(2, 20*time.Second, LapseStandstill, 2) // the silence begins after the standstill
	})
}

// K15: which probes mean that the agent hangs: a listener that has answered is silent, or all are; not if none was sent.
func TestHangs(t *testing.T) {
	t.Parallel()
	both, answered := []probe.Result{{Network: "udp", To: "v4"}, {Network: "udp", To: "v6"}}, map[string]bool{}
	const yes, no, unsent = probe.Agent, probe.Silent, probe.Unsent
	for i, step := range []struct {
		v4, v6 probe.State
		want   bool
	}{{no, no, true}, {no, yes, false}, {unsent, unsent, false}, {yes, no, true}, {yes, unsent, false}, {no, yes, true}} {
		if both[0].State, both[1].State = step.v4, step.v6; hangs(answered, both) != step.want {
			t.Errorf("step %d: want %v", i, step.want)
		}
	}
}
