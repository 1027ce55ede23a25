package agent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/agent/resolved"
	"github.com/nametap/nametap/iptables"
)

// CaptureStatus says what an agent captures.
type CaptureStatus struct {
	On      bool   `json:"on"`
	Because string `json:"because"`
	Repairs uint64 `json:"repairs"`
	// Remaining says why rules that should be removed are still in the kernel, or may be.
	Remaining string `json:"remaining,omitempty"`
	// Rules is the state of the rules in the kernel now; Error says why it cannot be read.
	Rules *iptables.Status `json:"rules,omitempty"`
	Error string           `json:"error,omitempty"`
	// Ways says for each nameserver whether clients' queries to it reach the agent.
	Ways []WayStatus `json:"ways,omitempty"`
	// Resolved is the registration with systemd-resolved.
	Resolved resolved.Status `json:"resolved"`
}

// captureLevels is a collector of the level at which each family is captured.
type captureLevels func() map[iptables.Family]iptables.Level

// Describe describes no metric, so the registry does not check collected metrics against descriptions.
func (captureLevels) Describe(chan<- *prometheus.Desc) {}

// Collect makes a metric for the level of each family.
func (l captureLevels) Collect(metrics chan<- prometheus.Metric) {
	desc := prometheus.NewDesc("nametap_capture_level", "1 for the level at which a family is captured.", []string{"family", "level"}, nil)
	for family, current := range l() {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, 1, family.String(), string(current))
	}
}

// captureWays is a collector of whether queries of clients reach the agent.
type captureWays func() []WayStatus

// Describe describes no metric, so the registry does not check collected metrics against descriptions.
func (captureWays) Describe(chan<- *prometheus.Desc) {}

// Collect makes a metric for each nameserver of resolv.conf, or one for "none".
func (w captureWays) Collect(metrics chan<- prometheus.Metric) {
	desc := prometheus.NewDesc("nametap_capture_reached", "1 while queries of clients to a nameserver reach the agent.", []string{"nameserver"}, nil)
	add := func(nameserver string, value float64) {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, nameserver)
	}
	ways := w()
	for _, way := range ways {
		value := 0.0
		if way.State == WayReached {
			value = 1
		}
		add(way.Nameserver.String(), value)
	}
	if len(ways) == 0 {
		add("none", 0)
	}
}
