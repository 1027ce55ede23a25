// Package random sends an agent random queries while nameservers fail and settings change.
package random

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/leftout"
	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// tooMany is how many wrong answers end the test early.
const tooMany = 10_000

var (
	queries = flag.Int("random.queries", 20_000, "how many queries to send")
	rate    = flag.Int("random.rate", 2500, "queries a second, at most")
	seed    = flag.Uint64("random.seed", 1, "determines the queries, faults and changes, and their order; logged")
	program = flag.String("random.agent", "", "the nametap to test (default: built from the sources)")
)

// A world is an agent, its nameservers and its clients.
type world struct {
	tb                 testing.TB
	judge              *judge
	xds                *fakexds.Server
	agent              *os.Process
	environ            []string
	log                *testlog.Buffer
	dns, status        string
	config, resolvConf string
	began              time.Time
	left               atomic.Int64 // queries to send

	mu       sync.Mutex
	notes    []note
	findings []finding
}

// A note is an event.
type note struct {
	at   time.Time
	text string
}

// A finding is what is wrong, unless the machine stood still in a time.
type finding struct {
	q            *question
	m            *dns.Msg
	since, until time.Time
	err          error
}

// note notes an event.
func (w *world) note(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.notes = append(w.notes, note{time.Now(), text})
}

// wrong notes a finding.
func (w *world) wrong(f finding) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.findings = append(w.findings, f); len(w.findings) == tooMany {
		w.left.Store(0)
	}
}

// check judges a response.
func (w *world) check(q *question, m *dns.Msg, length int, received time.Time) {
	if err := checkHeader(q, m, length); err != nil {
		w.wrong(finding{q: q, m: m, err: err})
	} else if since, err := w.judge.judge(q, m, received); err != nil {
		w.wrong(finding{q, m, since, received, err})
	}
}

// atFirst are the settings at the start.
var atFirst = knobs{upstream: groupA, ttl: 30}

// start starts an agent with three groups of nameservers, and waits until it has the first table.
func start(t *testing.T) *world {
	t.Helper()
	dir := t.TempDir()
	w := &world{
		tb: t, judge: new(judge), began: time.Now(), log: testlog.New(t), xds: fakexds.Start(t, fakexds.Options{}),
		config: filepath.Join(dir, "nametap.yaml"), resolvConf: filepath.Join(dir, "resolv.conf"),
		environ: append(os.Environ(), "RUNTIME_DIRECTORY="+dir, "POD_NAME=web-0", "POD_NAMESPACE=ns1", "INSTANCE_IP=10.1.2.3", "NOTIFY_SOCKET="),
	}
	if os.Geteuid() != 0 {
		leftout.Test(t, "%s, its nameservers need root for port 53", t.Name())
	}
	block := fmt.Sprintf("127.%d.%d.", 16+rand.IntN(200), 1+rand.IntN(250)) // addresses that hardly another test uses
	if *program == "" {
		built, err := process.Build("nametap")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(built) })
		*program = filepath.Join(built, "nametap")
	}
	for number, servers := range []int{groupA: 3, groupB: 2, routeGroup: 2} {
		w.judge.groups = append(w.judge.groups, startGroup(t, number, servers, block))
	}
	w.dns, w.status = block+"100:15053", block+"100:15020"
	w.judge.resolvConf.set(groupA, func() { w.replace(w.resolvConf, w.resolvConfText(w.judge.groups[groupA].servers)) })
	w.judge.settings.set(atFirst, func() { w.replace(w.config, w.configText(atFirst, rand.New(rand.NewPCG(*seed, 3)))) })
	w.judge.generation.set(0, func() { w.xds.Push(tableOf(0)) })
	command := exec.Command(*program, "agent", "--config", w.config, "--xds-addr", w.xds.Addr(), "--xds-plaintext",
		"--dns-addr", w.dns, "--status-addr", w.status, "--resolv-conf", w.resolvConf, "--state-dir", filepath.Join(dir, "state"), "--drain", "0s")
	command.Env, command.Stderr = w.environ, w.log
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL} // without a terminal, and its ^C
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)                               // under nohup, the agent would ignore it, too
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	w.agent = command.Process
	t.Cleanup(func() {
		_ = w.agent.Signal(syscall.SIGTERM)
		if err := command.Wait(); err != nil {
			t.Errorf("%v\n%s", err, w.log)
		}
	})
	wait.Until(t, "the agent is ready", func() bool { return w.log.Count("msg=ready") > 0 })
	return w
}

// replace replaces a file.
func (w *world) replace(path, text string) {
	next := path + ".next"
	if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
		w.tb.Error(err)
	} else if err := os.Rename(next, path); err != nil {
		w.tb.Error(err)
	}
}

// ask sends queries, and waits until they have been answered.
func (w *world) ask(queries int, random *rand.Rand) {
	w.left.Store(int64(queries))
	var asking sync.WaitGroup
	for range clients {
		seed := random.Uint64()
		asking.Go(func() { w.client(rand.New(rand.NewPCG(seed, 0))) })
	}
	asking.Wait()
}

// Usage is what the agent uses: queries in flight, descriptors and goroutines.
type usage [3]float64

// uses returns what the agent uses.
func (w *world) uses(t *testing.T) (u usage) {
	t.Helper()
	resp, err := http.Get("http://" + w.status + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"nametap_dns_inflight", "process_open_fds", "go_goroutines"} {
		_, rest, _ := strings.Cut(string(text), "\n"+name+" ")
		line, _, _ := strings.Cut(rest, "\n")
		if u[i], err = strconv.ParseFloat(line, 64); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	return u
}

// rest waits until the agent uses no more than before.
func (w *world) rest(t *testing.T, before usage) {
	t.Helper()
	for _, g := range w.judge.groups {
		for _, s := range g.servers {
			s.Disconnect() // the agent would keep these connections for a while
		}
	}
	var now usage
	defer func() { t.Logf("before: %v, after: %v", before, now) }()
	wait.Until(t, "the agent uses no more than before", func() bool {
		now = w.uses(t)
		return now[0] <= before[0] && now[1] <= before[1] && now[2] <= before[2]
	})
}

// F3, F4, F8, F10, F11, F12, F17, F18, N5, R10, A12: random queries get one right answer each, while nameservers
// fail in all ways and all settings change, and the agent uses no more afterwards than before.
func TestRandomQueries(t *testing.T) {
	t.Logf("-random.seed=%d repeats the queries and the order of events", *seed)
	w := start(t)
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { w.judge.stalls.watch(ctx, w.agent.Pid, os.Getpid()) })
	idle := w.uses(t)
	idle[1], idle[2] = idle[1]+2, idle[2]+4 // with those of requests for metrics

	random := rand.New(rand.NewPCG(*seed, 0))
	w.ask(*queries/10, random)
	disturbing, calm := context.WithCancel(ctx)
	var events sync.WaitGroup
	events.Go(func() { w.pushes(disturbing, rand.New(rand.NewPCG(*seed, 1))) })
	events.Go(func() { w.changes(disturbing, rand.New(rand.NewPCG(*seed, 2))) })
	for i, g := range w.judge.groups {
		events.Go(func() { w.disturb(disturbing, g, rand.New(rand.NewPCG(*seed, uint64(10+i)))) })
	}
	w.ask(*queries*8/10, random)
	calm()
	events.Wait()
	w.note("no more changes")
	pause(ctx, random, time.Second, time.Second+1)
	w.judge.calm = true
	w.ask(*queries/10, random)
	w.rest(t, idle)
	cancel()
	watching.Wait()
	w.report(t)
}

// report logs figures, and fails the test for what is wrong.
func (w *world) report(t *testing.T) {
	t.Helper()
	j, failures := w.judge, 0
	j.calm = false
	for _, f := range w.findings {
		if stalled := j.stalls.between(f.since, f.until); stalled > 0 && !j.staysWrong(&f, stalled) {
			continue
		}
		if failures++; failures <= 30 {
			t.Log(w.describe(&f))
		}
	}
	took, stalled := time.Since(w.began), j.stalls.between(w.began, time.Now())
	t.Logf("%d answers in %v; %d events", j.answers, took, len(w.notes))
	t.Logf("the machine stood still for %v, and %d findings of these times do not count", stalled, len(w.findings)-failures)
	if failures > 0 {
		t.Errorf("%d queries without one right answer", failures)
	}
	if least := int(float64(*queries) / 2 * (1 - stalled.Seconds()/took.Seconds())); j.answers < least {
		t.Errorf("%d answers, want %d at least", j.answers, least)
	}
}

// describe returns a finding and the events around it.
func (w *world) describe(f *finding) string {
	var text strings.Builder
	if f.q != nil {
		fmt.Fprintf(&text, "%v, sent after %v: ", f.q, f.q.sent.Sub(w.began))
	}
	fmt.Fprintf(&text, "%v\n%.1500v", f.err, f.m)
	for _, n := range w.notes {
		if d := n.at.Sub(f.until); -7*time.Second < d && d < time.Second {
			fmt.Fprintf(&text, "\n\t%+.3fs %s", d.Seconds(), n.text)
		}
	}
	return text.String()
}
