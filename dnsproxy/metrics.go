package dnsproxy

import (
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// metrics are the metrics of a Server, except the metrics of its Forwarder. docs/metrics.md
// describes them for operators.
type metrics struct {
	requests prometheus.Counter // its name is the same as in Istio's agent, so that dashboards for that agent work

	queries        *prometheus.CounterVec                // by type, protocol, rcode, source
	answers        [transports]map[string]answerCounters // the most used counters of queries, by protocol and source
	durations      *prometheus.HistogramVec              // by source
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
	transports
)

// String names the transport as metrics do.
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
			Help: "DNS queries answered, by type, protocol (udp, tcp), rcode and source (table, cache, stale, cached_failure, " +
				"upstream, self, probe).",
		}, []string{"type", "protocol", "rcode", "source"}),
		durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "nametap_dns_request_duration_seconds",
			Help: "Time from reading a query to its answer, by source.",
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
	for protocol := range m.answers {
		m.answers[protocol] = map[string]answerCounters{}
		for _, source := range []string{sourceTable, sourceCache} {
			m.answers[protocol][source] = newAnswerCounters(m.queries, transport(protocol), source) //nolint:gosec // one of two
		}
	}
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

// answerCounters are the counters of NOERROR answers from one source over one transport.
// They are kept here, so that they need not be looked up for each query.
type answerCounters struct{ a, aaaa prometheus.Counter }

func newAnswerCounters(queries *prometheus.CounterVec, protocol transport, source string) answerCounters {
	counter := func(qtype uint16) prometheus.Counter {
		return queries.WithLabelValues(typeLabel(qtype), protocol.String(), dns.RcodeToString[dns.RcodeSuccess], source)
	}
	return answerCounters{a: counter(dns.TypeA), aaaa: counter(dns.TypeAAAA)}
}

// countFast counts a query that the fast path has answered.
func (m *metrics) countFast(qtype uint16, protocol transport, result outcome) {
	m.requests.Inc()
	counters, found := m.answers[protocol][result.source]
	switch {
	case found && result.rcode == dns.RcodeSuccess && qtype == dns.TypeA:
		counters.a.Inc()
	case found && result.rcode == dns.RcodeSuccess && qtype == dns.TypeAAAA:
		counters.aaaa.Inc()
	default:
		m.countQuery(qtype, protocol, result)
	}
}

// countQuery counts an answered query. Response codes without a name share one label value. Otherwise nameservers
// could make 4,096 series, because the code has twelve bits.
func (m *metrics) countQuery(qtype uint16, protocol transport, result outcome) {
	code := "OTHER"
	if _, named := dns.RcodeToString[result.rcode]; named {
		code = wire.RcodeName(result.rcode)
	}
	m.queries.WithLabelValues(typeLabel(qtype), protocol.String(), code, result.source).Inc()
}

// typeLabel returns the label value of a type. Rare types share one value, so that clients cannot make a series for
// each type.
func typeLabel(qtype uint16) string {
	switch qtype {
	case dns.TypeA, dns.TypeAAAA, dns.TypePTR, dns.TypeSRV, dns.TypeTXT, dns.TypeMX, dns.TypeNS,
		dns.TypeSOA, dns.TypeCNAME, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeCAA, dns.TypeANY:
		return dns.TypeToString[qtype]
	}
	return "other"
}

// mode returns the mode in which nameservers are asked if a query came over t.
func (t transport) mode() upstream.Mode {
	if t == overTCP {
		return upstream.TCPThenUDP
	}
	return upstream.UDPOnly
}
