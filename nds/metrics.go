package nds

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// What became of a push; the values of the label "result".
const (
	resultApplied   = "applied"
	resultUnchanged = "unchanged"
	resultRejected  = "rejected"
)

// metrics are one client's; it is a [prometheus.Collector], so that they are
// registered all or none.
type metrics struct {
	pushes   *prometheus.CounterVec
	bytes    prometheus.Histogram
	duration prometheus.Histogram
	all      []prometheus.Collector
}

// newMetrics makes the metrics. Those that Status knows too are read from it.
func newMetrics(status func() Status) *metrics {
	m := &metrics{
		pushes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "nametap_xds_pushes_total",
			Help: "Responses from the control plane, by result: applied, unchanged or rejected.",
		}, []string{"result"}),
		bytes: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "nametap_xds_push_bytes",
			Help:    "Length of the responses from the control plane; --max-push-bytes is the limit.",
			Buckets: prometheus.ExponentialBuckets(1<<10, 4, 9), // 1 KiB to 64 MiB
		}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "nametap_xds_push_duration_seconds",
			Help:    "Time to apply a push, from its set of resources to the table in use.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 8), // 0.1 ms to 1.6 s
		}),
	}
	for _, result := range []string{resultApplied, resultUnchanged, resultRejected} {
		m.pushes.WithLabelValues(result) // 0 is a value, no value is none
	}
	gauge := func(name, help string, read func(Status) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help},
			func() float64 { return read(status()) })
	}
	m.all = []prometheus.Collector{
		m.pushes, m.bytes, m.duration,
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "nametap_xds_reconnects_total",
			Help: "Connection attempts to the control plane after the first.",
		}, func() float64 { return float64(status().Reconnects) }),
		gauge("nametap_xds_connected", "1 while a stream to the control plane is open and has received a response.",
			func(s Status) float64 { return bit(s.Connected) }),
		gauge("nametap_xds_table_age_seconds", "Time since the control plane last sent the table in use; NaN without a table.",
			func(s Status) float64 {
				if !s.Loaded {
					return math.NaN()
				}
				return s.TableAge
			}),
		gauge("nametap_xds_certificate_expiry_seconds", "Time until the workload certificate expires; NaN without one.",
			func(s Status) float64 {
				if s.CertificateExpires.IsZero() {
					return math.NaN()
				}
				return time.Until(s.CertificateExpires).Seconds()
			}),
		gauge("nametap_xds_table_stale", "1 while the table in use is from the snapshot and no push has confirmed it.",
			func(s Status) float64 { return bit(s.Stale) }),
	}
	return m
}

// pushed counts a response.
func (m *metrics) pushed(result string, bytes int) {
	m.pushes.WithLabelValues(result).Inc()
	m.bytes.Observe(float64(bytes))
}

// Describe is part of [prometheus.Collector].
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all {
		c.Describe(ch)
	}
}

// Collect is part of [prometheus.Collector].
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all {
		c.Collect(ch)
	}
}

// bit is 1 for true.
func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
