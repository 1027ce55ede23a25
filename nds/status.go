package nds

import (
	"sync"
	"time"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/condition"
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
	// Mode is "named" if the table came as resources with names, and "whole" if it came as one without a name. Digest is
	// a checksum of the table: in mode named digest.OfTable, in mode whole of the entries as the control plane sent them.
	Mode   Mode   `json:"mode,omitempty"`
	Digest string `json:"digest,omitempty"`
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
	ModeNamed Mode = "named" // a push has the parts of the table that change, each with a name
)

// A state has the values that the goroutines of a client record for Status. Its methods are safe for concurrent use.
type state struct {
	clock *clock.Clock
	ready chan struct{} // closed when the first table is in use

	// status has the values of Status and the metrics, except TableAge and Digest. The field received is when the
	// table in use was received, as a time of clock, or zero if the table is from the snapshot. The function digest
	// returns Status.Digest; nil means that it is empty.
	mu       sync.Mutex
	status   Status
	received time.Time
	digest   func() string
	// failures are the last failures to connect since the last accepted push, by code. rejection is why the last push
	// was rejected; "" if it was accepted.
	failures  map[condition.Code]failure
	rejection string
}

// failed records a failure to connect. An attempt reads the files first, so any other failure shows that they are right.
func (s *state) failed(f failure) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.failures, controlFile)
	s.failures[f.code] = f
}

// rejected records why a push was rejected.
func (s *state) rejected(reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.Pushes++
	s.status.Rejected++
	s.status.LastError, s.rejection = reason, reason
}

// read returns the recorded status, without Digest.
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

// readDigest returns the recorded status, with Digest. That takes 0.2 s with 100,000 resources after each change of the
// table, so only status and metrics call it.
func (s *state) readDigest() Status {
	status := s.read()
	s.mu.Lock()
	digestOf := s.digest
	s.mu.Unlock()
	if digestOf != nil {
		status.Digest = digestOf()
	}
	return status
}

// setTable records the table in use, and reports whether it is the first table. stale is true if the table is from
// the snapshot.
func (s *state) setTable(t *table, version string, pushed time.Time, stale bool) (first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := &s.status
	first = !status.Loaded
	status.Loaded, status.Version, status.LastPush, status.Stale, status.LastError = true, version, pushed, stale, ""
	// The digest costs as much as there are resources, and few look at it.
	if whole := t.resources[""]; whole != nil {
		status.Mode, s.digest = ModeWhole, sync.OnceValue(whole.digest)
	} else {
		all := t.shards
		status.Mode, s.digest = ModeNamed, sync.OnceValue(func() string { return digest.OfTable(all.versions) })
	}
	s.received = time.Time{}
	if !stale {
		s.received, s.rejection = s.clock.Now(), ""
		clear(s.failures)
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
