package soak

import (
	"context"
	"flag"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

var (
	duration = flag.Duration("soak.for", 3*time.Minute, "how long rounds begin")
	rate     = flag.Int("soak.rate", 1000, "queries a second")
	seed     = flag.Uint64("soak.seed", uint64(time.Now().UnixNano()), "determines the faults; logged, to repeat a run")
)

func TestMain(m *testing.M) {
	os.Exit(lab.Main(m, "ip", "iptables-nft", "ip6tables-nft", "nft"))
}

const (
	// timeout is when a query is lost.
	timeout = 3 * time.Second
	// slowest is how long after the end of its faults a round may have bad queries: until the second check of the rules,
	// which drops conntrack entries of replies that were in flight, or until failures have left the cache, and then as
	// long as a query in flight.
	slowest = 20 * time.Second
)

// A fault is something that fails for a while.
type fault struct {
	name string
	// begin begins the fault, and returns what ends it.
	begin func() (end func())
	// mesh and forwarded are the ways in which queries may end, besides with a right answer.
	mesh, forwarded []load.Kind
}

// faults returns all faults.
func (w *world) faults(random *rand.Rand) []fault {
	inFlight := []load.Kind{load.Lost, load.Unreachable}
	escaped := []load.Kind{load.Foreign, load.Failed, load.Unreachable, load.Lost, load.Unsent}
	nothing := func() {}
	answer := func(handler fakedns.Handler, addrs ...string) {
		for _, addr := range addrs {
			w.nameservers[addr].Handle(handler)
		}
	}
	failure := func(addrs ...string) func() func() {
		return func() func() {
			answer([]fakedns.Handler{fakedns.Rcode(dns.RcodeServerFailure), fakedns.Rcode(dns.RcodeRefused), fakedns.Silence}[random.IntN(3)], addrs...)
			return func() { answer(records, addrs...) }
		}
	}
	agentEnds := func(signal syscall.Signal) func() func() {
		return func() func() {
			w.tables.restarted()
			w.agent.Signal(syscall.SIGCONT) // a stopped agent would never get the signal
			w.agent.Await("the agent runs", func() bool { return w.levels()[0] > 0 })
			w.agent.End(signal)
			w.tables.restarted()
			w.startAgent()
			return nothing
		}
	}
	return []fault{
		{name: "the control plane is away", begin: func() func() {
			w.control.End([]os.Signal{syscall.SIGTERM, syscall.SIGKILL}[random.IntN(2)])
			return w.startControl
		}},
		{name: "the agent is restarted", begin: agentEnds(syscall.SIGUSR1)}, // it leaves the rules to the next one
		{name: "the agent is killed", begin: agentEnds(syscall.SIGKILL), mesh: inFlight, forwarded: inFlight},
		{name: "the agent hangs", begin: func() func() {
			w.agent.Signal(syscall.SIGSTOP)
			return func() { w.agent.Signal(syscall.SIGCONT) }
		}, mesh: escaped, forwarded: escaped}, // after the lease of the rules, queries pass it
		{name: "a nameserver fails", begin: failure(b4)},
		// REFUSED counts as foreign.
		{name: "all nameservers fail", begin: failure(a4, a6, b4), forwarded: []load.Kind{load.Failed, load.Foreign, load.Lost}},
		{name: "resolv.conf changes", begin: func() func() {
			w.writeResolvConf([]string{a4, b4}[random.IntN(2)])
			return func() { w.writeResolvConf(a4, a6, b4) }
		}},
		{name: "rules are flushed", begin: func() func() {
			w.host.Exec("sh", "-c", []string{
				"iptables-nft -w -t nat -F", "ip6tables-nft -w -t nat -F OUTPUT", "iptables-nft -w -t raw -F; ip6tables-nft -w -t raw -F", "nft flush ruleset",
				`printf '*nat\nCOMMIT\n' | iptables-nft-restore -w`,
			}[random.IntN(5)])
			return nothing
		}, mesh: escaped, forwarded: escaped},
	}
}

// TestSoak runs the agent under load while everything around it fails.
func TestSoak(t *testing.T) {
	t.Logf("-soak.seed=%d repeats the faults", *seed)
	random := rand.New(rand.NewPCG(*seed, 0)) //nolint:gosec // a test's choice
	w := newWorld(t)
	idle := w.levels()
	loads := []*load.Load{
		w.startLoad(a4, *rate*7/10, w.tables.questions()), w.startLoad(a6, *rate/10, w.tables.questions()), w.startLoad(a4, *rate*2/10, forwardedQuestions()),
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var pushing sync.WaitGroup
	pushing.Go(func() {
		for clock.Sleep(ctx, time.Second) {
			if _, err := w.tables.push(); err != nil {
				t.Errorf("writing a table: %v", err)
			}
		}
	})
	all := w.faults(random)
	for began := time.Now(); time.Since(began) < *duration && !t.Failed(); {
		random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		w.round(random, loads, all[:1+random.IntN(3)])
	}
	cancel()
	pushing.Wait()
	for _, l := range loads {
		t.Logf("%v", l.Stop())
	}
	wait.Until(t, "the agent has as many goroutines and descriptors as before the loads", func() bool {
		now := w.levels()
		return now[0] > 0 && now[0] <= idle[0]+2 && now[1] <= idle[1]+2
	})
	w.agent.End(syscall.SIGTERM)
	if rules := w.host.Rules(); strings.Contains(rules, "NAMETAP") {
		t.Errorf("rules are left:\n%s", rules)
	}
}

// levels returns the goroutines and the descriptors of the agent.
func (w *world) levels() [2]float64 {
	return [2]float64{w.host.Metric(lab.AgentStatus, "go_goroutines"), w.host.Metric(lab.AgentStatus, "process_open_fds")}
}

// round begins faults, ends them, and waits until no query ends badly for longer than one can be in flight, and the newest
// table has come.
func (w *world) round(random *rand.Rand, loads []*load.Load, faults []fault) {
	w.t.Helper()
	var names []string
	allowed := make([][]load.Kind, 2)
	var ends []func()
	for _, f := range faults {
		names = append(names, f.name)
		allowed[0], allowed[1] = append(allowed[0], f.mesh...), append(allowed[1], f.forwarded...)
		ends = append(ends, f.begin())
	}
	time.Sleep(time.Duration(random.Int64N(int64(4 * time.Second)))) //nolint:forbidigo // the faults last
	for _, end := range slices.Backward(ends) {
		end()
	}
	ended, counts, lag := time.Now(), map[load.Kind]int{}, time.Duration(0)
	for quiet := time.Now(); time.Since(quiet) < timeout+time.Second; time.Sleep(100 * time.Millisecond) { //nolint:forbidigo // the queries go on
		for i, l := range loads {
			r := l.Cut()
			lag = max(lag, r.Lag)
			for kind, n := range r.Counts {
				if kind == load.Right {
					continue
				}
				quiet = time.Now()
				counts[kind] += n
				// On a busy machine, others than the load do not get the processor either.
				if !slices.Contains(allowed[i/2], kind) && (kind == load.Wrong || lag < time.Second) {
					w.t.Errorf("%v: %v", names, r)
				}
			}
		}
		if took := time.Since(ended); took > slowest+lag && quiet.After(ended.Add(slowest)) {
			w.t.Fatalf("%v: queries still end badly %v after the end: %v", names, took, counts)
		}
	}
	newest, err := w.tables.push()
	if err != nil {
		w.t.Fatal(err)
	}
	wait.Until(w.t, "the newest table comes", func() bool { return w.tables.newest() >= newest })
	w.t.Logf("%v: over after %v, lag %v, %v", names, time.Since(ended).Round(time.Millisecond), lag.Round(time.Millisecond), maps.Clone(counts))
}
