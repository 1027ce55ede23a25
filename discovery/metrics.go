package discovery

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// Why the server ends a stream, as the metrics call it.
const (
	endedTooMany = "too_many"
	endedSlow    = "slow"
)

// metrics are what the control plane counts; docs/ lists them.
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

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
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
		objects:  gauges("objects", "Objects that count, by kind.", "kind"),
		broken:   gauge("errors", "What is wrong with the documents of the configuration directory now."),
		kept:     gauge("kept_objects", "Objects that count in their last good form, because what is in the directory cannot be used."),
		lastRead: gauge("last_read_timestamp_seconds", "When the configuration directory was last read as a whole, in Unix time; it is every 30 s."),
		vips:     gauge("vips", "Hosts with an automatic address."),
		noVIP:    gauge("vips_exhausted", "Hosts that should have an automatic address and for which there was no room."),
		builds: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "nametap", Subsystem: "discovery",
			Name: "builds_total", Help: "Times that the tables were built."}),
		failures: counters("failures_total", "What went wrong while running: reading, watching, saving or building.", "step"),
		clients:  gauges("clients", "Open ADS streams, by variant (sotw or delta).", "variant"),
		pushes:   counters("pushes_total", "Responses that carry name tables, by variant (sotw or delta).", "variant"),
		rejected: counters("rejected_total", "Pushes that a client refused, by variant (sotw or delta).", "variant"),
		ended: counters("streams_ended_total", "Streams that the server ended: too_many (beyond --max-clients, connections included), "+
			"slow (a push was not acknowledged in time).", "reason"),
	}
	for _, reason := range []string{endedTooMany, endedSlow} {
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
	for _, c := range []prometheus.Collector{
		m.hosts, m.objects, m.broken, m.kept, m.lastRead, m.vips, m.noVIP, m.builds, m.failures, m.clients, m.pushes, m.rejected, m.ended,
	} {
		errs = append(errs, reg.Register(c))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	return m, nil
}

// observe publishes what a build found.
func (m *metrics) observe(r reading, snap *snapshot, a allocation) {
	kinds := map[string]int{kindService: 0, kindEndpointSlice: 0, kindPod: 0, kindServiceEntry: 0}
	for _, o := range r.objects {
		kinds[o.key.kind]++
	}
	for kind, n := range kinds {
		m.objects.WithLabelValues(kind).Set(float64(n))
	}
	m.hosts.Set(float64(snap.hosts()))
	m.kept.Set(float64(r.kept))
	m.vips.Set(float64(len(a.slots)))
	m.noVIP.Set(float64(len(a.without)))
	m.builds.Inc()
}

// hosts counts the hosts that some client can be given an address of.
func (s *snapshot) hosts() int {
	seen := map[string]bool{}
	for _, c := range s.claims {
		k := hostKey(c.host)
		if _, vip := s.slots[k]; vip || len(c.addrs)+len(c.literal) > 0 {
			seen[k] = true
		}
	}
	return len(seen)
}
