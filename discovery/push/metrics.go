package push

import "github.com/prometheus/client_golang/prometheus"

// The values of the label "reason" of streams_ended_total.
const (
	endedTooMany = "too_many"
	endedSlow    = "slow"
	endedRefused = "refused"
	endedBehind  = "behind"
	endedMemory  = "memory"
)

// metrics are the metrics of streams. docs/discovery-reference.md lists them.
type metrics struct {
	clients  *prometheus.GaugeVec
	pushes   *prometheus.CounterVec
	rejected *prometheus.CounterVec
	ended    *prometheus.CounterVec
	waited   prometheus.Counter
	differ   prometheus.CounterFunc
	long     prometheus.Counter
}

// newMetrics returns the metrics. The function differences returns the current value of Service.differences.
func newMetrics(differences func() uint64) *metrics {
	counters := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "nametap", Subsystem: "discovery", Name: name, Help: help}, []string{label})
	}
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: "nametap", Subsystem: "discovery", Name: name, Help: help}
	}
	m := &metrics{
		clients: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "nametap", Subsystem: "discovery", Name: "clients", Help: "Open ADS streams, by variant (sotw or delta)."}, []string{"variant"}),
		pushes:   counters("pushes_total", "Responses with name tables, by variant (sotw or delta).", "variant"),
		rejected: counters("rejected_total", "Pushes that a client rejected (NACK), by variant (sotw or delta).", "variant"),
		ended: counters("streams_ended_total", "Streams and connections that the server ended, by reason: too_many (more than --max-clients or "+
			"--max-clients-per-address), slow (no table was requested, or a push was not acknowledged, in time), refused (the client's identity), "+
			"memory (nearly all of it is in use) or behind (the client has a later "+
			"table, and the Kubernetes API cannot be listed).", "reason"),
		waited: prometheus.NewCounter(counter("clients_ahead_total", "Clients that had waited because another replica had read more of the API server.")),
		differ: prometheus.NewCounterFunc(counter("replica_differences_total", "Clients that had another table from a replica with the same objects."),
			func() float64 { return float64(differences()) }),
		long: prometheus.NewCounter(counter("long_pushes_total", "Responses with name tables of more than 64 MiB, which agents refuse.")),
	}
	for _, reason := range []string{endedTooMany, endedSlow, endedRefused, endedMemory, endedBehind} {
		m.ended.WithLabelValues(reason)
	}
	for _, variant := range []string{variantSotw, variantDelta} {
		m.clients.WithLabelValues(variant)
		m.pushes.WithLabelValues(variant)
		m.rejected.WithLabelValues(variant)
	}
	return m
}
