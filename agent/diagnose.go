package agent

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/clock"
)

// diagnoseInterval is how often the readings for problems are taken.
const diagnoseInterval = 4 * clock.Tick

// A diagnosis keeps the lasting problems of an agent (package problems).
type diagnosis struct {
	core     *core
	unserved func() []string // returns why addresses other than those for DNS cannot be opened
	window   problems.Window

	mu       sync.Mutex
	refused  uint64      // number of queries that were refused because of a limit, as of the last tick
	refusing bool        // whether refused grew at the last tick
	repairs  uint64      // number of repairs of capture rules, as of the last reading
	repaired []time.Time // when readings found that repairs had grown
	refusals map[upstream.Spec]refusals
}

// refusals counts the refusals of a nameserver: its replies with a response code other than NOERROR and NXDOMAIN.
type refusals struct {
	count      uint64
	lastGrowth time.Time // when the count last grew
}

// refusedAt counts the refusals of a nameserver, and returns when a reading last noticed a new one.
func (d *diagnosis) refusedAt(now time.Time, s upstream.Status) time.Time {
	var count uint64
	for code, n := range s.Responses {
		if code != "NOERROR" && code != "NXDOMAIN" {
			count += n
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refusals == nil {
		d.refusals = make(map[upstream.Spec]refusals)
	}
	if known := d.refusals[s.Spec]; known.count != count {
		d.refusals[s.Spec] = refusals{count, now}
	}
	return d.refusals[s.Spec].lastGrowth
}

// run takes readings until ctx ends.
func (d *diagnosis) run(ctx context.Context) {
	due, stop := d.core.clock.Poll(diagnoseInterval, func() bool { return true })
	defer stop()
	for {
		select {
		case <-due:
			d.tick()
		case <-ctx.Done():
			return
		}
	}
}

// tick takes a reading.
func (d *diagnosis) tick() {
	refused := d.core.proxy.Overflows()
	d.mu.Lock()
	d.refusing, d.refused = refused > d.refused, refused
	d.mu.Unlock()
	d.add(*d.core.silent.Load())
}

// add takes a reading and returns the report. The parameter silent has a text for each listener that does not answer.
// It becomes part of the reading. While the agent drains, or its listeners are not open yet, add takes no reading and
// returns the previous report.
func (d *diagnosis) add(silent []string) problems.Report {
	c := d.core
	if c.draining.Load() || !c.open() {
		return d.window.Report()
	}
	now := time.Now()
	d.mu.Lock()
	refused, refusing := d.refused, d.refusing
	d.mu.Unlock()
	reading := &problems.Agent{
		Silent: silent, Missing: c.proxy.Missing(), Unserved: d.unserved(), StateDir: c.config.XDS.StateDir, Domain: c.proxy.ClusterDomain(),
		XDS: c.client.Status(), Token: c.client.Token(), Servers: d.servers(now), Refusing: refusing, Refused: refused,
		Failures: c.proxy.Failures(now.Add(-problems.FailuresSince)), Settings: c.fileSettings(),
		Conntrack: ConntrackEntries(), Descriptors: descriptors(), Memory: cgroupMemory(),
	}
	for _, self := range c.proxy.SelfUpstreams() {
		reading.Self = append(reading.Self, self.String())
	}
	if c.capture != nil {
		reading.Capture = c.capture.reading()
		d.noteRepairs(now, reading.Capture)
	}
	d.window.Add(now, problems.Find(&problems.Readings{Now: now, Agent: reading}), problems.Unread(reading))
	return d.window.Report()
}

// noteRepairs records whether capture rules were repaired since the last reading, and sets found.Repaired.
func (d *diagnosis) noteRepairs(now time.Time, found *problems.Capture) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if found.Repairs > d.repairs {
		d.repairs = found.Repairs
		d.repaired = append(d.repaired, now)
	}
	d.repaired = slices.DeleteFunc(d.repaired, func(at time.Time) bool { return now.Sub(at) > problems.RepairsIn })
	found.Repaired = slices.Clone(d.repaired)
}

// servers returns the nameservers in use.
func (d *diagnosis) servers(now time.Time) (servers []problems.Server) {
	c := d.core
	states := map[upstream.Spec]upstream.Status{}
	for _, s := range c.proxy.UpstreamStatus() {
		states[s.Spec] = s
	}
	for _, group := range c.proxy.UpstreamGroups() {
		for _, spec := range group.Servers {
			s := states[spec]
			s.Spec = spec // UpstreamStatus may not have the server before its first query
			servers = append(servers, problems.Server{Status: s, Suffix: group.Suffix, RefusedAt: d.refusedAt(now, s)})
		}
	}
	return servers
}

// Describe implements [prometheus.Collector].
func (d *diagnosis) Describe(metrics chan<- *prometheus.Desc) { metrics <- problemDesc() }

// Collect makes a metric for each code that any problem has: the number of problems with this code. If there is no
// problem, it makes one metric with the code none. A metric for every code would be too many series for thousands of
// agents.
func (d *diagnosis) Collect(metrics chan<- prometheus.Metric) {
	counts := map[problems.Code]int{}
	for _, p := range d.window.Report().Problems {
		counts[p.Code]++
	}
	if len(counts) == 0 {
		counts["none"] = 0
	}
	for code, count := range counts {
		metrics <- prometheus.MustNewConstMetric(problemDesc(), prometheus.GaugeValue, float64(count), string(code))
	}
}

func problemDesc() *prometheus.Desc {
	return prometheus.NewDesc("nametap_problem", "Problems that the agent has found, by code.", []string{"code"}, nil)
}
