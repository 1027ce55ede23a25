package hosts

import (
	"hash/fnv"
	"slices"
)

// Labels are the labels of a workload, each as a hash of 64 bits. A client may have many labels, and a Sidecar may
// select any of them later, so all are kept as long as the client's stream lives: in 8 bytes each, whatever their
// length. Two labels with the same hash are no danger: a client could as well claim to have both.
type Labels []uint64

// NewLabels returns the labels with names and values.
func NewLabels(labels map[string]string) Labels {
	l := make(Labels, 0, len(labels))
	for name, value := range labels {
		l = append(l, hashLabel(name, value))
	}
	return l
}

// match reports whether l has all labels of a selector.
func (l Labels) match(selector Labels) bool {
	return !slices.ContainsFunc(selector, func(label uint64) bool { return !slices.Contains(l, label) })
}

// hashLabel returns the hash of a label. A zero byte separates the name from the value, because no name contains one.
func hashLabel(name, value string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	_, _ = h.Write([]byte{0})
	_, _ = h.Write([]byte(value))
	return h.Sum64()
}
