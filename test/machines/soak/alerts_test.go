package soak

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
)

var hold = flag.Duration("soak.hold", 0, "how long a fault must last until its alert fires, in place of the times of rules.yaml; to try the test")

const (
	// scrapes is the longest time between two scrapes that deploy/prometheus/README.md allows.
	scrapes = 30 * time.Second
	// clears is how long after the end of a fault its alert ends.
	clears = 2 * time.Minute
	// quiet is how long no alert begins again.
	quiet = time.Minute
	// fires is how long after its time an alert fires: the agent notices the fault, within 30 s and the 15 s that a
	// problem has to last, and Prometheus sees that.
	fires = 2 * time.Minute

	rulesFile      = "../../../deploy/prometheus/rules.yaml"
	prometheusAddr = "127.0.0.1:9090"
)

// R4: each alert of deploy/prometheus fires in Prometheus while its fault lasts, once, and ends within 2 minutes after
// the fault. Each fault has an agent of its own, which has no other alert, and an agent without a fault has none. It takes
// as long as the longest time of a rule, 30 minutes.
func TestAlerts(t *testing.T) {
	f := newFleet(t)
	faults := faults()
	for i := range faults {
		f.add(&faults[i])
	}
	f.startPrometheus()
	wait.Until(t, "all agents are scraped", func() bool { return f.up() == len(faults) })
	for _, fault := range f.faults {
		if fault.begin != nil {
			fault.began = time.Now()
			fault.begin(fault.agent)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), f.longest()+fires)
	defer cancel()
	for !f.firing() && clock.Sleep(ctx, time.Second) {
		f.watch()
	}
	f.checkFired()
	ended := time.Now()
	for _, fault := range f.faults {
		if fault.end != nil {
			fault.end(fault.agent)
		}
	}
	t.Logf("all faults ended within %v", time.Since(ended).Round(time.Millisecond))
	for !f.over() && time.Since(ended) < clears+quiet && clock.Sleep(t.Context(), time.Second) {
		f.watch()
	}
	for until := time.Now().Add(quiet); time.Now().Before(until) && clock.Sleep(t.Context(), time.Second); {
		f.watch()
	}
	f.checkEnded(ended)
}

// A fleet is a Prometheus, and agents with a network each: the faults of one are none of the others.
type fleet struct {
	*world
	faults []*fault
	holds  map[string]time.Duration // of alerts, by name
	rules  string                   // the file
	client http.Client
	states map[alertKey]*alertState
}

// An alertKey is an alert of an agent.
type alertKey struct{ name, agent string }

// An alertState is what Prometheus has said of an alert.
type alertState struct {
	state        string // "" if it is over
	times        int    // that it has fired
	fired, ended time.Time
	summary      string
}

// newFleet makes the network of Prometheus.
func newFleet(t *testing.T) *fleet {
	t.Helper()
	need(t, "ip", "iptables-nft", "ip6tables-nft", "nft", "prometheus")
	f := &fleet{world: &world{tb: t, dir: logDir(t)}, states: map[alertKey]*alertState{}, holds: map[string]time.Duration{}}
	var err error
	if f.bin, err = process.Build("nametap"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(f.bin) })
	f.network = netns.New(t)
	f.client = http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			f.network.Run(func() { conn, err = new(net.Dialer).DialContext(ctx, network, address) })
			return conn, err
		},
	}}
	f.readRules()
	return f
}

// readRules reads how long each alert waits. With -soak.hold, it writes other rules, which differ in this only.
func (f *fleet) readRules() {
	f.tb.Helper()
	var err error
	if f.rules, err = filepath.Abs(rulesFile); err != nil {
		f.tb.Fatal(err)
	}
	text, err := os.ReadFile(f.rules)
	if err != nil {
		f.tb.Fatal(err)
	}
	waits := regexp.MustCompile(`(?m)^( +for:) (\S+)$`)
	if *hold != 0 {
		f.rules = filepath.Join(f.dir, "rules.yaml")
		text = waits.ReplaceAll(text, []byte("$1 "+hold.String()))
		if err := os.WriteFile(f.rules, text, 0o600); err != nil {
			f.tb.Fatal(err)
		}
	}
	names := regexp.MustCompile(`(?m)^ +- alert: (\w+)$`).FindAllSubmatch(text, -1)
	for i, match := range waits.FindAllSubmatch(text, -1) {
		if f.holds[string(names[i][1])], err = time.ParseDuration(string(match[2])); err != nil {
			f.tb.Fatal(err)
		}
	}
}

// longest returns the longest time from the beginning of a fault until its alerts should fire.
func (f *fleet) longest() (longest time.Duration) {
	for _, fault := range f.faults {
		for _, name := range fault.alerts {
			longest = max(longest, f.holds[name]+fault.delay(f))
		}
	}
	return longest
}

// startPrometheus starts Prometheus with the settings that deploy/prometheus/README.md has.
func (f *fleet) startPrometheus() {
	f.tb.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "global: {scrape_interval: %v}\nrule_files: [%s]\nscrape_configs:\n  - job_name: nametap\n    static_configs:\n", scrapes, f.rules)
	for _, fault := range f.faults {
		fmt.Fprintf(&b, "      - {targets: ['%s'], labels: {pod: %s}}\n", fault.agent.status(), fault.name)
	}
	path := filepath.Join(f.dir, "prometheus.yml")
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		f.tb.Fatal(err)
	}
	f.startService("prometheus", f.network, func() *exec.Cmd {
		cmd := exec.Command("prometheus", "--config.file="+path, "--storage.tsdb.path="+filepath.Join(f.dir, "prometheus"), "--web.listen-address="+prometheusAddr)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		return cmd
	})
}

// get reads an answer of Prometheus. It returns false without one.
func (f *fleet) get(path string, into any) bool {
	request, err := http.NewRequestWithContext(f.tb.Context(), http.MethodGet, "http://"+prometheusAddr+path, nil)
	if err != nil {
		return false
	}
	response, err := f.client.Do(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	return json.NewDecoder(response.Body).Decode(into) == nil
}

// up returns how many agents are scraped.
func (f *fleet) up() int {
	var answer struct {
		Data struct {
			ActiveTargets []struct{ Health string }
		}
	}
	f.get("/api/v1/targets", &answer)
	up := 0
	for _, target := range answer.Data.ActiveTargets {
		if target.Health == "up" {
			up++
		}
	}
	return up
}

// watch reads the alerts.
func (f *fleet) watch() {
	var answer struct {
		Data struct {
			Alerts []struct {
				Labels, Annotations map[string]string
				State               string
			}
		}
	}
	if !f.get("/api/v1/alerts", &answer) {
		return
	}
	now := time.Now()
	seen := map[alertKey]string{}
	for _, alert := range answer.Data.Alerts {
		key := alertKey{alert.Labels["alertname"], alert.Labels["pod"]}
		seen[key] = alert.State
		if f.states[key] == nil {
			f.states[key] = &alertState{}
		}
		f.states[key].summary = alert.Annotations["summary"]
	}
	for key, s := range f.states {
		state := seen[key]
		switch {
		case state == s.state:
			continue
		case state == "firing":
			s.times++
			if s.fired.IsZero() {
				s.fired = now
			}
		case s.state == "firing":
			s.ended = now
		}
		f.tb.Logf("%s %s of %s: %q, before %q", now.Format(timeFormat), key.name, key.agent, state, s.state)
		s.state = state
	}
}

// firing reports whether all alerts that are expected fire.
func (f *fleet) firing() bool {
	for _, fault := range f.faults {
		for _, name := range fault.alerts {
			if s := f.states[alertKey{name, fault.name}]; s == nil || s.state != "firing" {
				return false
			}
		}
	}
	return true
}

// over reports whether there is no alert.
func (f *fleet) over() bool {
	return !slices.ContainsFunc(slices.Collect(maps.Values(f.states)), func(s *alertState) bool { return s.state != "" })
}

// checkFired checks that all alerts that are expected fire, no other one has fired, and each in its time.
func (f *fleet) checkFired() {
	f.tb.Helper()
	covered := map[string]bool{}
	for _, fault := range f.faults {
		var firing []string
		for key, s := range f.states {
			if key.agent == fault.name && s.times > 0 {
				firing = append(firing, key.name)
			}
		}
		slices.Sort(firing)
		if !slices.Equal(firing, slices.Sorted(slices.Values(fault.alerts))) {
			f.tb.Errorf("%s: alerts %q have fired, want %q", fault.name, firing, fault.alerts)
		}
		for _, name := range fault.alerts {
			covered[name] = true
			s := f.states[alertKey{name, fault.name}]
			if s == nil || s.state != "firing" {
				f.tb.Errorf("%s: %s does not fire", fault.name, name)
				continue
			}
			if took := s.fired.Sub(fault.began); took < f.holds[name] || took > f.holds[name]+fault.delay(f)+fires {
				f.tb.Errorf("%s: %s fired after %v, its time is %v", fault.name, name, took, f.holds[name])
			}
		}
	}
	for name := range f.holds {
		if !covered[name] {
			f.tb.Errorf("no fault is one of %s", name)
		}
	}
}

// checkEnded checks that each alert has fired once and has ended in time, and logs a table.
func (f *fleet) checkEnded(ended time.Time) {
	f.tb.Helper()
	var b strings.Builder
	for _, fault := range f.faults {
		for _, name := range fault.alerts {
			s := f.states[alertKey{name, fault.name}]
			if s == nil {
				continue
			}
			if s.ended.IsZero() {
				s.ended = time.Now() // at least
			}
			took := s.ended.Sub(ended)
			fmt.Fprintf(&b, "\n%-26s %-10s for %-4v fired after %5.0f s, ended after %4.0f s  %s", name, fault.name, f.holds[name], s.fired.Sub(fault.began).Seconds(), took.Seconds(), s.summary)
			if s.state != "" || took > clears {
				f.tb.Errorf("%s: %s is %q, ended %v after the fault", fault.name, name, s.state, took)
			}
			if s.times != 1 {
				f.tb.Errorf("%s: %s has fired %d times", fault.name, name, s.times)
			}
		}
	}
	f.tb.Log(b.String())
	for key, s := range f.states {
		if s.state != "" {
			f.tb.Errorf("%s of %s is %q at the end", key.name, key.agent, s.state)
		}
	}
}
