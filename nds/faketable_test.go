package nds_test

import (
	"fmt"
	"slices"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/api/digest"
)

// wantHosts checks that the table in use has these entries.
func (h *harness) wantHosts(entries ...[]byte) {
	h.t.Helper()
	h.wantEntries(h.table.whole(), slices.Concat(entries...))
}

// A fakeTable is a table in use that keeps the entries.
type fakeTable struct {
	mu     sync.Mutex
	shards [digest.Count][]byte
}

func (f *fakeTable) apply(shards map[int][]byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for at, entries := range shards {
		for rest := entries; len(rest) > 0; {
			_, n := protowire.ConsumeBytes(rest[1:])
			if n < 0 {
				return fmt.Errorf("shard %d has %q", at, rest)
			}
			if key, err := digest.KeyOf(rest[:1+n]); err != nil || digest.ShardOf(key) != at {
				return fmt.Errorf("shard %d has %q", at, rest[:1+n])
			}
			rest = rest[1+n:]
		}
		f.shards[at] = entries
	}
	return nil
}

// whole returns all entries.
func (f *fakeTable) whole() []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Concat(f.shards[:]...)
}
