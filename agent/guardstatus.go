package agent

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/egress"
)

// GuardStatus is the state of a guard.
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
	// Queries and Connections are numbers since the start of the agent.
	Queries     guard.Counts `json:"queries"`
	Connections guard.Counts `json:"connections"`
}

// A GuardReport has what `nametap guard status` shows.
type GuardReport struct {
	GuardStatus
	// Refused has why connections to VIPs, also those of the mesh, were refused.
	Refused []egress.RefusalStatus `json:"refused,omitempty"`
	guard.Records
}

// guardStatus returns the state of the guard, or nil without one.
func (c *core) guardStatus() *GuardStatus {
	g := c.config.Guard
	p := g.Policy()
	if p == nil {
		return nil
	}
	status := &GuardStatus{
		Mode: p.Mode, File: p.File, Hash: p.Hash, InUse: p.Read, PolicyNames: p.CountNames(), PolicyRules: len(p.Rules),
		Private: p.Private, Enforced: c.enforced(),
	}
	for _, d := range p.Direct {
		status.Direct = append(status.Direct, d.String())
	}
	if found := c.refusals.Load(); found != nil {
		status.Kernel = *found
	}
	status.Queries, status.Connections = g.Counts()
	return status
}

func (s *statusServer) handleGuard(w http.ResponseWriter, _ *http.Request) {
	status := s.core.guardStatus()
	if status == nil {
		http.Error(w, "the agent has no guard: it runs without --guard", http.StatusNotFound)
		return
	}
	report := GuardReport{GuardStatus: *status, Records: s.core.config.Guard.Records()}
	if s.core.vips != nil {
		report.Refused = s.core.vips.Status().Refused
	}
	writeJSON(w, report)
}

// guardMetrics are the metrics of a guard. Without a guard there are none.
type guardMetrics struct{ *core }

// Describe implements [prometheus.Collector]. It says nothing, because there may be no guard.
func (guardMetrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements [prometheus.Collector].
func (m guardMetrics) Collect(metrics chan<- prometheus.Metric) {
	if m.config.Guard == nil {
		return
	}
	judged := func(name, what string, n guard.Counts) {
		desc := prometheus.NewDesc(name, what+" that the policy of the guard has judged, by verdict.", []string{"verdict"}, nil)
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n.Allowed), guard.VerdictAllowed)
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n.Denied), guard.VerdictDenied)
	}
	queries, connections := m.config.Guard.Counts()
	judged("nametap_guard_queries_total", "Queries", queries)
	judged("nametap_guard_connections_total", "Connections", connections)
	enforced := 0.0
	if m.enforced() {
		enforced = 1
	}
	desc := prometheus.NewDesc("nametap_guard_enforced", "1 while the kernel refuses what the policy of the guard does not allow.", nil, nil)
	metrics <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, enforced)
}
