package discovery

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/discovery/source"
)

// Resources returns the state of each resource of the Kubernetes API that is read.
func (s *Server) Resources() []source.Status {
	var all []source.Status
	for _, one := range s.inputs.all {
		all = append(all, one.Status()...)
	}
	if s.certificate != nil {
		all = append(all, s.certificate.Status()...)
	}
	return all
}

// resourceMetrics collects the state of the resources of the Kubernetes API.
type resourceMetrics struct {
	server                  *Server
	heard, failing, objects *prometheus.Desc
}

func newResourceMetrics(s *Server) *resourceMetrics {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("nametap_discovery_resource_"+name, help, []string{"resource", "cluster"}, nil)
	}
	return &resourceMetrics{
		server:  s,
		heard:   desc("heard_timestamp_seconds", "When the Kubernetes API last sent something about a resource, in Unix time; 0 if never."),
		failing: desc("failing", "1 while requests to the Kubernetes API for a resource fail, otherwise 0."),
		objects: desc("objects", "Objects of a resource of the Kubernetes API in use."),
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
	for _, r := range m.server.Resources() {
		gauge := func(desc *prometheus.Desc, value float64) {
			to <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, r.Resource, r.Cluster)
		}
		var heard, failing float64
		if !r.Heard.IsZero() {
			heard = float64(r.Heard.UnixMilli()) / 1000
		}
		if r.Failure != "" {
			failing = 1
		}
		gauge(m.heard, heard)
		gauge(m.failing, failing)
		gauge(m.objects, float64(r.Objects))
	}
}
