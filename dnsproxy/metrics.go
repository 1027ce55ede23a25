package dnsproxy

import (
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
)

// metrics are the metrics of a Server, except the metrics of its Forwarder. docs/metrics.md
// describes them for operators.
type metrics struct {
	requests prometheus.Counter // its name is the same as in Istio's agent, so that dashboards for that agent work

	queries        *prometheus.CounterVec   // by rcode and source
	fromTable      prometheus.Counter       // of queries, for NOERROR: it need not be looked up for each query
	fromCache      prometheus.Counter       // of queries, for NOERROR
	denied         prometheus.Counter       // of queries, for NXDOMAIN of nametap itself
	durations      *prometheus.HistogramVec // by source
	truncated      prometheus.Counter
	originErrors   prometheus.Counter
	dropped        prometheus.Counter
	hosts          prometheus.Gauge
	skipped        prometheus.Gauge
	listeners      prometheus.Gauge
	listenerErrors prometheus.Counter
}

// A transport is the protocol over which a query came.
type transport uint8

// The transports.
const (
	overUDP transport = iota
	overTCP
)

// String names the transport as Go networks are named.
func (t transport) String() string {
	if t == overUDP {
		return "udp"
	}
	return "tcp"
}

// An outcome is the response code and the source of a response.
type outcome struct {
	rcode  int
	source string
}

// newMetrics makes the metrics.
func newMetrics() *metrics {
	m := &metrics{
		requests: counter("istio_agent_dns_requests_total",
			"DNS requests received."),
		queries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "nametap_dns_queries_total",
			Help: "DNS queries answered, by rcode and source (table, cache, stale, cached_failure, upstream, self).",
		}, []string{"rcode", "source"}),
		durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "nametap_dns_request_duration_seconds",
			Help: "Time from reading a query to its answer, by source (upstream, local).",
			// There are few buckets, because each costs a series for each source. A Prometheus server that reads native
			// histograms gets finer buckets.
			Buckets:                         []float64{.01, .5},
			NativeHistogramBucketFactor:     1.2,
			NativeHistogramMaxBucketNumber:  64,
			NativeHistogramMinResetDuration: time.Hour,
		}, []string{"source"}),
		truncated: counter("nametap_dns_truncated_total",
			"Answers with the TC bit, after which clients ask again over TCP."),
		originErrors: counter("nametap_dns_original_destination_errors_total",
			"Failed lookups of the original destination of a captured query; each is retried."),
		dropped: counter("nametap_dns_dropped_total",
			"Packets dropped without an answer: not a query, too short for a header, or from a client that cannot be answered."),
		hosts:     gauge("nametap_table_hosts", "Hosts in the table, wildcards included."),
		skipped:   gauge("nametap_table_skipped", "Keys and addresses of the last push that are not valid."),
		listeners: gauge("nametap_dns_listeners", "Open DNS listeners."),
		listenerErrors: counter("nametap_dns_listener_errors_total",
			"Transient errors of DNS listeners, such as a lack of descriptors; each is retried."),
	}
	m.fromTable = m.queries.WithLabelValues(dns.RcodeToString[dns.RcodeSuccess], sourceTable)
	m.fromCache = m.queries.WithLabelValues(dns.RcodeToString[dns.RcodeSuccess], sourceCache)
	m.denied = m.queries.WithLabelValues(dns.RcodeToString[dns.RcodeNameError], sourceSelf)
	return m
}

// register registers the metrics, unless registry is nil. collisions returns the number of
// collisions in the current table.
func (m *metrics) register(registry prometheus.Registerer, collisions func() float64) {
	if registry == nil {
		return
	}
	registry.MustRegister(
		m.requests, m.queries, m.durations, m.truncated, m.originErrors, m.dropped,
		m.hosts, m.skipped, m.listeners, m.listenerErrors,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "nametap_table_collisions",
			Help: "Names that two entries of the table claim.",
		}, collisions),
	)
}

func counter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

func gauge(name, help string) prometheus.Gauge {
	return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
}

// count counts an answered query of a client. A probe is none.
func (m *metrics) count(result outcome) {
	switch {
	case result.source == sourceProbe:
	case result.rcode == dns.RcodeSuccess && result.source == sourceTable:
		m.fromTable.Inc()
	case result.rcode == dns.RcodeSuccess && result.source == sourceCache:
		m.fromCache.Inc()
	case result.rcode == dns.RcodeNameError && result.source == sourceSelf:
		m.denied.Inc()
	default:
		m.queries.WithLabelValues(rcodeLabel(result), result.source).Inc()
	}
}

// rcodeLabel returns the label value of a response code. Only codes that matter for a source have their own. So the
// number of series does not depend on what clients ask, and what nameservers answer.
func rcodeLabel(result outcome) string {
	code, from := result.rcode, result.source
	whole := from == sourceUpstream || from == sourceSelf
	if code == dns.RcodeSuccess && from != forward.SourceCachedFailure ||
		code == dns.RcodeNameError && (whole || from == sourceCache || from == sourceStale) ||
		code == dns.RcodeServerFailure && (whole || from == forward.SourceCachedFailure) ||
		code == dns.RcodeRefused && whole {
		return dns.RcodeToString[code]
	}
	return "other"
}

// observe adds the time that a query took.
func (m *metrics) observe(source string, took time.Duration) {
	if source != sourceUpstream {
		source = "local"
	}
	m.durations.WithLabelValues(source).Observe(took.Seconds())
}

// mode returns the mode in which nameservers are asked if a query came over t.
func (t transport) mode() upstream.Mode {
	if t == overTCP {
		return upstream.TCPOnly
	}
	return upstream.UDPOnly
}
