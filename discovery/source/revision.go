package source

import (
	"encoding/binary"
	"time"
)

// A Revision is a state of an API server: the version of each resource that [Objects] reads, in an order
// that is the same in all replicas of one release; 0 for one that is not known. Versions of resources of an
// API server are comparable (KEP-5504).
type Revision []uint64

// Encode returns the revision in a form that [ParseRevision] takes.
func (r Revision) Encode() []byte {
	var b []byte
	for _, version := range r {
		b = binary.AppendUvarint(b, version)
	}
	return b
}

// ParseRevision returns the revision in b. It leaves out everything from a damaged part on.
func ParseRevision(b []byte) Revision {
	var r Revision
	for len(b) > 0 {
		version, n := binary.Uvarint(b)
		if n <= 0 {
			return r
		}
		r, b = append(r, version), b[n:]
	}
	return r
}

// Heard says how much was heard of an API server, for each resource of a [Revision].
type Heard struct {
	upTo Revision    // versions up to which everything was heard
	from []time.Time // when the lists began that the objects are from
}

// Add adds a resource of which everything was heard up to a version, after a list that began at a time.
func (h *Heard) Add(upTo uint64, from time.Time) {
	h.upTo, h.from = append(h.upTo, upTo), append(h.from, from)
}

// Lacks reports whether the API server may have a change of a resource that was not heard yet,
// because a revision names it that was known at a time. It does not if a list that began later, and
// so has the newest state, lacks the change: then the revision comes from another API server, from
// a time before etcd was restored, or is invented. Revisions of different releases, which may read
// other resources, are not compared.
func (h Heard) Lacks(resource int, r Revision, known time.Time) bool {
	return len(r) == len(h.upTo) && h.upTo[resource] < r[resource] && h.from[resource].Before(known)
}

// Includes reports whether h lacks no resource, see [Heard.Lacks].
func (h Heard) Includes(r Revision, known time.Time) bool {
	for i := range h.upTo {
		if h.Lacks(i, r, known) {
			return false
		}
	}
	return true
}
