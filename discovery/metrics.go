package discovery

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

// metrics are the metrics of the control plane.
type metrics struct {
	hosts    prometheus.Gauge
	objects  *prometheus.GaugeVec
	broken   prometheus.Gauge
	hidden   prometheus.Gauge
	kept     prometheus.Gauge
	lastRead prometheus.Gauge
	builds   prometheus.Counter
	failures prometheus.Counter
}

// newMetrics returns the metrics. Unless reg is nil, it registers them, and the collectors in others.
func newMetrics(reg prometheus.Registerer, others ...prometheus.Collector) *metrics {
	const namespace, subsystem = "nametap", "discovery"
	if reg != nil {
		reg.MustRegister(others...)
	}
	with := promauto.With(reg)
	gauge := func(name, help string) prometheus.Gauge {
		return with.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help})
	}
	return &metrics{
		hosts: gauge("hosts", "Hosts in the tables of clients."),
		objects: with.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Subsystem: subsystem, Name: "objects",
			Help: "Objects in use, by kind."}, []string{"kind"}),
		broken:   gauge("errors", "Errors in objects, and hosts that are left out."),
		hidden:   gauge("hidden_namespaces", "Namespaces whose hosts only they see, because they show too many to others."),
		kept:     gauge("kept_objects", "Objects in use in the last good form of their file, which is broken or cannot be read now."),
		lastRead: gauge("last_read_timestamp_seconds", "When the configuration directory was last read, in Unix time. It is read once a second."),
		builds: with.NewCounter(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem, Name: "builds_total",
			Help: "Times that the tables were built."}),
		failures: with.NewCounter(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem, Name: "failures_total",
			Help: "Failures to read the configuration directory."}),
	}
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
