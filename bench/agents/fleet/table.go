package fleet

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/nametap/nametap/bench/agents/wire"
)

// A table has the versions of the resources that an agent has. It never changes.
type table struct {
	versions map[string]string // by name
	// entries has a hash of each entry, by the name of the resource and the host, for full agents. Tables share the maps
	// of the resources in which they are equal.
	entries map[string]map[string]uint64
	changed []string // hosts whose entries differ from those of the table before, for full agents

	digest   func() string // returns the digest of the table, which is computed once
	announce func() []byte // returns the versions for the first request, which are computed once
}

// newTable returns a table without resources.
func newTable() *table {
	return (&table{versions: map[string]string{}, entries: map[string]map[string]uint64{}}).finish()
}

// finish sets the functions.
func (t *table) finish() *table {
	names := func() []string { return slices.Sorted(maps.Keys(t.versions)) }
	t.digest = sync.OnceValue(func() string {
		var lines strings.Builder
		for _, name := range names() {
			fmt.Fprintf(&lines, "%s %s\n", name, t.versions[name])
		}
		sum := sha256.Sum256([]byte(lines.String()))
		return hex.EncodeToString(sum[:16])
	})
	t.announce = sync.OnceValue(func() (all []byte) {
		for _, name := range names() {
			all = wire.AppendVersion(all, name, t.versions[name])
		}
		return all
	})
	return t
}

// apply returns the table after a response. With full, it compares the version of each resource with its bytes.
func (t *table) apply(r *wire.Response, full bool) (*table, error) {
	next := &table{versions: maps.Clone(t.versions), entries: maps.Clone(t.entries)}
	for _, name := range r.Removed {
		delete(next.versions, name)
		for host := range next.entries[name] {
			next.changed = append(next.changed, host)
		}
		delete(next.entries, name)
	}
	for _, one := range r.Resources {
		if next.versions[one.Name] = one.Version; !full {
			continue
		}
		sum := sha256.Sum256(one.Table)
		if want := "nt:" + base64.RawStdEncoding.EncodeToString(sum[:8]); one.Version != want {
			return nil, fmt.Errorf("the resource %q has the version %q: want %q, of %d bytes", one.Name, one.Version, want, len(one.Table))
		}
		entries := map[string]uint64{}
		if err := wire.Entries(one.Table, func(host string, raw []byte) {
			sum := sha256.Sum256(raw)
			if entries[host] = binary.BigEndian.Uint64(sum[:]); entries[host] != t.entries[one.Name][host] {
				next.changed = append(next.changed, host)
			}
		}); err != nil {
			return nil, err
		}
		next.entries[one.Name] = entries
	}
	return next.finish(), nil
}

// maxSteps bounds the steps that are kept for agents that make them later.
const maxSteps = 2048

// A step says which table an agent has after a response: the table before, and the names and versions in the response.
type step struct {
	from *table
	sent string
	full bool
}

// steps are the steps of all agents. Agents that make the same step share the table: only the first of them applies the
// response.
type steps struct {
	mu    sync.Mutex
	to    map[step]*table
	order []step // in which they came
}

func newSteps() *steps { return &steps{to: map[step]*table{}} }

// apply returns the table of an agent after a response. Only full agents verify all.
func (s *steps) apply(from *table, r *wire.Response, full bool) (*table, error) {
	var sent strings.Builder
	for _, one := range r.Resources {
		fmt.Fprintf(&sent, "%s %s\n", one.Name, one.Version)
	}
	for _, name := range r.Removed {
		fmt.Fprintf(&sent, "-%s\n", name)
	}
	if sent.Len() == 0 {
		return from, nil
	}
	key := step{from, sent.String(), full}
	s.mu.Lock()
	known := s.to[key]
	s.mu.Unlock()
	if known != nil && !full {
		return known, nil
	}
	next, err := from.apply(r, full)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.to[key]; known != nil {
		return known, nil
	}
	if len(s.order) == maxSteps {
		delete(s.to, s.order[0])
		s.order = s.order[1:]
	}
	s.to[key] = next
	s.order = append(s.order, key)
	return next, nil
}
