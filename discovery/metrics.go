package discovery

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

// metrics are the metrics of the control plane. docs/discovery-reference.md lists them.
type metrics struct {
	hosts    prometheus.Gauge
	objects  *prometheus.GaugeVec
	broken   prometheus.Gauge
	hidden   prometheus.Gauge
	kept     prometheus.Gauge
	lastRead prometheus.Gauge
	builds   prometheus.Counter
	failures *prometheus.CounterVec
}

// newMetrics returns the metrics. Unless reg is nil, it registers them, and the collectors in others.
func newMetrics(reg prometheus.Registerer, others ...prometheus.Collector) (*metrics, error) {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "nametap", Subsystem: "discovery", Name: name, Help: help})
	}
	gauges := func(name, help, label string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "nametap", Subsystem: "discovery", Name: name, Help: help}, []string{label})
	}
	counters := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "nametap", Subsystem: "discovery", Name: name, Help: help}, []string{label})
	}
	m := &metrics{
		hosts:    gauge("hosts", "Hosts in the tables of clients."),
		objects:  gauges("objects", "Objects in use, by kind.", "kind"),
		broken:   gauge("errors", "Errors in objects, and hosts that are left out."),
		hidden:   gauge("hidden_namespaces", "Namespaces whose hosts only they see, because they show too many to others."),
		kept:     gauge("kept_objects", "Objects in use in the last good form of their file, which is broken or cannot be read now."),
		lastRead: gauge("last_read_timestamp_seconds", "When the configuration directory was last read, in Unix time. It is read once a second."),
		builds: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "nametap", Subsystem: "discovery",
			Name: "builds_total", Help: "Times that the tables were built."}),
		failures: counters("failures_total", "Failures, by step: read or save_objects.", "step"),
	}
	if reg == nil {
		return m, nil
	}
	var errs []error
	for _, c := range append([]prometheus.Collector{
		m.hosts, m.objects, m.broken, m.hidden, m.kept, m.lastRead, m.builds, m.failures,
	}, others...) {
		errs = append(errs, reg.Register(c))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	return m, nil
}

// observe records the result of a build.
func (m *metrics) observe(kept int, n hosts.Counts) {
	for _, kind := range []string{object.KindService, object.KindEndpointSlice, object.KindPod, object.KindServiceEntry, object.KindSidecar, object.KindServiceImport} {
		m.objects.WithLabelValues(kind).Set(float64(n.Objects[kind]))
	}
	m.hosts.Set(float64(n.Hosts))
	m.kept.Set(float64(kept))
	m.builds.Inc()
}

// resourceMetrics collects the state of the resources of the Kubernetes API.
type resourceMetrics struct {
	resources               func() []source.Status
	heard, failing, objects *prometheus.Desc
}

func newResourceMetrics(resources func() []source.Status) *resourceMetrics {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("nametap_discovery_resource_"+name, help, []string{"resource", "cluster"}, nil)
	}
	return &resourceMetrics{
		resources: resources,
		heard:     desc("heard_timestamp_seconds", "When a request to the Kubernetes API for a resource last succeeded, in Unix time; 0 if never."),
		failing:   desc("failing", "1 while requests to the Kubernetes API for a resource fail, otherwise 0."),
		objects:   desc("objects", "Objects of a resource of the Kubernetes API in use."),
	}
}

// Describe sends the descriptions of the metrics.
func (m *resourceMetrics) Describe(to chan<- *prometheus.Desc) {
	to <- m.heard
	to <- m.failing
	to <- m.objects
}

// Collect sends the metrics.
func (m *resourceMetrics) Collect(to chan<- prometheus.Metric) {
	for _, r := range m.resources() {
		gauge := func(desc *prometheus.Desc, value float64) {
			to <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, r.Resource, r.Cluster)
		}
		heard := 0.0
		if !r.Heard.IsZero() {
			heard = float64(r.Heard.UnixMilli()) / 1000
		}
		gauge(m.heard, heard)
		gauge(m.failing, oneIf(r.Failure != ""))
		gauge(m.objects, float64(r.Objects))
	}
}

// newCertificateMetrics returns the metrics of the certificate for TLS, which is nil without TLS.
func newCertificateMetrics(certificate *auth.Server) []prometheus.Collector {
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "nametap", Subsystem: "discovery", Name: name, Help: help}, value)
	}
	return []prometheus.Collector{
		gauge("certificate_expiry_timestamp_seconds", "When the certificate for TLS expires, in Unix time; 0 without one.", func() float64 {
			if certificate == nil {
				return 0
			}
			return float64(certificate.Expires().Unix())
		}),
		gauge("certificate_invalid", "1 while the certificate for TLS has expired or is not valid yet, otherwise 0.", func() float64 {
			return oneIf(certificate != nil && certificate.Problem() != nil)
		}),
	}
}

// oneIf returns 1 for true, and 0 for false.
func oneIf(condition bool) float64 {
	if condition {
		return 1
	}
	return 0
}
