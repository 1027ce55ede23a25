package agent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/agent/resolved"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/iptables"
)

// CaptureStatus says what an agent captures.
type CaptureStatus struct {
	On      bool   `json:"on"`
	Because string `json:"because"`
	Repairs uint64 `json:"repairs"`
	// Remaining says why the kernel still has, or may still have, rules that should be removed.
	Remaining string `json:"remaining,omitempty"`
	// Rules is the state of the rules in the kernel now; Error says why it cannot be read.
	Rules *iptables.Status `json:"rules,omitempty"`
	Error string           `json:"error,omitempty"`
	// Others are other agents of this network namespace that want to capture.
	Others []string `json:"others,omitempty"`
	// Ways says for each nameserver whether clients' queries to it reach the agent.
	Ways []Way `json:"ways,omitempty"`
	// Lapses are the interruptions of the capture since the start.
	Lapses []Lapse `json:"lapses,omitempty"`
	// Resolved is the registration with systemd-resolved.
	Resolved resolved.Status `json:"resolved"`
}

// captureMetrics is a collector of the metrics of a capture. Without a capture, the metrics have the values of a
// capture that is off.
type captureMetrics struct{ *capture }

// Describe describes no metric, so the registry does not check collected metrics against descriptions.
func (captureMetrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements [prometheus.Collector].
func (m captureMetrics) Collect(metrics chan<- prometheus.Metric) {
	var stats iptables.Stats
	levels := map[family.Family]iptables.Level{family.IPv4: iptables.LevelOff, family.IPv6: iptables.LevelOff}
	var ways []Way
	var registered, active bool
	if c := m.capture; c != nil {
		stats, levels, ways = c.kernel.Stats(), c.kernel.Levels(), c.ways.states()
		registered, active = c.registrar.Status().State == resolved.Registered, c.kernel.Active()
	}
	add := func(kind prometheus.ValueType, name, help string, value float64, labels prometheus.Labels) {
		metrics <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, nil, labels), kind, value)
	}
	count := func(name, help string, n uint64) { add(prometheus.CounterValue, name, help, float64(n), nil) }
	flag := func(name, help string, on bool, labels prometheus.Labels) {
		value := 0.0
		if on {
			value = 1
		}
		add(prometheus.GaugeValue, name, help, value, labels)
	}
	count("nametap_capture_checks_total", "Checks of the capture rules.", stats.Checks)
	count("nametap_capture_repairs_total", "Repairs of capture rules that had drifted.", stats.Repairs)
	count("nametap_capture_failures_total", "Checks and repairs of the capture rules that failed.", stats.Failures)
	for f, level := range levels {
		flag("nametap_capture_level", "1 for the level at which a family is captured.", true,
			prometheus.Labels{"family": f.String(), "level": string(level)})
	}
	reached := func(nameserver string, is bool) {
		flag("nametap_capture_reached", "1 while queries of clients to a nameserver reach the agent.", is,
			prometheus.Labels{"nameserver": nameserver})
	}
	for _, way := range ways {
		reached(way.Subject(), way.State == WayReached)
	}
	if len(ways) == 0 {
		reached("none", false)
	}
	flag("nametap_resolved_registered", "1 while systemd-resolved asks the agent for mesh names.", registered, nil)
	flag("nametap_capture_on", "1 while queries are captured.", active, nil)
}
