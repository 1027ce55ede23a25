package nds_test

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

// hostsSnapshot runs a client of p in dir that receives the table and then, one by one, three changes
// of a host. It returns the content of the snapshot, the lengths that it had after each push, and the
// tables, and stops p.
func hostsSnapshot(t *testing.T, p *plane, dir string) (content []byte, lengths []int, tables []map[string][]byte) {
	t.Helper()
	hostsIn(p)
	h, _ := startHosts(t, p, stateDir(dir))
	path := filepath.Join(dir, "nametable.snapshot")
	note := func(version string) {
		h.wantACK(version)
		wait.Until(t, "the snapshot is saved", func() bool {
			data, err := os.ReadFile(path)
			content = data
			return err == nil && len(data) > 0 && (len(lengths) == 0 || len(data) > lengths[len(lengths)-1])
		})
		p.mu.Lock()
		defer p.mu.Unlock()
		lengths, tables = append(lengths, len(content)), append(tables, maps.Clone(p.entries))
	}
	note("v1")
	for i := range 3 {
		p.set("a.example", fmt.Sprintf("192.0.2.%d", i+2))
		note(p.push("a.example"))
	}
	h.stop()
	p.server.Stop()
	return content, lengths, tables
}

// restored returns the table of a client that starts with this snapshot and without a control plane;
// nil if it has none. It also returns how many warnings there are about the end of the snapshot.
func restored(t *testing.T, p *plane, content []byte) (entries map[string][]byte, warnings int) {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "nametable.snapshot"), string(content))
	h, table := startHosts(t, p, stateDir(dir))
	<-h.client.Restored()
	s := h.client.Status()
	h.stop()
	if loaded := table.calls() > 0; loaded != s.Loaded || loaded && (!s.Stale || s.Mode != nds.ModeHosts) {
		t.Errorf("the status is %+v", s)
	}
	if !s.Loaded {
		if _, err := os.Stat(filepath.Join(dir, "nametable.snapshot.bad")); err != nil {
			t.Errorf("not set aside: %v", err)
		}
		return nil, 0
	}
	return table.entries(t), h.logs.Count("level=WARN", "the last changes in the snapshot")
}

// C7, C11, C12: a change of a host adds about as many bytes to the snapshot as the change has. After a restart the
// table is complete. The log counts up to a record that is torn or damaged; a damaged base is set aside.
func TestChangesAreAppended(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := startPlane(t, fakexds.Options{})
		content, lengths, tables := hostsSnapshot(t, p, t.TempDir())
		if !bytes.HasPrefix(content, []byte("nametap\x04")) { // earlier versions refuse it
			t.Errorf("the snapshot begins with %q", content[:8])
		}
		for i := 1; i < len(lengths); i++ {
			if added := lengths[i] - lengths[i-1]; added > 150 {
				t.Errorf("a change adds %d bytes", added)
			}
		}
		flipped := func(at int) []byte {
			damaged := slices.Clone(content)
			damaged[at] ^= 4
			return damaged
		}
		for name, tc := range map[string]struct {
			content []byte
			want    map[string][]byte // nil for a snapshot that is set aside
			warned  int
		}{
			"whole":              {content, tables[3], 0},
			"time of the push":   {flipped(12), tables[3], 0},
			"torn":               {content[:len(content)-1], tables[2], 1},
			"one record only":    {content[:lengths[1]], tables[1], 0},
			"zeros behind it":    {slices.Concat(content, make([]byte, 100)), tables[3], 1},
			"a damaged record":   {flipped(lengths[1] + 20), tables[1], 1},
			"a damaged length":   {flipped(lengths[0]), tables[0], 1},
			"a damaged base":     {flipped(lengths[0] - 1), nil, 0},
			"a damaged checksum": {flipped(20), nil, 0},
			"a torn base":        {content[:lengths[0]-1], nil, 0},
		} {
			if got, warned := restored(t, p, tc.content); !reflect.DeepEqual(got, tc.want) || warned != tc.warned {
				t.Errorf("%s: %q, %d warnings", name, got, warned)
			}
		}
	})
}
