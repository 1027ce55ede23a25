package forward

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/upstream"
)

// metrics are the metrics of a Forwarder; docs/metrics.md describes them for operators.
type metrics struct {
	upstreamDuration prometheus.Histogram // named as in Istio's agent, so that dashboards for that agent work
	direct           prometheus.Counter
	overflows        atomic.Uint64
	lastOverflow     atomic.Pointer[time.Time] // when overflows last grew; nil for never
	resolvConfErrors prometheus.Counter
}

func newMetrics() *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	return &metrics{
		upstreamDuration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "istio_agent_dns_upstream_request_duration_seconds",
			Help:    "Time until a nameserver's reply.",
			Buckets: []float64{.001, .005, .01, .1, 1, 5},
		}),
		direct: counter("nametap_dns_original_destination_total",
			"Messages forwarded to their original destination."),
		resolvConfErrors: counter("nametap_resolv_conf_errors_total",
			"Times that resolv.conf became unusable; the previous nameservers stay in use."),
	}
}

// overflow counts queries that were refused because of a limit.
func (m *metrics) overflow(n int) {
	if n > 0 {
		m.overflows.Add(uint64(n)) //nolint:gosec // positive
		m.lastOverflow.Store(new(time.Now()))
	}
}

// register registers the metrics, unless registry is nil. The function inflight returns how many queries wait.
func (m *metrics) register(registry prometheus.Registerer, inflight func() int, others *collector) {
	if registry == nil {
		return
	}
	registry.MustRegister(
		m.upstreamDuration, m.direct, m.resolvConfErrors, others,
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "nametap_dns_overflows_total",
			Help: "Queries refused because 10,000 queries were in flight, or many for nameservers that are silent.",
		}, func() float64 { return float64(m.overflows.Load()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "nametap_dns_inflight",
			Help: "Queries that wait for nameservers or for the first table.",
		}, func() float64 { return float64(inflight()) }),
	)
}

// A collector reports what the upstream client and the cache have counted. Each nameserver that was ever configured
// is a label value.
type collector struct {
	status func() []upstream.Status
	stats  func() cache.Stats
}

// Describe sends nothing: the nameservers, and so the series, are not known beforehand.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

// Collect sends the current values.
func (c *collector) Collect(metrics chan<- prometheus.Metric) {
	const counted, measured = prometheus.CounterValue, prometheus.GaugeValue
	send := func(kind prometheus.ValueType, value float64, name, help string, labels prometheus.Labels) {
		metrics <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, nil, labels), kind, value)
	}
	var requests, failures uint64
	for _, s := range c.status() {
		server := s.Spec.String()
		of := prometheus.Labels{"upstream": server}
		requests += s.Requests
		failures += s.Failures
		send(counted, float64(s.Requests), "nametap_upstream_requests_total",
			"DNS requests sent to a nameserver, retries included.", of)
		send(counted, float64(s.Failures), "nametap_upstream_failures_total",
			"DNS requests to a nameserver that got no reply.", of)
		send(counted, float64(s.Wrong+s.Malformed), "nametap_upstream_wrong_replies_total",
			"Packets from a nameserver's address that do not reply to a query in flight: late, forged or malformed.", of)
		for code, n := range s.Responses {
			send(counted, float64(n), "nametap_upstream_responses_total",
				"Replies of a nameserver to queries, by response code.", prometheus.Labels{"upstream": server, "rcode": code})
		}
		send(counted, float64(s.Hedges), "nametap_upstream_hedges_total",
			"DNS requests sent to a nameserver because a reply was late, its own or another one's.", of)
		send(measured, s.RTT.Seconds(), "nametap_upstream_rtt_seconds",
			"Smoothed time until a nameserver's reply.", of)
		send(measured, 1, "nametap_upstream_state",
			"1 for the state that a nameserver is in: up, down or looping.", prometheus.Labels{"upstream": server, "state": s.State.String()})
	}
	send(counted, float64(requests), "istio_agent_dns_upstream_requests_total",
		"DNS requests sent to nameservers, retries included.", nil) // named as in Istio's agent
	send(counted, float64(failures), "istio_agent_dns_upstream_failures_total",
		"DNS requests to nameservers that got no reply.", nil)

	stats := c.stats()
	send(counted, float64(stats.Hits), "nametap_cache_hits_total",
		"Questions that the cache answered with a reply that had not expired.", nil)
	send(counted, float64(stats.Misses), "nametap_cache_misses_total", "Questions for which the cache had no reply.", nil)
	send(counted, float64(stats.Stale), "nametap_cache_stale_total",
		"Questions for which the cache had only a reply that had expired.", nil)
	send(counted, float64(stats.Failures), "nametap_cache_failures_total",
		"Questions that the cache answered with a failure of a moment ago.", nil)
	send(counted, float64(stats.Evictions), "nametap_cache_evictions_total", "Replies that the cache evicted to make room.", nil)
	send(measured, float64(stats.Entries), "nametap_cache_entries", "Replies and failures in the cache.", nil)
	send(measured, float64(stats.Bytes), "nametap_cache_bytes", "Memory that the cache uses.", nil)
}
