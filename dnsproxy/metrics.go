package dnsproxy

import (
	"strings"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
)

// metrics are what a Server counts; docs/metrics.md explains each to operators.
type metrics struct {
	// Istio's four, under its names, so that its dashboards go on working.
	requests         prometheus.Counter
	upstreamRequests prometheus.Counter
	upstreamFailures prometheus.Counter
	upstreamDuration prometheus.Histogram

	queries       *prometheus.CounterVec // type, protocol, rcode, source
	own           [transports]ownCounters
	dropped       prometheus.Counter
	hosts         prometheus.Gauge
	skipped       prometheus.Gauge
	buildDuration prometheus.Histogram
	listeners     prometheus.Gauge
}

// newMetrics makes the metrics and registers them; a nil registry keeps them to
// the process. collisions counts those of the table in use, when asked.
func newMetrics(registry prometheus.Registerer, collisions func() float64) (*metrics, error) {
	m := &metrics{
		requests: counter("istio_agent_dns_requests_total",
			"DNS requests received."),
		upstreamRequests: counter("istio_agent_dns_upstream_requests_total",
			"DNS requests sent to nameservers, repetitions included."),
		upstreamFailures: counter("istio_agent_dns_upstream_failures_total",
			"DNS requests to nameservers that got no reply."),
		upstreamDuration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "istio_agent_dns_upstream_request_duration_seconds",
			Help:    "Time to a nameserver's reply.",
			Buckets: []float64{.001, .005, .01, .1, 1, 5},
		}),
		queries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "nametap_dns_queries_total",
			Help: "DNS queries answered, by type, protocol, response code and the source of the answer.",
		}, []string{"type", "protocol", "rcode", "source"}),
		dropped: counter("nametap_dns_dropped_total",
			"Packets dropped unanswered: no query, or too short for a header."),
		hosts:   gauge("nametap_table_hosts", "Hosts in the table, wildcards included."),
		skipped: gauge("nametap_table_skipped", "Keys and addresses of the last push that no table can hold."),
		buildDuration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "nametap_table_build_seconds",
			Help:    "Time to build a table from a push.",
			Buckets: prometheus.ExponentialBuckets(.0001, 4, 9),
		}),
		listeners: gauge("nametap_dns_listeners", "DNS listeners that are open."),
	}
	for over := range m.own {
		m.own[over] = newOwnCounters(m.queries, transport(over)) //nolint:gosec // one of two
	}
	if registry == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{
		m.requests, m.upstreamRequests, m.upstreamFailures, m.upstreamDuration, m.queries, m.dropped,
		m.hosts, m.skipped, m.buildDuration, m.listeners,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "nametap_table_collisions",
			Help: "Names that two entries of the table claim.",
		}, collisions),
	} {
		if err := registry.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func counter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

func gauge(name, help string) prometheus.Gauge {
	return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
}

// ownCounters are the counters of answers from the table over one transport,
// looked up once: they are counted for every query.
type ownCounters struct{ a, aaaa prometheus.Counter }

func newOwnCounters(queries *prometheus.CounterVec, over transport) ownCounters {
	counter := func(qtype uint16) prometheus.Counter {
		return queries.WithLabelValues(typeLabel(qtype), over.String(), dns.RcodeToString[dns.RcodeSuccess], sourceTable)
	}
	return ownCounters{a: counter(dns.TypeA), aaaa: counter(dns.TypeAAAA)}
}

// countOwn counts one query that was answered from the table.
func (m *metrics) countOwn(qtype uint16, over transport) {
	m.requests.Inc()
	switch qtype {
	case dns.TypeA:
		m.own[over].a.Inc()
	case dns.TypeAAAA:
		m.own[over].aaaa.Inc()
	default:
		m.countQuery(qtype, over, dns.RcodeSuccess, sourceTable)
	}
}

// countQuery counts one answered query. An upstream chooses a response's code,
// which has at most twelve bits; codes without a name share one label value.
func (m *metrics) countQuery(qtype uint16, over transport, rcode int, source string) {
	code, named := dns.RcodeToString[rcode]
	if !named {
		code = "other"
	}
	m.queries.WithLabelValues(typeLabel(qtype), over.String(), strings.ToUpper(code), source).Inc()
}

// typeLabel names a type for a metric. A client chooses the type, so types that
// are rare share one label value.
func typeLabel(qtype uint16) string {
	switch qtype {
	case dns.TypeA, dns.TypeAAAA, dns.TypePTR, dns.TypeSRV, dns.TypeTXT, dns.TypeMX, dns.TypeNS,
		dns.TypeSOA, dns.TypeCNAME, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeCAA, dns.TypeANY:
		return dns.TypeToString[qtype]
	}
	return "other"
}
