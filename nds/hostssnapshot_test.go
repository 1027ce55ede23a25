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
// nil if it has none.
func restored(t *testing.T, p *plane, content []byte) map[string][]byte {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "nametable.snapshot"), content, 0o600); err != nil {
		t.Fatal(err)
	}
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
		return nil
	}
	return table.entries(t)
}

// C7, C11: a change of a host adds about as many bytes to the snapshot as the change has. After a restart the
// table is complete.
func TestChangesAreAppended(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	content, lengths, tables := hostsSnapshot(t, p, t.TempDir())
	if !bytes.HasPrefix(content, []byte("nametap\x04")) { // earlier versions refuse it
		t.Errorf("the snapshot begins with %q", content[:8])
	}
	for i := 1; i < len(lengths); i++ {
		added := lengths[i] - lengths[i-1]
		t.Logf("a change adds %d bytes", added)
		if added > 150 {
			t.Errorf("a change adds %d bytes", added)
		}
	}
	if got := restored(t, p, content); !reflect.DeepEqual(got, tables[3]) {
		t.Errorf("after a restart: %q", got)
	}
}

// C7, C12, D41: a bit that changes in the snapshot is found. A damaged base is set aside. The log counts up to
// the record that is damaged, so the table is one that was in use.
func TestDamagedHostsSnapshot(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	content, lengths, tables := hostsSnapshot(t, p, t.TempDir())
	for at := range content {
		damaged := slices.Clone(content)
		damaged[at] ^= 1 << (at % 8)
		got := restored(t, p, damaged)
		switch {
		case 8 <= at && at < 16: // the time of the push
			if !reflect.DeepEqual(got, tables[3]) {
				t.Errorf("byte %d: %q", at, got)
			}
		case at < lengths[0]:
			if got != nil {
				t.Errorf("byte %d of the base: %q", at, got)
			}
		default:
			record := 0
			for at >= lengths[record] {
				record++
			}
			if !reflect.DeepEqual(got, tables[record-1]) {
				t.Errorf("byte %d of record %d: %q", at, record, got)
			}
		}
	}
}

// C7, C11: a record that was not written entirely is ignored, as after a power failure. The control
// plane then sends what is missing, and the next change rewrites the snapshot.
func TestTornSnapshot(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	content, lengths, tables := hostsSnapshot(t, p, t.TempDir())
	for end := lengths[0]; end <= len(content); end += 7 {
		record := len(lengths) - 1
		for lengths[record] > end {
			record--
		}
		for _, tail := range [][]byte{nil, make([]byte, 100), bytes.Repeat([]byte{0xff}, 100)} {
			if end < len(content) && tail != nil && slices.Contains(lengths, end) {
				continue
			}
			if got := restored(t, p, slices.Concat(content[:end], tail)); !reflect.DeepEqual(got, tables[record]) {
				t.Errorf("%d bytes of %d: %q", end, len(content), got)
			}
		}
	}
	if got := restored(t, p, content[:lengths[0]-1]); got != nil {
		t.Errorf("a base that is cut: %q", got)
	}

	dir := t.TempDir()
	path := filepath.Join(dir, "nametable.snapshot")
	if err := os.WriteFile(path, content[:len(content)-1], 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.server.Restart(); err != nil {
		t.Fatal(err)
	}
	h, table := startHosts(t, p, stateDir(dir))
	h.wantLog("level=WARN", "the last changes in the snapshot", "bytes=")
	h.wantStatus(func(s nds.Status) bool { return s.Connected && !s.Stale && s.Digest == p.digest() })
	table.wantTable(t, p)
	first := p.requests()
	if last := first[len(first)-1]; !slices.Equal(last.sent, []string{"a.example"}) {
		t.Errorf("the client was sent %q", last.sent)
	}
	h.stop()
	again, err := os.ReadFile(path)
	if err != nil || len(again) < lengths[0] {
		t.Fatalf("%d bytes, %v", len(again), err)
	}
	p.server.Stop()
	if got := restored(t, p, again); !reflect.DeepEqual(got, tables[3]) {
		t.Errorf("written again: %q", got)
	}
}

// C7, C11: the log is bounded. When it is full, the snapshot is rewritten.
func TestSnapshotLogIsBounded(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	hostsIn(p)
	dir := t.TempDir()
	h, _ := startHosts(t, p, stateDir(dir))
	h.wantACK("v1")
	var longest, again int64
	const enough, limit = 800, 20_000 // on a busy machine, more pushes come between two writes
	for i := range limit {
		if i >= enough && again > 0 {
			break
		}
		p.set("a.example", fmt.Sprintf("192.0.2.%d", i%250))
		h.wantACK(p.push("a.example"))
		info, err := os.Stat(filepath.Join(dir, "nametable.snapshot"))
		if err != nil {
			continue // not written yet
		}
		if info.Size() < longest-1000 {
			again++
			longest = 0
		}
		longest = max(longest, info.Size())
		if longest > 70<<10 {
			t.Fatalf("the snapshot has %d bytes", longest)
		}
	}
	if again == 0 {
		t.Errorf("the snapshot was not written anew, and has %d bytes", longest)
	}
	h.stop()
	p.server.Stop()
	wantRestored(t, p, dir)
}

// wantRestored checks that an agent would start with the table of p from the snapshot in dir.
func wantRestored(t *testing.T, p *plane, dir string) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(dir, "nametable.snapshot"))
	if err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	want := maps.Clone(p.entries)
	p.mu.Unlock()
	if got := restored(t, p, content); !reflect.DeepEqual(got, want) {
		t.Errorf("after a restart: %q", got)
	}
}

// C7, C11, V1: of two agents with one state directory, as in a hand-over, the first one adds its changes to the
// snapshot. The second one has what it was sent meanwhile written when it ends, at the latest.
func TestTwoAgentsWithHosts(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	hostsIn(p)
	dir := t.TempDir()
	first, _ := startHosts(t, p, stateDir(dir))
	first.wantACK("v1")
	second, table := startHosts(t, p, stateDir(dir))
	inUse := func(h *harness) {
		t.Helper()
		h.wantStatus(func(s nds.Status) bool { return s.Connected && !s.Stale && s.Digest == p.digest() })
	}
	inUse(second)
	p.set("a.example", "192.0.2.8")
	p.push("a.example")
	inUse(first)
	inUse(second)
	second.wantLog("level=WARN", "snapshot of the table not written", "another process uses the state directory")
	first.stop()
	p.set("b.example", "192.0.2.9")
	p.push("b.example")
	inUse(second)
	table.wantTable(t, p)
	second.stop()
	p.server.Stop()
	wantRestored(t, p, dir)
}
