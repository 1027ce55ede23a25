package dnstap

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are the metrics of a Sender; docs/metrics.md describes them for operators.
type metrics struct {
	frames    prometheus.Counter
	dropped   prometheus.Counter
	connected prometheus.Gauge
}

// newMetrics returns registered metrics.
func newMetrics(registry prometheus.Registerer) *metrics {
	auto := promauto.With(registry)
	return &metrics{
		frames: auto.NewCounter(prometheus.CounterOpts{
			Name: "nametap_dnstap_frames_total", Help: "Messages sent to the receiver of dnstap.",
		}),
		dropped: auto.NewCounter(prometheus.CounterOpts{
			Name: "nametap_dnstap_dropped_total", Help: "Messages for the receiver of dnstap that were dropped, since it was away or slow.",
		}),
		connected: auto.NewGauge(prometheus.GaugeOpts{
			Name: "nametap_dnstap_connected", Help: "1 while the receiver of dnstap accepts messages.",
		}),
	}
}
