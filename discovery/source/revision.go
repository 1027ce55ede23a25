package source

import "encoding/binary"

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

// ParseRevision returns the revision in b. What follows a damaged part is left out.
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

// Includes reports whether the revision is at least as late as another one in all resources. Revisions of
// different releases, which may read other resources, are not compared.
func (r Revision) Includes(other Revision) bool {
	if len(r) != len(other) {
		return true
	}
	for i, version := range other {
		if r[i] < version {
			return false
		}
	}
	return true
}
