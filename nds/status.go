package nds

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Status describes what a client is doing. It is printed as JSON.
type Status struct {
	// Connected is true if the stream is open and has received a response, and Open if it is open.
	Connected bool   `json:"connected"`
	Open      bool   `json:"open"`
	Address   string `json:"address"`
	// Variant is the variant in use, which may be the fallback.
	Variant string `json:"variant"`
	// Loaded is true if a table is in use. Version is the table's version. LastPush
	// is when the control plane last sent it and TableAge how many seconds ago. Stale
	// is true if the table is from the snapshot and no push has confirmed it.
	Loaded   bool      `json:"loaded"`
	Version  string    `json:"version"`
	LastPush time.Time `json:"lastPush,omitzero"`
	TableAge float64   `json:"tableAgeSeconds"`
	Stale    bool      `json:"stale"`
	// Mode is "hosts" if the table came as changes of hosts, and "whole" if it came whole. Digest is the checksum
	// of a table of mode hosts, in hexadecimal, and Revision what its control plane calls its state, in base64;
	// both are empty otherwise.
	Mode     Mode   `json:"mode,omitempty"`
	Digest   string `json:"digest,omitempty"`
	Revision []byte `json:"revision,omitempty"`
	// ChecksumDifferences counts how often the table did not have the checksum of a change, since the
	// start. LastChecksumDifference is the last case.
	ChecksumDifferences    uint64 `json:"checksumDifferences"`
	LastChecksumDifference string `json:"lastChecksumDifference,omitempty"`
	// Nonce is the nonce of the last response of any stream.
	Nonce string `json:"nonce,omitempty"`
	// Pushes counts all responses, Rejected the NACKed ones.
	Pushes     uint64 `json:"pushes"`
	Rejected   uint64 `json:"rejected"`
	Reconnects uint64 `json:"reconnects"`
	// CertificateExpires is when the workload certificate expires; zero without one.
	// CertificateError is why the last attempt to obtain one failed; a success clears it.
	CertificateExpires time.Time `json:"certificateExpires,omitzero"`
	CertificateError   string    `json:"certificateError,omitempty"`
	// SnapshotError is why the table could not be saved; a success clears it.
	SnapshotError string `json:"snapshotError,omitempty"`
	// LastError is why the stream ended or the last push was rejected; an accepted push
	// clears it.
	LastError string `json:"lastError,omitempty"`
}

// A Mode is the form in which a control plane sends a table.
type Mode string

// The modes.
const (
	ModeWhole Mode = "whole"
	ModeHosts Mode = "hosts"
)

// Status returns what the client is doing now. It is safe for concurrent use.
func (c *Client) Status() Status {
	c.mu.Lock()
	s, received := c.state, c.received
	c.mu.Unlock()
	switch {
	case !s.Loaded:
	case received.IsZero():
		// The wall clock is the only one that a reboot does not reset. It may have been set
		// back since the snapshot was written.
		s.TableAge = max(0, time.Since(s.LastPush.Round(0)).Seconds())
	default:
		s.TableAge = c.cfg.Clock.Since(received).Seconds()
	}
	if certificate := c.renewer.valid(); certificate != nil {
		s.CertificateExpires = certificate.Leaf.NotAfter
	}
	s.CertificateError, s.SnapshotError = c.renewer.lastFailure(), c.saver.lastFailure()
	return s
}

// table is the part of Status that describes the table in use.
type table struct {
	version  string
	pushed   time.Time
	stale    bool
	mode     Mode
	digest   string
	revision []byte
}

// inUseTable returns the description of the table in use, without version and time.
func (c *Client) inUseTable() table {
	switch {
	case c.table == nil:
		return table{}
	case c.table.mode == ModeHosts:
		return table{mode: ModeHosts, digest: c.table.sums.Sum().String(), revision: c.table.revision}
	}
	return table{mode: c.table.mode}
}

// setTable records the table in use, and reports whether it is the first one.
func (c *Client) setTable(t table) (first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first = !c.state.Loaded
	c.state.Loaded = true
	c.state.Version, c.state.LastPush, c.state.Stale = t.version, t.pushed, t.stale
	c.received = time.Time{}
	if !t.stale {
		c.received = c.cfg.Clock.Now()
	}
	c.state.Mode, c.state.Digest, c.state.Revision = t.mode, t.digest, t.revision
	c.state.LastError = ""
	if !t.stale {
		c.state.Pushes++
	}
	if first {
		close(c.ready)
	}
	return first
}

// setRejected records that a push was rejected.
func (c *Client) setRejected(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Pushes++
	c.state.Rejected++
	c.state.LastError = reason.Error()
}

// setDifference records that a table does not have its checksum, and the checksum of the one in use.
func (c *Client) setDifference(reason, digest string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.ChecksumDifferences++
	c.state.LastChecksumDifference = reason
	c.state.Digest = digest
}

// setOpen records that the stream was opened.
func (c *Client) setOpen() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Open = true
}

// setConnected records that a response arrived.
func (c *Client) setConnected(nonce string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Connected = true
	c.state.Nonce = nonce
}

// setDisconnected records that the stream ended, or could not be opened.
func (c *Client) setDisconnected(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Connected, c.state.Open = false, false
	c.state.LastError = reason.Error()
}

// countReconnect counts an attempt to connect after the first one.
func (c *Client) countReconnect() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Reconnects++
}

// The values of the label "result" of the counter of pushes.
const (
	resultApplied   = "applied"
	resultUnchanged = "unchanged"
	resultRejected  = "rejected"
)

// metrics are the metrics of one client. It is a [prometheus.Collector], so either all of
// them are registered or none.
type metrics struct {
	pushes   *prometheus.CounterVec
	bytes    prometheus.Histogram
	duration prometheus.Histogram
	all      []prometheus.Collector
}

// newMetrics returns the metrics of a client. Where Status has the value, it is read from
// there.
func newMetrics(status func() Status) *metrics {
	m := &metrics{
		pushes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "nametap_xds_pushes_total",
			Help: "Responses from the control plane, by result: applied, unchanged or rejected.",
		}, []string{"result"}),
		bytes: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "nametap_xds_push_bytes",
			Help: "Length of the responses from the control plane; 64 MiB is the limit.",
			// Few, since each costs a series. Servers that read native histograms get better ones.
			Buckets:                         []float64{16 << 20},
			NativeHistogramBucketFactor:     1.2,
			NativeHistogramMaxBucketNumber:  64,
			NativeHistogramMinResetDuration: time.Hour,
		}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:                            "nametap_xds_push_duration_seconds",
			Help:                            "Time to apply a push, from its shards to the table in use.",
			Buckets:                         []float64{.1, 1},
			NativeHistogramBucketFactor:     1.2,
			NativeHistogramMaxBucketNumber:  64,
			NativeHistogramMinResetDuration: time.Hour,
		}),
	}
	for _, result := range []string{resultApplied, resultUnchanged, resultRejected} {
		m.pushes.WithLabelValues(result) // so that it is exported as 0
	}
	gauge := func(name, help string, read func(Status) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help},
			func() float64 { return read(status()) })
	}
	m.all = []prometheus.Collector{
		m.pushes, m.bytes, m.duration,
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "nametap_xds_reconnects_total",
			Help: "Connection attempts to the control plane after the first.",
		}, func() float64 { return float64(status().Reconnects) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "nametap_xds_checksum_differences_total",
			Help: "Times that the table did not have the checksum of a push; what differed was sent again.",
		}, func() float64 { return float64(status().ChecksumDifferences) }),
		gauge("nametap_xds_connected", "1 while a stream to the control plane is open and has received a response.",
			func(s Status) float64 { return boolValue(s.Connected) }),
		gauge("nametap_xds_table_timestamp_seconds", "When the control plane last sent the table in use, in Unix time; 0 without a table.",
			func(s Status) float64 {
				if !s.Loaded {
					return 0
				}
				// Its age is right after a change of the wall clock, too.
				return math.Round(float64(time.Now().UnixMilli())/1e3 - s.TableAge)
			}),
		gauge("nametap_xds_certificate_expiry_timestamp_seconds", "When the workload certificate expires, in Unix time; 0 without one.",
			func(s Status) float64 {
				if s.CertificateExpires.IsZero() {
					return 0
				}
				return float64(s.CertificateExpires.Unix())
			}),
		gauge("nametap_xds_table_stale", "1 while the table in use is from the snapshot and no push has confirmed it.",
			func(s Status) float64 { return boolValue(s.Stale) }),
	}
	return m
}

// pushed counts a response.
func (m *metrics) pushed(result string, bytes int) {
	m.pushes.WithLabelValues(result).Inc()
	m.bytes.Observe(float64(bytes))
}

// Describe implements [prometheus.Collector].
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all {
		c.Describe(ch)
	}
}

// Collect implements [prometheus.Collector].
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all {
		c.Collect(ch)
	}
}

// boolValue returns 1 for true and 0 for false.
func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
