package nds

import (
	"sync"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// Status describes the state of a client. It is printed as JSON.
type Status struct {
	// Open is true if the stream is open, and Connected if it has also received a response.
	Connected bool   `json:"connected"`
	Open      bool   `json:"open"`
	Address   string `json:"address"`
	// Variant is the variant in use, which may be the fallback.
	Variant string `json:"variant"`
	// Loaded is true if a table is in use. Version is the table's version. LastPush is when the control plane last
	// sent or confirmed the table, and TableAge is the time since LastPush in seconds. Stale is true if the table is
	// from the snapshot and no push has confirmed the table.
	Loaded   bool      `json:"loaded"`
	Version  string    `json:"version"`
	LastPush time.Time `json:"lastPush,omitzero"`
	TableAge float64   `json:"tableAgeSeconds"`
	Stale    bool      `json:"stale"`
	// Mode is "hosts" if the table came as changes of hosts, and "whole" if it came whole. In mode hosts, Digest is
	// the checksum of the table, in hexadecimal. Revision says what the control plane had read when it sent the
	// table; only the control plane can interpret it. In mode whole both are empty.
	Mode     Mode   `json:"mode,omitempty"`
	Digest   string `json:"digest,omitempty"`
	Revision []byte `json:"revision,omitempty"`
	// ChecksumDifferences counts the changes, since the start, after which the table did not have the
	// checksum that the change names. LastChecksumDifference is the error of the last such change.
	ChecksumDifferences    uint64 `json:"checksumDifferences"`
	LastChecksumDifference string `json:"lastChecksumDifference,omitempty"`
	// Nonce is the nonce of the last response of any stream.
	Nonce string `json:"nonce,omitempty"`
	// Pushes counts all responses, and Rejected counts the responses that were NACKed.
	Pushes     uint64 `json:"pushes"`
	Rejected   uint64 `json:"rejected"`
	Reconnects uint64 `json:"reconnects"`
	// CertificateExpires is when the client certificate or the workload certificate expires; zero without one.
	// CertificateError is why the last failed attempt to obtain a workload certificate failed; a success clears it.
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
	ModeWhole Mode = "whole" // each push has the whole table
	ModeHosts Mode = "hosts" // each push has the changes of single hosts
)

// A state has the values that the goroutines of a client record for Status. Its methods are safe for concurrent use.
type state struct {
	clock *clock.Clock
	ready chan struct{} // closed when the first table is in use

	// status has the values of Status and the metrics, except TableAge. The field received is when the table
	// in use was received, as a time of clock, or zero if the table is from the snapshot.
	mu       sync.Mutex
	status   Status
	received time.Time
}

// read returns the recorded status.
func (s *state) read() Status {
	s.mu.Lock()
	status, received := s.status, s.received
	s.mu.Unlock()
	switch {
	case !status.Loaded:
	case received.IsZero():
		// Only the time of the wall clock is comparable after a reboot. The wall clock may have been set back since
		// the snapshot was written.
		status.TableAge = max(0, time.Since(status.LastPush.Round(0)).Seconds())
	default:
		status.TableAge = s.clock.Since(received).Seconds()
	}
	return status
}

// setTable records the table in use, and reports whether it is the first table. stale is true if the table is from
// the snapshot.
func (s *state) setTable(t *hostTable, version string, pushed time.Time, stale bool) (first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := &s.status
	first = !status.Loaded
	status.Loaded, status.Version, status.LastPush, status.Stale, status.LastError = true, version, pushed, stale, ""
	status.Mode, status.Digest, status.Revision = t.mode, t.digest(), t.revision
	s.received = time.Time{}
	if !stale {
		s.received = s.clock.Now()
		status.Pushes++
	}
	if first {
		close(s.ready)
	}
	return first
}

// update calls the function change with the recorded status, which change may modify.
func (s *state) update(change func(status *Status)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.status)
}
