package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/statedir"
)

// recordsInterval is how often the records of a guard are written.
const recordsInterval = time.Minute

// guardRecords keeps the records of a guard in a file, so that they survive a restart.
type guardRecords struct {
	guard *guard.Guard  // nil for none
	dir   *statedir.Dir // nil without a state directory
	log   *slog.Logger

	mu      sync.Mutex
	earlier guard.Records // of earlier agents
	read    bool          // whether earlier was read
	written []byte
	failed  string // the last error that was logged
}

func newGuardRecords(cfg *Config) *guardRecords {
	r := &guardRecords{guard: cfg.Guard, log: cfg.Logger}
	if cfg.XDS.StateDir != "" {
		r.dir = statedir.New(cfg.XDS.StateDir, "guard.lock")
	}
	return r
}

// run writes the records until ctx ends, and once more then.
func (r *guardRecords) run(ctx context.Context, c *clock.Clock) {
	if r.guard == nil {
		return
	}
	_, stop := c.Poll(clock.Tick, func() bool {
		r.guard.Sweep()
		return false
	})
	defer stop()
	due, stop := c.Poll(recordsInterval, func() bool { return true })
	defer stop()
	for ctx.Err() == nil {
		r.save()
		select {
		case <-due:
		case <-ctx.Done():
		}
	}
	r.save()
}

// all returns the records, with those of earlier agents.
func (r *guardRecords) all() guard.Records {
	r.mu.Lock()
	defer r.mu.Unlock()
	return guard.Merge(r.earlier, r.guard.Records())
}

// save writes the records if they have changed. Before it writes for the first time, it reads those of earlier agents.
func (r *guardRecords) save() {
	if r.dir == nil {
		return
	}
	err := r.dir.Lock()
	if err == nil && !r.read {
		err = r.readEarlier()
	}
	var text []byte
	if err == nil {
		text, err = json.MarshalIndent(r.all(), "", " ")
	}
	if err == nil && !bytes.Equal(text, r.written) {
		if err = r.dir.Write(guard.RecordsFile, text, []byte{'\n'}); err == nil {
			r.written = text
		}
	}
	switch {
	case err == nil:
		r.failed = ""
	case err.Error() != r.failed:
		r.failed = err.Error()
		r.log.Warn("the records of the guard cannot be saved; retrying once a minute", "file", r.dir.File(guard.RecordsFile), "error", err)
	}
}

// readEarlier reads the records of earlier agents. It sets a file aside that has none.
func (r *guardRecords) readEarlier() error {
	text, err := os.ReadFile(r.dir.File(guard.RecordsFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var earlier guard.Records
	if err == nil && json.Unmarshal(text, &earlier) != nil {
		aside, err := r.dir.SetAside(guard.RecordsFile, "damaged")
		if err != nil {
			return err
		}
		r.log.Warn("the file with the records of the guard is damaged", "moved to", aside)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.earlier, r.read = earlier, true
	return nil
}

// GuardStatus is the state of a guard, as `nametap guard status` shows it.
type GuardStatus struct {
	Mode        guard.Mode `json:"mode"`
	File        string     `json:"file"`
	Hash        string     `json:"sha256"`
	InUse       time.Time  `json:"inUse"` // since when
	PolicyNames int        `json:"policyNames"`
	PolicyRules int        `json:"policyRules"`
	Direct      []string   `json:"direct,omitempty"`
	Private     bool       `json:"private"` // whether allowed names may lead to private addresses
	// Enforced reports whether the kernel has refused the last packets to addresses that the policy does not allow. Kernel has
	// what came of them, by family; it is empty unless the mode is enforce.
	Enforced bool            `json:"enforced"`
	Kernel   []probe.Refusal `json:"kernel,omitempty"`
	// Queries and Connections are numbers since the start of the agent, by [guard.Record].Verdict.
	Queries     map[string]uint64 `json:"queries"`
	Connections map[string]uint64 `json:"connections"`
	// Refused has why connections to VIPs, also those of the mesh, were refused.
	Refused []egress.RefusalStatus `json:"refused,omitempty"`
	guard.Records
}

func (s *statusServer) handleGuard(w http.ResponseWriter, _ *http.Request) {
	c := s.core
	p := c.config.Guard.Policy()
	if p == nil {
		http.Error(w, "the agent has no guard: it runs without --guard", http.StatusNotFound)
		return
	}
	status := GuardStatus{
		Mode: p.Mode, File: p.File, Hash: p.Hash, InUse: c.config.Guard.InUse(), PolicyNames: p.CountNames(), PolicyRules: len(p.Rules), Private: p.Private,
		Enforced: c.enforced(), Records: c.guarded.all(),
	}
	for _, d := range p.Direct {
		status.Direct = append(status.Direct, d.String())
	}
	if found := c.refusals.Load(); found != nil {
		status.Kernel = *found
	}
	if c.vips != nil {
		status.Refused = c.vips.Status().Refused
	}
	status.Queries, status.Connections = c.config.Guard.Counts()
	writeJSON(w, status)
}

// guardMetrics are the metrics of a guard. Without a guard there are none.
type guardMetrics struct{ *core }

// Describe implements [prometheus.Collector].
func (m guardMetrics) Describe(metrics chan<- *prometheus.Desc) {
	for _, desc := range m.descs() {
		metrics <- desc
	}
}

func (guardMetrics) descs() [3]*prometheus.Desc {
	verdict := []string{"verdict"}
	return [3]*prometheus.Desc{
		prometheus.NewDesc("nametap_guard_queries_total", "Queries that the policy of the guard has judged, by verdict.", verdict, nil),
		prometheus.NewDesc("nametap_guard_connections_total", "Connections that the policy of the guard has judged, by verdict.", verdict, nil),
		prometheus.NewDesc("nametap_guard_enforced", "1 while the kernel refuses what the policy of the guard does not allow.", nil, nil),
	}
}

// Collect implements [prometheus.Collector].
func (m guardMetrics) Collect(metrics chan<- prometheus.Metric) {
	if m.config.Guard.Policy() == nil {
		return
	}
	queries, connections := m.config.Guard.Counts()
	descs := m.descs()
	for i, counts := range []map[string]uint64{queries, connections} {
		for verdict, n := range counts {
			metrics <- prometheus.MustNewConstMetric(descs[i], prometheus.CounterValue, float64(n), verdict)
		}
	}
	enforced := 0.0
	if m.enforced() {
		enforced = 1
	}
	metrics <- prometheus.MustNewConstMetric(descs[2], prometheus.GaugeValue, enforced)
}
