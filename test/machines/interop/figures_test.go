package interop

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// A memory is what a process has in memory.
type memory struct{ resident, anonymous, peak int } // KiB

// String returns the figures in MiB.
func (m memory) String() string {
	mib := func(kib int) float64 { return float64(kib) / 1024 }
	return fmt.Sprintf("%.1f MiB resident, %.1f anonymous, peak %.1f", mib(m.resident), mib(m.anonymous), mib(m.peak))
}

// memory returns what the process has in memory now, and its peak since the start or resetPeak.
func (d *daemon) memory() memory {
	d.tb.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.cmd.Process.Pid))
	if err != nil {
		d.tb.Fatal(err)
	}
	var m memory
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		kib, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
		switch name {
		case "VmRSS":
			m.resident = kib
		case "RssAnon":
			m.anonymous = kib
		case "VmHWM":
			m.peak = kib
		}
	}
	return m
}

// resetPeak begins a new peak: earlier memory does not count.
func (d *daemon) resetPeak() {
	d.tb.Helper()
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", d.cmd.Process.Pid), []byte("5"), 0); err != nil {
		d.tb.Fatal(err)
	}
}

// processor returns the processor time that the process has used.
func (d *daemon) processor() time.Duration {
	d.tb.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.cmd.Process.Pid))
	if err != nil {
		d.tb.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), ") ") // after the name of the program, from field 3 on
	fields := strings.Fields(rest)
	user, errUser := strconv.Atoi(fields[14-3])
	system, errSystem := strconv.Atoi(fields[15-3])
	if errUser != nil || errSystem != nil {
		d.tb.Fatalf("%v: the times are not numbers", fields)
	}
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every architecture of Linux that Go supports
	return time.Duration(user+system) * tick
}

// settled waits until the anonymous memory of the process has stayed the same for 15 s, to 1 %, and
// returns what it has then.
func (d *daemon) settled() memory {
	d.tb.Helper()
	const quiet, share = 30, 100 // samples
	var last []int
	ticker := time.NewTicker(500 * time.Millisecond)
	defer ticker.Stop()
	limit := time.After(startLimit)
	for {
		select {
		case <-limit:
			d.tb.Fatalf("the memory of %s is not steady: %d KiB", d.cmd.Path, last)
		case <-ticker.C:
		}
		m := d.memory()
		if last = append(last, m.anonymous); len(last) > quiet {
			last = last[1:]
		}
		if lowest, highest := slices.Min(last), slices.Max(last); len(last) == quiet && (highest-lowest)*share <= highest {
			return m
		}
	}
}

// A span is a set of measured times.
type span []time.Duration

// String returns percentiles.
func (s span) String() string {
	if len(s) == 0 {
		return "none"
	}
	sorted := slices.Sorted(slices.Values(s))
	at := func(share float64) time.Duration {
		return sorted[min(int(share*float64(len(sorted))), len(sorted)-1)].Round(100 * time.Microsecond)
	}
	return fmt.Sprintf("p50 %v, p99 %v, at most %v (of %d)", at(0.5), at(0.99), at(1), len(sorted))
}

// median returns the time that half of the times are not above.
func (s span) median() time.Duration { return slices.Sorted(slices.Values(s))[(len(s)-1)/2] }

// worst returns the longest time.
func (s span) worst() time.Duration { return slices.Max(s) }

// page returns the answer of a status server in the place.
func (p place) page(url string) string {
	p.tb.Helper()
	client := http.Client{Timeout: wait.Limit, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
			p.Run(func() { conn, err = new(net.Dialer).DialContext(ctx, network, addr) })
			return conn, err
		},
	}}
	response, err := client.Get(url)
	if err != nil {
		p.tb.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		p.tb.Fatalf("%s: status %d: %s: %v", url, response.StatusCode, text, err)
	}
	return string(text)
}

// metric returns the sum of the values of a metric, over all labels.
func (p place) metric(url, name string) float64 {
	p.tb.Helper()
	sum, found := 0.0, false
	for line := range strings.Lines(p.page(url)) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if family, _, _ := strings.Cut(series, "{"); family != name {
			continue
		}
		number, err := strconv.ParseFloat(value, 64)
		if err != nil {
			p.tb.Fatalf("%s: %v", line, err)
		}
		sum, found = sum+number, true
	}
	if !found {
		p.tb.Fatalf("%s has no metric %s", url, name)
	}
	return sum
}

// builds returns how often nametap-discovery has built its tables.
func (d *discovery) builds() int {
	return int(d.metric("http://"+discoveryStatus+"/metrics", "nametap_discovery_builds_total"))
}

// pushes returns how many responses the agent has got from its control plane.
func (a *agent) pushes() int {
	return int(a.m.metric("http://"+statusAddr+"/metrics", "nametap_xds_pushes_total"))
}

// A resource is an element of /debug/objects.
type resource struct {
	Resource, Failure string
	Heard             time.Time
	FailingSince      time.Time `json:"failing_since"`
}

// resources returns the state of what nametap-discovery reads.
func (d *discovery) resources() []resource { return d.cluster.resources(discoveryStatus) }

// resources returns the state of what the nametap-discovery with a status address reads.
func (c *cluster) resources(status string) []resource {
	c.tb.Helper()
	var all []resource
	if err := json.Unmarshal([]byte(c.page("http://"+status+"/debug/objects")), &all); err != nil {
		c.tb.Fatal(err)
	}
	return all
}

// awaitHeard waits until every resource was heard of since a time. It asks ten times a second, so
// that the test adds little to the processor time of nametap-discovery.
func (d *discovery) awaitHeard(since time.Time) {
	d.tb.Helper()
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	wait.Until(d.tb, "nametap-discovery has read all objects again", func() bool {
		<-ticker.C
		return !slices.ContainsFunc(d.resources(), func(r resource) bool { return r.Failure != "" || r.Heard.Before(since) })
	})
}

// wantPopulation waits until an agent's table has the wanted hosts of the population.
func wantPopulation(t *testing.T, a *agent, want table) {
	t.Helper()
	var diff string
	defer func() {
		if diff != "" {
			t.Errorf("the API server (-) and the agent (+) have different tables:\n%.2000s", diff)
		}
	}()
	wait.Until(t, "the agent's table matches the API server", func() bool {
		diff = want.diff(a.table().scaled())
		return diff == ""
	})
}
