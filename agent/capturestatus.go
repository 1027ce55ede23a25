package agent

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/agent/resolved"
	"github.com/nametap/nametap/iptables"
)

// register registers the metrics. Without a capture, c is nil, they say that it is off.
func (c *capture) register(registry prometheus.Registerer) {
	count := func(name, help string, of func(iptables.Stats) uint64) {
		registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help},
			func() float64 {
				if c == nil {
					return 0
				}
				return float64(of(c.kernel.Stats()))
			}))
	}
	count("nametap_capture_checks_total", "Checks of the capture rules.",
		func(s iptables.Stats) uint64 { return s.Checks })
	count("nametap_capture_repairs_total", "Repairs of capture rules that had drifted.",
		func(s iptables.Stats) uint64 { return s.Repairs })
	count("nametap_capture_failures_total", "Checks and repairs of the capture rules that failed.",
		func(s iptables.Stats) uint64 { return s.Failures })
	registry.MustRegister(captureLevels(func() map[iptables.Family]iptables.Level {
		if c == nil {
			return map[iptables.Family]iptables.Level{iptables.IPv4: iptables.LevelOff, iptables.IPv6: iptables.LevelOff}
		}
		return c.kernel.Levels()
	}))
	registry.MustRegister(captureWays(func() []WayStatus {
		if c == nil {
			return nil
		}
		return c.ways.states()
	}))
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "nametap_resolved_registered", Help: "1 while systemd-resolved asks the agent for mesh names.",
	}, func() float64 {
		if c != nil && c.registrar.Status().State == resolved.Registered {
			return 1
		}
		return 0
	}))
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "nametap_capture_on", Help: "1 while queries are captured.",
	}, func() float64 {
		if c != nil && c.kernel.Active() {
			return 1
		}
		return 0
	}))
}

// captureLevels collects how much of each family is captured.
type captureLevels func() map[iptables.Family]iptables.Level

// Describe describes no metric, so the registry does not compare them.
func (captureLevels) Describe(chan<- *prometheus.Desc) {}

// Collect makes a metric for the level of each family.
func (l captureLevels) Collect(metrics chan<- prometheus.Metric) {
	desc := prometheus.NewDesc("nametap_capture_level", "1 for the level at which a family is captured.", []string{"family", "level"}, nil)
	for family, current := range l() {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, 1, family.String(), string(current))
	}
}

// captureWays collects whether queries of clients reach the agent.
type captureWays func() []WayStatus

// Describe describes no metric, so the registry does not compare them.
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

// CaptureStatus says what an agent captures.
type CaptureStatus struct {
	On      bool   `json:"on"`
	Because string `json:"because"`
	Repairs uint64 `json:"repairs"`
	// Remaining says why rules that are to be removed are still there, or may be.
	Remaining string `json:"remaining,omitempty"`
	// Rules is what is in the kernel now; Error says why that cannot be read.
	Rules *iptables.Status `json:"rules,omitempty"`
	Error string           `json:"error,omitempty"`
	// Ways are the ways of clients' queries to nameservers, by nameserver.
	Ways []WayStatus `json:"ways,omitempty"`
	// Resolved is the registration with systemd-resolved.
	Resolved resolved.Status `json:"resolved"`
}

// status reads the rules and says how they are.
func (c *capture) status(ctx context.Context) *CaptureStatus {
	in := c.current()
	status := &CaptureStatus{On: in.On, Because: in.Because, Repairs: c.kernel.Stats().Repairs, Remaining: c.kernel.Remaining()}
	status.Ways, status.Resolved = c.ways.states(), c.registrar.Status()
	rules, err := c.kernel.Status(ctx)
	if err != nil {
		status.Error = err.Error()
		return status
	}
	for i, f := range rules.Families {
		if err := in.without[f.Family]; err != nil && in.Config.Family(f.Family) != iptables.Off && f.State == iptables.NotWanted {
			rules.Families[i].Error = err.Error()
		}
	}
	status.Rules = &rules
	return status
}
