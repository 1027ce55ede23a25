package soak

import (
	"context"
	"flag"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
)

var (
	duration = flag.Duration("soak.for", 20*time.Minute, "how long to soak")
	rate     = flag.Int("soak.rate", 2000, "queries a second")
	seed     = flag.Uint64("soak.seed", uint64(time.Now().UnixNano()), "determines the order of events; logged, to repeat a run")
)

// quietTime is how long the load goes on after the last disturbance, at the end.
const quietTime = 15 * time.Second

// TestSoak runs the agent under load while everything around it fails. In the first 60 % of
// the time the agent itself runs undisturbed, so that its memory, descriptors and goroutines
// can be compared. Then it is restarted, killed and stopped as well.
func TestSoak(t *testing.T) {
	t.Logf("seed %d: -soak.seed=%d repeats the order of events", *seed, *seed)
	w := newWorld(t)
	levels := w.begin()
	idle := levels.sample()
	began := time.Now()
	loads := w.startLoads()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var lanes sync.WaitGroup
	lanes.Go(func() { w.pushes(ctx) })
	lanes.Go(func() { levels.run(ctx) })
	lanes.Go(func() { w.watchPressure(ctx) })
	disturbed, calm := context.WithCancel(ctx)
	for i, disturb := range []func(context.Context, *rand.Rand){w.disturbControl, w.disturbNameservers, w.disturbRules} {
		lanes.Go(func() { disturb(disturbed, rand.New(rand.NewPCG(*seed, uint64(i)))) })
	}
	active := *duration - quietTime
	stable := time.Duration(float64(active) * 0.6)
	clock.Sleep(ctx, stable)
	steady := time.Now()
	lanes.Go(func() { w.disturbAgent(disturbed, rand.New(rand.NewPCG(*seed, 99))) })
	clock.Sleep(ctx, active-stable)
	calm()
	w.timeline.note("no more disturbances")
	clock.Sleep(ctx, quietTime)
	w.timeline.note("the loads end")
	queries := 0
	for _, l := range loads {
		report := l.Stop()
		queries += report.Queries
		t.Logf("%v", report)
	}
	cancel()
	lanes.Wait()

	w.judge(t, queries)
	levels.table(t)
	t.Logf("levels of the agent that ran undisturbed, of the control plane and of the host:")
	levels.compare(t, span{began.Add(stable / 4), began.Add(stable * 5 / 12)}, span{steady.Add(-stable / 6), steady}, *duration >= 10*time.Minute)
	w.checkLeaks(t, levels, idle)
	w.end(t)
}

// begin starts the control plane and the agent, and returns when DNS is captured.
func (w *world) begin() *levels {
	w.tb.Helper()
	if err := w.tables.push(); err != nil {
		w.tb.Fatal(err)
	}
	if err := os.WriteFile(w.resolvConf, []byte(resolvConfText([]string{a4, a6, b4})), 0o644); err != nil {
		w.tb.Fatal(err)
	}
	w.openSockets()
	w.control = w.startService("control", w.network, w.controlCommand)
	w.agent = w.startService("agent", w.host, w.agentCommand)
	levels := newLevels(w)
	wait.Until(w.tb, "the agent has the table", func() bool { return levels.metric("nametap_table_hosts") == hosts })
	wait.Until(w.tb, "DNS is captured", func() bool { return levels.metric("nametap_capture_on") == 1 })
	return levels
}

// startLoads starts a load for each family: a tenth of the queries is sent over IPv6.
func (w *world) startLoads() []*load.Load {
	w.tb.Helper()
	var loads []*load.Load
	for i, server := range []string{a4, a6} {
		l, err := load.Start(load.Config{
			Server: netip.AddrPortFrom(netip.MustParseAddr(server), 53), Rate: []int{*rate * 9 / 10, *rate / 10}[i],
			TCP: 0.05, Kept: 0.2, Expect: w.expectation(), Seed: *seed, Enter: w.host.Run, OnBad: w.timeline.onBad,
		})
		if err != nil {
			w.tb.Fatal(err)
		}
		w.tb.Cleanup(func() { l.Stop() })
		loads = append(loads, l)
	}
	return loads
}

// judge logs the bad queries that have a cause, and fails the test for all others.
func (w *world) judge(t *testing.T, queries int) {
	t.Helper()
	log, err := os.ReadFile(filepath.Join(w.dir, "agent.log"))
	if err != nil {
		t.Fatal(err)
	}
	longest, undelayed := w.timeline.readRepairs(string(log))
	t.Logf("the longest time from a flush to the repair of the rules: %v, while the machine was not busy and the agent ran: %v", longest, undelayed)
	if undelayed > repairTime {
		t.Errorf("the rules were repaired after %v", undelayed)
	}
	explained, busy, unexplained := w.timeline.judge()
	if float64(busy) > maxBusy*float64(queries) {
		t.Errorf("%d of %d queries failed while the machine was busy: give it less other work", busy, queries)
	}
	for _, cause := range slices.Sorted(maps.Keys(explained)) {
		t.Logf("%6d queries: %s", explained[cause], cause)
	}
	t.Logf("tables: %d pushes; the longest times that answers were behind: %v, and %v after the control plane or the agent was away; a restart went back by %d at most",
		len(w.tables.begun), w.tables.lags.usual, w.tables.lags.frozen, w.tables.lags.back)
	_, starts := w.agent.running()
	_, controls := w.control.running()
	t.Logf("starts: %d of the agent, %d of the control plane", starts, controls)
	if w.timeline.missed > 0 {
		t.Errorf("%d bad queries besides these were not judged", w.timeline.missed)
	}
	for i, q := range unexplained {
		if i == 20 {
			break
		}
		t.Logf("without a cause: %s %s%s", q.kind, q.Example, w.timeline.around(q.Sent))
	}
	if len(unexplained) > 0 {
		t.Errorf("%d bad queries without a cause", len(unexplained))
	}
	file, err := os.Create(filepath.Join(w.dir, "events.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	w.timeline.write(file)
}

// checkLeaks waits until the agent has as many goroutines and descriptors as before the
// loads.
func (w *world) checkLeaks(t *testing.T, levels *levels, idle sample) {
	t.Helper()
	// A nameserver over TCP keeps its connection for 30 s.
	var last sample
	deadline := time.Now().Add(wait.Limit)
	for ok := true; ok && time.Now().Before(deadline); ok = clock.Sleep(t.Context(), time.Second) {
		last = levels.sample()
		if last.goroutines >= 0 && last.goroutines <= idle.goroutines+2 && last.descriptors <= idle.descriptors+2 {
			break
		}
	}
	t.Logf("without queries: %d goroutines and %d descriptors before the loads, %d and %d after them",
		idle.goroutines, idle.descriptors, last.goroutines, last.descriptors)
	if last.goroutines > idle.goroutines+2 || last.descriptors > idle.descriptors+2 {
		t.Error("goroutines or descriptors are left")
		w.agent.signal(syscall.SIGQUIT, 0) // its log gets the goroutines
	}
}

// end stops the agent, which removes its rules.
func (w *world) end(t *testing.T) {
	t.Helper()
	w.agent.stop(syscall.SIGTERM)
	w.control.stop(syscall.SIGTERM)
	if rules := w.host.Rules(); strings.Contains(rules, "NAMETAP") {
		t.Errorf("rules are left:\n%s", rules)
	}
}
