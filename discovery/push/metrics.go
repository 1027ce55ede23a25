package push

import "github.com/prometheus/client_golang/prometheus"

// The values of the label "reason" of streams_ended_total.
const (
	endedTooMany = "too_many"
	endedSlow    = "slow"
	endedRefused = "refused"
	endedMemory  = "memory"
)

// metrics are the metrics of streams.
type metrics struct {
	clients  *prometheus.GaugeVec
	pushes   *prometheus.CounterVec
	rejected *prometheus.CounterVec
	ended    *prometheus.CounterVec
}

func newMetrics() *metrics {
	counters := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "nametap", Subsystem: "discovery", Name: name, Help: help}, []string{label})
	}
	m := &metrics{
		clients: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "nametap", Subsystem: "discovery", Name: "clients", Help: "Open ADS streams, by variant (sotw or delta)."}, []string{"variant"}),
		pushes:   counters("pushes_total", "Responses with name tables, by variant (sotw or delta).", "variant"),
		rejected: counters("rejected_total", "Pushes that a client rejected (NACK), by variant (sotw or delta).", "variant"),
		ended: counters("streams_ended_total", "Streams and connections that the server ended, by reason: too_many (more than "+
			"--max-clients-per-address), slow (no table was requested, or a push was not acknowledged, in time), refused (the client's identity) "+
			"or memory (nearly all of it is in use).", "reason"),
	}
	for _, reason := range []string{endedTooMany, endedSlow, endedRefused, endedMemory} {
		m.ended.WithLabelValues(reason)
	}
	for _, variant := range []string{variantSotw, variantDelta} {
		m.clients.WithLabelValues(variant)
		m.pushes.WithLabelValues(variant)
		m.rejected.WithLabelValues(variant)
	}
	return m
}
