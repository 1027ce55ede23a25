package nds

import (
	"math"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// The values of the label "result" of the counter of pushes.
const (
	resultApplied   = "applied"
	resultUnchanged = "unchanged"
	resultRejected  = "rejected"
)

// digestDigits is how many hexadecimal digits of a checksum a metric has: a float64 can have up to 53 bits.
const digestDigits = 12

// metrics are the metrics of one client.
type metrics struct {
	pushes   *prometheus.CounterVec
	bytes    prometheus.Histogram
	duration prometheus.Histogram
}

// newMetrics returns the metrics of a client, and registers them unless registry is nil. The metrics get some of
// their values from the state and the function certificateExpires.
func newMetrics(registry prometheus.Registerer, state *state, certificateExpires func() time.Time) *metrics {
	status := state.read
	auto := promauto.With(registry)
	m := &metrics{
		pushes: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "nametap_xds_pushes_total",
			Help: "Responses from the control plane, by result: applied, unchanged or rejected.",
		}, []string{"result"}),
		bytes: auto.NewHistogram(prometheus.HistogramOpts{
			Name: "nametap_xds_push_bytes",
			Help: "Length of the responses from the control plane; 64 MiB is the limit.",
			// Only one bucket, since each bucket costs a series. Servers that read native histograms get finer buckets.
			Buckets:                         []float64{16 << 20},
			NativeHistogramBucketFactor:     1.2,
			NativeHistogramMaxBucketNumber:  64,
			NativeHistogramMinResetDuration: time.Hour,
		}),
		duration: auto.NewHistogram(prometheus.HistogramOpts{
			Name:                            "nametap_xds_push_duration_seconds",
			Help:                            "Time to apply a push, from its shards to the table in use.",
			Buckets:                         []float64{.1, 1},
			NativeHistogramBucketFactor:     1.2,
			NativeHistogramMaxBucketNumber:  64,
			NativeHistogramMinResetDuration: time.Hour,
		}),
	}
	for _, result := range []string{resultApplied, resultUnchanged, resultRejected} {
		m.pushes.WithLabelValues(result) // exports the counter, with the value 0
	}
	count := func(name, help string, read func(Status) uint64) {
		auto.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(read(status())) })
	}
	gauge := func(name, help string, read func(Status) float64) {
		auto.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return read(status()) })
	}
	count("nametap_xds_reconnects_total", "Connection attempts to the control plane after the first.",
		func(s Status) uint64 { return s.Reconnects })
	gauge("nametap_xds_connected", "1 while a stream to the control plane is open and has received a response.",
		func(s Status) float64 { return boolValue(s.Connected) })
	gauge("nametap_xds_table_timestamp_seconds", "When the control plane last sent the table in use, in Unix time; 0 without a table.",
		func(s Status) float64 {
			if !s.Loaded {
				return 0
			}
			// When somebody sets the wall clock, TableAge stays right, but LastPush becomes wrong.
			return math.Round(float64(time.Now().UnixMilli())/1e3 - s.TableAge)
		})
	gauge("nametap_xds_certificate_expiry_timestamp_seconds", "When the client certificate or the workload certificate expires, in Unix time; 0 without one.",
		func(Status) float64 {
			if expires := certificateExpires(); !expires.IsZero() {
				return float64(expires.Unix())
			}
			return 0
		})
	gauge("nametap_xds_table_digest", "The first 48 bits of the checksum of the table in use, as a number: equal for agents with the same table; 0 without a table.",
		func(Status) float64 {
			digest := state.readDigest().Digest
			bits, _ := strconv.ParseUint(digest[:min(digestDigits, len(digest))], 16, 64) // "" gives 0
			return float64(bits)
		})
	gauge("nametap_xds_table_stale", "1 while the table in use is from the snapshot and no push has confirmed it.",
		func(s Status) float64 { return boolValue(s.Stale) })
	return m
}

// pushed counts a response.
func (m *metrics) pushed(result string, bytes int) {
	m.pushes.WithLabelValues(result).Inc()
	m.bytes.Observe(float64(bytes))
}

// boolValue returns 1 for true and 0 for false.
func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
