package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// tooMany is how many wrong answers end the test early.
const tooMany = 1000

// manyQueries is how many queries are enough to see that the heap grows.
const manyQueries = 100_000

var (
	randomQueries = flag.Int("random.queries", 20_000, "how many random queries TestRandomQueries sends")
	randomRate    = flag.Int("random.rate", 5000, "its queries a second")
	randomSeed    = flag.Uint64("random.seed", uint64(time.Now().UnixNano()), "determines its queries, faults and changes, and their order; logged")
	randomAgent   = flag.String("random.agent", "nametap", "the command that it tests")
)

// A randomWorld is an agent, its nameservers and its clients.
type randomWorld struct {
	*liveAgent
	judge      *judge
	resolvConf string
	port53     bool // resolv.conf can name the nameservers
	began      time.Time

	left, sent, abandoned atomic.Int64
	readers               sync.WaitGroup
	ports                 sync.Map // addresses of sockets that were closed while queries waited

	mu       sync.Mutex
	notes    []dated[string]
	failures int
	shown    []string
}

// note notes an event.
func (w *randomWorld) note(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.notes = append(w.notes, dated[string]{value: text, begun: time.Now()})
}

// fail notes a query without a right answer.
func (w *randomWorld) fail(q *question, m *dns.Msg, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failures++; w.failures == tooMany {
		w.left.Store(0)
	}
	if len(w.shown) >= 30 {
		return
	}
	now := time.Now()
	var b strings.Builder
	fmt.Fprintf(&b, "%s: ", now.Sub(w.began).Round(time.Millisecond))
	sent := now
	if q != nil {
		sent = q.sent
		fmt.Fprintf(&b, "%v, sent at %s: ", q, q.sent.Sub(w.began).Round(time.Millisecond))
	}
	fmt.Fprintf(&b, "%v\n", err)
	if m != nil {
		fmt.Fprintf(&b, "%.1500s", m.String())
	}
	for _, n := range w.notes {
		if d := n.begun.Sub(sent); -7*time.Second < d {
			fmt.Fprintf(&b, "\n\t%+.3fs %s", d.Seconds(), n.value)
		}
	}
	w.shown = append(w.shown, b.String())
}

// startRandom starts an agent with three groups of nameservers.
func startRandom(t *testing.T) *randomWorld {
	t.Helper()
	w := &randomWorld{judge: new(judge), resolvConf: filepath.Join(t.TempDir(), "resolv.conf"), began: time.Now()}
	first, port53 := nameserverBlock()
	if w.port53 = port53; !port53 {
		t.Log("resolv.conf names no nameserver, because port 53 cannot be used")
	}
	for number, servers := range []int{groupA: 3, groupB: 2, routeGroup: 2} {
		w.judge.groups = append(w.judge.groups, startGroup(t, number, servers, first))
	}
	start := knobs{upstream: groupA, ttl: 30}
	w.setAll(start, groupA)
	replaceFile(t, w.resolvConf, w.resolvConfText(w.judge.groups[groupA].servers))
	w.liveAgent = startLive(t, w.configText(start, nil), "--resolv-conf", w.resolvConf)
	w.judge.generation.begin(0)
	w.xds.Push(tableOf(0))
	w.judge.generation.end()
	wait.Until(t, "the agent has the table", func() bool {
		text, err := w.exchange("h0")
		return err == nil && strings.HasSuffix(text, " "+meshAddress(0, 0))
	})
	return w
}

// ask sends queries until so many more have been sent and answered.
func (w *randomWorld) askAll(queries int, random *rand.Rand) {
	const clients = 25
	w.left.Store(int64(queries))
	var asking sync.WaitGroup
	for range clients {
		seed := random.Uint64()
		asking.Go(func() {
			w.client(rand.New(rand.NewPCG(seed, 0)), clients*time.Second/time.Duration(*randomRate))
		})
	}
	asking.Wait()
	w.readers.Wait()
}

// Usage is what the agent uses.
type usage struct {
	descriptors, goroutines int
	heap                    float64
}

// metrics returns the agent's metrics without labels.
func (w *randomWorld) metrics() map[string]float64 {
	w.tb.Helper()
	metrics := map[string]float64{}
	for line := range strings.Lines(get(w.tb, "http://"+w.status+"/metrics")) {
		name, text, _ := strings.Cut(strings.TrimSpace(line), " ")
		if value, err := strconv.ParseFloat(text, 64); err == nil {
			metrics[name] = value
		}
	}
	return metrics
}

// descriptors returns the number of descriptors that the agent has open, and the names of those that are sockets.
func (w *randomWorld) descriptors() int {
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", w.process.Pid))
	if err != nil {
		w.tb.Fatal(err)
	}
	return len(files)
}

// rest waits until the agent has nothing in flight and uses no more descriptors and goroutines than before, with an
// empty cache. It returns what the agent uses after collections of garbage.
func (w *randomWorld) rest(t *testing.T, before usage) usage {
	t.Helper()
	w.command("cache", "flush")
	var m map[string]float64
	var now usage
	deadline := time.Now().Add(wait.Limit)
	for {
		m = w.metrics()
		now = usage{descriptors: w.descriptors(), goroutines: int(m["go_goroutines"])}
		if m["nametap_dns_inflight"] == 0 && now.descriptors <= before.descriptors && now.goroutines <= before.goroutines {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("without queries, the agent has %v in flight, %d descriptors (before: %d) and %d goroutines (before: %d)",
				m["nametap_dns_inflight"], now.descriptors, before.descriptors, now.goroutines, before.goroutines)
			w.dump(t)
		}
		pause(t.Context(), rand.New(rand.NewPCG(0, 0)), 100*time.Millisecond, 101*time.Millisecond)
	}
	collections := m["go_gc_duration_seconds_count"]
	wait.Until(t, "garbage is collected twice", func() bool { m = w.metrics(); return m["go_gc_duration_seconds_count"] >= collections+2 })
	now.heap = m["go_memstats_heap_alloc_bytes"]
	return now
}

// dump ends the test, and the agent in a way that its log gets its goroutines.
func (w *randomWorld) dump(t *testing.T) {
	t.Helper()
	_ = w.process.Signal(syscall.SIGQUIT)
	wait.Until(t, "the agent has written its goroutines", func() bool { return w.log.Count("goroutine 1 ") > 0 })
	for _, text := range w.shown {
		t.Log(text)
	}
	t.FailNow()
}

// F3, F4, F8, F10, F11, F12, F17, F18, N5, R10, A12: random queries get one right answer each, while nameservers
// fail in all ways and all settings change, and the agent uses no more afterwards than before.
func TestRandomQueries(t *testing.T) {
	t.Logf("-random.seed=%d repeats the queries and the order of events", *randomSeed)
	random := rand.New(rand.NewPCG(*randomSeed, 0))
	debug.SetGCPercent(400)
	w := startRandom(t)
	done := make(chan struct{})
	defer close(done)
	go w.judge.stalls.run(w.process.Pid, done)

	idle := usage{descriptors: w.descriptors() + 2, goroutines: int(w.metrics()["go_goroutines"]) + 4} // with those of requests for metrics
	before := idle
	w.askAll(*randomQueries/10, random)
	if *randomQueries >= manyQueries {
		w.hangUpAll(t)
		before = w.rest(t, idle)
	}

	ctx, cancel := context.WithCancel(t.Context())
	var events sync.WaitGroup
	events.Go(func() { w.pushes(ctx, rand.New(rand.NewPCG(*randomSeed, 1))) })
	events.Go(func() { w.changes(ctx, rand.New(rand.NewPCG(*randomSeed, 2))) })
	for i, g := range w.judge.groups {
		events.Go(func() { w.disturb(ctx, g, rand.New(rand.NewPCG(*randomSeed, uint64(10+i)))) })
	}
	w.askAll(*randomQueries*8/10, random)
	cancel()
	events.Wait()
	w.note("no more changes")
	pause(t.Context(), random, time.Second, time.Second+1)
	w.judge.calm = true
	w.askAll(*randomQueries/10, random)
	w.hangUpAll(t)
	after := w.rest(t, idle)
	w.report(t, before, after)
}

// hangUpAll closes the nameservers' connections, which the agent would keep for a while.
func (w *randomWorld) hangUpAll(t *testing.T) {
	t.Helper()
	for _, g := range w.judge.groups {
		for _, s := range g.servers {
			s.Disconnect()
		}
	}
}

// report logs figures and fails the test for wrong answers and leaks.
func (w *randomWorld) report(t *testing.T, before, after usage) {
	t.Helper()
	j := w.judge
	t.Logf("%d queries sent in %v; %d answered, %d of these for mesh names; %d abandoned by their clients", w.sent.Load(),
		time.Since(w.began).Round(time.Second), j.answers, j.mesh, w.abandoned.Load())
	t.Logf("slowest: %v, for mesh names %v", j.slowest, j.slowestMesh)
	t.Logf("right because of faults only: %d failures, %d truncated replies, %d without signatures", j.failures, j.truncated, j.unsigned)
	t.Logf("events: %d; without a processor for %v, the agent's threads for %v", len(w.notes), j.stalls.between(w.began, time.Now()), waitedFor(w.process.Pid))
	t.Logf("before: %+v, after: %+v", before, after)
	if *randomQueries >= manyQueries && after.heap > before.heap*1.25+2<<20 {
		t.Errorf("the heap has grown from %.0f to %.0f bytes", before.heap, after.heap)
	}
	if w.failures > 0 {
		t.Errorf("%d queries without one right answer", w.failures)
		for _, text := range w.shown {
			t.Log(text)
		}
	}
	if min := *randomQueries / 2; j.answers < min {
		t.Errorf("%d answers, want %d at least", j.answers, min)
	}
}

// command runs a subcommand of nametap for the agent.
func (w *randomWorld) command(args ...string) {
	command := exec.Command(*randomAgent, append(args, "--status-addr", w.status)...)
	command.Env = w.environ
	if out, err := command.CombinedOutput(); err != nil {
		w.tb.Errorf("nametap %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// Knobs are the settings that change.
type knobs struct {
	upstream             int // a group, or neverFrom for that of resolv.conf
	route, bypass, local bool
	ttl                  uint32
	others               []string // lines that change no answer
}

// configText returns the config file of settings. random decides the order of nameservers; nil keeps it.
func (w *randomWorld) configText(k knobs, random *rand.Rand) string {
	var servers []string
	add := func(group int, prefix string) {
		for _, s := range shuffled(random, w.judge.groups[group].servers) {
			servers = append(servers, prefix+s.Addr.String())
		}
	}
	if k.upstream >= 0 {
		add(k.upstream, "")
	}
	if k.route {
		add(routeGroup, "route.example=")
	}
	lines := append([]string{"upstream: [" + strings.Join(servers, ", ") + "]", fmt.Sprintf("ttl: %ds", k.ttl)}, k.others...)
	if k.bypass {
		lines = append(lines, "bypass: [byp.example]")
	}
	if k.local {
		lines = append(lines, "local-only: [loc.example]")
	}
	return strings.Join(lines, "\n") + "\n"
}

func shuffled[T any](random *rand.Rand, list []T) []T {
	list = slices.Clone(list)
	if random != nil {
		random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	}
	return list
}
