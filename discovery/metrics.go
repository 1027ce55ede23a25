package discovery

import (
	"context"
	"errors"
	"fmt"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"github.com/prometheus/client_golang/prometheus"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// The values of the label "variant".
const (
	variantSotw  = "sotw"
	variantDelta = "delta"
)

// The values of the label "reason" of the streams that the server ended.
const (
	endedTooMany = "too_many"
	endedSlow    = "slow"
	endedRefused = "refused"
)

// metrics are the metrics of the control plane. docs/discovery.md lists them.
type metrics struct {
	hosts    prometheus.Gauge
	objects  *prometheus.GaugeVec
	broken   prometheus.Gauge
	kept     prometheus.Gauge
	lastRead prometheus.Gauge
	vips     prometheus.Gauge
	noVIP    prometheus.Gauge
	builds   prometheus.Counter
	failures *prometheus.CounterVec
	clients  *prometheus.GaugeVec
	pushes   *prometheus.CounterVec
	rejected *prometheus.CounterVec
	ended    *prometheus.CounterVec
}

// newMetrics registers the metrics, and others.
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
		hosts:    gauge("hosts", "Hosts that have an address."),
		objects:  gauges("objects", "Objects in use, by kind.", "kind"),
		broken:   gauge("errors", "Errors in documents of the configuration directory."),
		kept:     gauge("kept_objects", "Objects in use in their last good form, because they are broken or cannot be read now."),
		lastRead: gauge("last_read_timestamp_seconds", "When the configuration directory was last read, in Unix time. It is read at least every 30 s."),
		vips:     gauge("vips", "Hosts with an automatic VIP."),
		noVIP:    gauge("vips_exhausted", "Hosts without an automatic VIP because none is left."),
		builds: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "nametap", Subsystem: "discovery",
			Name: "builds_total", Help: "Times that the tables were built."}),
		failures: counters("failures_total", "Failures, by step: read, watch, save, save_objects, save_cluster or build.", "step"),
		clients:  gauges("clients", "Open ADS streams, by variant (sotw or delta).", "variant"),
		pushes:   counters("pushes_total", "Responses with name tables, by variant (sotw or delta).", "variant"),
		rejected: counters("rejected_total", "Pushes that a client rejected (NACK), by variant (sotw or delta).", "variant"),
		ended: counters("streams_ended_total", "Streams and connections that the server ended, by reason: too_many (more than --max-clients), "+
			"slow (a push was not acknowledged in time) or refused (the client's identity).", "reason"),
	}
	for _, reason := range []string{endedTooMany, endedSlow, endedRefused} {
		m.ended.WithLabelValues(reason)
	}
	for _, variant := range []string{variantSotw, variantDelta} {
		m.clients.WithLabelValues(variant)
		m.pushes.WithLabelValues(variant)
		m.rejected.WithLabelValues(variant)
	}
	if reg == nil {
		return m, nil
	}
	var errs []error
	for _, c := range append([]prometheus.Collector{
		m.hosts, m.objects, m.broken, m.kept, m.lastRead, m.vips, m.noVIP, m.builds, m.failures, m.clients, m.pushes, m.rejected, m.ended,
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
	m.vips.Set(float64(n.VIPs))
	m.noVIP.Set(float64(n.NoVIP))
	m.builds.Inc()
}

// callbacks returns callbacks that count streams, pushes and NACKs.
func (s *Server) callbacks() serverv3.Callbacks {
	sotwClients, deltaClients := s.metrics.clients.WithLabelValues(variantSotw), s.metrics.clients.WithLabelValues(variantDelta)
	sotwPushes, deltaPushes := s.metrics.pushes.WithLabelValues(variantSotw), s.metrics.pushes.WithLabelValues(variantDelta)
	return serverv3.CallbackFuncs{
		StreamOpenFunc:        func(context.Context, int64, string) error { sotwClients.Inc(); return nil },
		StreamClosedFunc:      func(int64, *corev3.Node) { sotwClients.Dec() },
		DeltaStreamOpenFunc:   func(context.Context, int64, string) error { deltaClients.Inc(); return nil },
		DeltaStreamClosedFunc: func(int64, *corev3.Node) { deltaClients.Dec() },
		StreamRequestFunc: func(_ int64, req *discoveryv3.DiscoveryRequest) error {
			s.countNACK(variantSotw, req.GetNode(), req.GetErrorDetail())
			return nil
		},
		StreamDeltaRequestFunc: func(_ int64, req *discoveryv3.DeltaDiscoveryRequest) error {
			s.countNACK(variantDelta, req.GetNode(), req.GetErrorDetail())
			return nil
		},
		StreamResponseFunc: func(context.Context, int64, *discoveryv3.DiscoveryRequest, *discoveryv3.DiscoveryResponse) {
			sotwPushes.Inc()
		},
		StreamDeltaResponseFunc: func(int64, *discoveryv3.DeltaDiscoveryRequest, *discoveryv3.DeltaDiscoveryResponse) {
			deltaPushes.Inc()
		},
	}
}

// countNACK counts and logs a NACK, if detail is not nil. The client keeps its table, and
// nothing else on this side shows that.
func (s *Server) countNACK(variant string, node *corev3.Node, detail *rpcstatus.Status) {
	if detail == nil {
		return
	}
	s.metrics.rejected.WithLabelValues(variant).Inc()
	s.cfg.Logger.Warn("a client rejected a push and keeps its table",
		"node", node.GetId(), "variant", variant, "reason", detail.GetMessage())
}
