package table

import (
	"hash/maphash"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// Domains returns domains that all hosts of the table are at or below, except hosts below the
// cluster domain and a wildcard of the root. A host's own name is such a domain, and so is the
// suffix of a wildcard; domains below another host's are left out. They come in no order, without
// duplicates.
//
// The fingerprint covers the names of all hosts: tables of one series with equal names have
// equal fingerprints.
func (t *Table) Domains() (domains []wire.Name, fingerprint uint64) {
	var s Scratch
	for h := range t.all {
		fingerprint ^= maphash.String(t.seed, string(h.Name))
		name := h.Name
		if h.wildcard() {
			name = name.Parent()
		}
		if name != wire.Root && !name.Below(t.Cluster.Domain) && !t.hasAbove(name, h.wildcard(), &s) {
			domains = append(domains, name)
		}
	}
	return domains, fingerprint
}

// hasAbove reports whether a domain of a host, or of a wildcard, is below another entry's
// domain, or equals it.
func (t *Table) hasAbove(name wire.Name, wildcard bool, s *Scratch) bool {
	if wildcard {
		if _, found := t.find(name); found { // that host has the same domain
			return true
		}
	}
	for parent := name.Parent(); parent != wire.Root; parent = parent.Parent() {
		if _, found := t.find(parent); found {
			return true
		}
	}
	_, found := t.wildcard(name, s)
	return found
}
