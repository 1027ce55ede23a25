package source

import (
	"encoding/binary"
	"time"
)

// A Revision is a state of an API server: the version of each resource that [Objects] reads, 0 if the version is not
// known. The order of the resources is the same in all replicas of one release. Of two versions of a resource at one
// API server, the higher one is the newer one (KEP-5504).
type Revision []uint64

// Encode returns the revision in a form that [ParseRevision] takes.
func (r Revision) Encode() []byte {
	var b []byte
	for _, version := range r {
		b = binary.AppendUvarint(b, version)
	}
	return b
}

// ParseRevision returns the revision in b. If a part of b is damaged, it leaves out that part and all parts after it.
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

// Heard says for each resource of a [Revision] up to which version the API server has sent everything.
type Heard struct {
	upTo Revision    // the versions up to which everything was sent
	from []time.Time // when the last list of each resource began
}

// Add adds a resource. The API server has sent everything up to the version upTo, after a list that began at from.
func (h *Heard) Add(upTo uint64, from time.Time) {
	h.upTo, h.from = append(h.upTo, upTo), append(h.from, from)
}

// Lacks reports whether the API server may have a change of a resource that it has not sent yet. This is so if the
// revision r, which a client had at the time heldAt, has a later version of the resource. But if the last list of the
// resource began after heldAt, Lacks reports false. Such a list has the newest state, so r must be from another API
// server, from before etcd was restored, or invented. Lacks also reports false for revisions of another release, which
// may read other resources.
func (h Heard) Lacks(resource int, r Revision, heldAt time.Time) bool {
	return len(r) == len(h.upTo) && h.upTo[resource] < r[resource] && h.from[resource].Before(heldAt)
}

// Includes reports whether the API server has sent all changes that are in r: [Heard.Lacks] is false for each resource.
func (h Heard) Includes(r Revision, heldAt time.Time) bool {
	for i := range h.upTo {
		if h.Lacks(i, r, heldAt) {
			return false
		}
	}
	return true
}
