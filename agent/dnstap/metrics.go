package dnstap

import "github.com/prometheus/client_golang/prometheus"

// metrics are the metrics of a Sender; docs/metrics.md describes them for operators.
type metrics struct {
	frames    prometheus.Counter
	dropped   prometheus.Counter
	connected prometheus.Gauge
}

func newMetrics() *metrics {
	return &metrics{
		frames: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "nametap_dnstap_frames_total", Help: "Messages sent to the receiver of dnstap.",
		}),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "nametap_dnstap_dropped_total", Help: "Messages for the receiver of dnstap that were dropped, since it was away or slow.",
		}),
		connected: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "nametap_dnstap_connected", Help: "1 while the receiver of dnstap accepts messages.",
		}),
	}
}

// register registers the metrics.
func (m *metrics) register(registry prometheus.Registerer) {
	registry.MustRegister(m.frames, m.dropped, m.connected)
}
