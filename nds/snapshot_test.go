package nds_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

// stateDir makes a client save a snapshot in dir.
func stateDir(dir string) func(*nds.Config) {
	return func(cfg *nds.Config) { cfg.StateDir = dir }
}

// snapshotOf runs a client of s in dir until the snapshot holds the push v1, and returns the path of the snapshot.
func snapshotOf(t *testing.T, s *fakexds.Server, dir string) string {
	t.Helper()
	h := start(t, options{server: s, config: stateDir(dir)})
	h.wantACK("v1")
	h.stop()
	return filepath.Join(dir, "nametable.snapshot")
}

// C7: after a restart without the control plane the last good table is in use at once,
// and the first push confirms it.
func TestSnapshot(t *testing.T) {
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		dir := t.TempDir()
		server := serve(t, plane)
		both := hosts("a.example.com", "b.example.com")
		server.Push(both)
		path := snapshotOf(t, server, dir)
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if mode := info.Mode(); mode != 0o600 {
			t.Fatalf("snapshot has mode %v", mode)
		}

		server.Stop()
		h := start(t, options{server: server, config: stateDir(dir)})
		h.wantApplied(plain(t, both))
		<-h.client.Ready()
		h.wantStatus(func(s nds.Status) bool {
			return s.Loaded && s.Stale && s.Version == "v1" && s.Pushes == 0 && s.TableAge > 0
		})
		if err := server.Restart(); err != nil {
			t.Fatal(err)
		}
		// The answer on the second stream.
		if _, err := server.Wait(h.ctx, func(r fakexds.Request) bool { return r.Stream == 2 && r.Nonce() != "" }); err != nil {
			t.Fatal(err)
		}
		h.wantNothingApplied()
		h.wantStatus(func(s nds.Status) bool { return s.Connected && !s.Stale && s.Pushes == 1 })
	})
}

// C7: a snapshot that is damaged, of another node, or refused by the apply function is
// set aside and logged. The next push writes a new one.
func TestSnapshotSetAside(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		damage func(data []byte) []byte
		config func(*nds.Config)
		refuse bool
		logged string
	}{
		{name: "empty", damage: func([]byte) []byte { return nil }, logged: "not a snapshot"},
		{name: "foreign", damage: func([]byte) []byte { return []byte("{\"hosts\": []}\n") }, logged: "not a snapshot"},
		{name: "cut", damage: func(data []byte) []byte { return data[:len(data)-1] }, logged: "checksum"},
		{name: "head only", damage: func(data []byte) []byte { return data[:20] }, logged: "only 20 bytes"},
		{name: "another version", damage: func(data []byte) []byte { data[len("nametap")] = 99; return data }, logged: "another version"},
		{name: "flipped", damage: func(data []byte) []byte { data[len(data)-1] ^= 1; return data }, logged: "checksum"},
		{name: "namespace", config: func(cfg *nds.Config) { cfg.Node.Namespace = "other" }, logged: "other/Kubernetes"},
		{name: "cluster", config: func(cfg *nds.Config) { cfg.Node.ClusterID = "west" }, logged: "shop/west"},
		{name: "refused", refuse: true, logged: "refused by the table"},
	} {
		subtest(t, tc.name, func(t *testing.T) {
			t.Helper()
			dir := t.TempDir()
			server := serve(t, fakexds.Options{})
			server.Push(hosts("a.example.com"))
			path := snapshotOf(t, server, dir)
			server.Stop()
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if tc.damage != nil {
				data = tc.damage(data)
				if err := os.WriteFile(path, data, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			refusals := 0
			h := start(t, options{
				server: server,
				config: func(cfg *nds.Config) {
					cfg.StateDir = dir
					if tc.config != nil {
						tc.config(cfg)
					}
				},
				apply: func(map[int][]byte) error {
					if refusals++; tc.refuse && refusals == 1 {
						return errors.New("refused by the table")
					}
					return nil
				},
			})
			h.wantLog("level=WARN", "set aside", tc.logged)
			h.wantNothingApplied()
			if aside, err := os.ReadFile(path + ".bad"); err != nil || string(aside) != string(data) {
				t.Fatalf("set aside: %q, %v", aside, err)
			}
			if err := server.Restart(); err != nil {
				t.Fatal(err)
			}
			h.wantApplied(plain(t, hosts("a.example.com")))
			h.stop()
			if _, err := os.Stat(path); err != nil {
				t.Fatalf("no new snapshot: %v", err)
			}
		})
	}
}

// C7: a snapshot that cannot be read, because of an I/O error for example, stays in place until the next push is saved.
func TestSnapshotUnreadable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		server := serve(t, fakexds.Options{})
		server.Push(hosts("a.example.com"))
		path := snapshotOf(t, server, dir)
		server.Stop()
		unreadable(t, path)
		h := start(t, options{server: server, config: stateDir(dir)})
		h.wantLog("level=WARN", "snapshot of the table not read")
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("an unreadable snapshot was set aside: %v", err)
		}
		if err := server.Restart(); err != nil {
			t.Fatal(err)
		}
		h.wantApplied(plain(t, hosts("a.example.com")))
		h.stop()
		if _, err := os.ReadFile(path); err != nil {
			t.Errorf("no new snapshot: %v", err)
		}
	})
}

// unreadable replaces a file by a link to itself, which even root cannot read.
func unreadable(t *testing.T, path string) {
	t.Helper()
	if err := errors.Join(os.Rename(path, path+".saved"), os.Symlink(path, path)); err != nil {
		t.Fatal(err)
	}
}

// readable undoes unreadable.
func readable(t *testing.T, path string) {
	t.Helper()
	if err := os.Rename(path+".saved", path); err != nil {
		t.Fatal(err)
	}
}

// wantSaved waits until the snapshot holds the last push.
func (h *harness) wantSaved(path string) {
	h.t.Helper()
	want := h.client.Status().LastPush.Format(time.RFC3339Nano)
	wait.Until(h.t, "the snapshot is saved", func() bool {
		data, err := os.ReadFile(path)
		return err == nil && strings.Contains(string(data), want)
	})
}

// C7: of two agents with one state directory, the first one owns it. The second one does
// not use or change a snapshot of another namespace, and logs that once. It writes after
// the first one has ended.
func TestTwoAgentsOneStateDir(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		path := filepath.Join(dir, "nametable.snapshot")
		first := start(t, options{config: stateDir(dir)})
		first.server.Push(hosts("a.example.com"))
		first.wantACK("v1")
		first.wantSaved(path)
		second := start(t, options{config: func(cfg *nds.Config) { cfg.StateDir, cfg.Node.Namespace = dir, "other" }})
		second.wantLog("level=WARN", "snapshot of the table not used", "other/Kubernetes", "another process uses the state directory")
		second.server.Push(hosts("other.example.com"))
		second.wantApplied(plain(t, hosts("other.example.com")))
		second.wantLog("level=WARN", "snapshot of the table not written", "another process uses the state directory")
		first.stop()
		snapshot, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(snapshot), "shop/Kubernetes") {
			t.Fatalf("the first agent's snapshot is %q, %v", snapshot, err)
		}
		second.server.Push(hosts("other.example.com"))
		second.wantACK("v2")
		second.stop()
		if snapshot, err = os.ReadFile(path); err != nil || !strings.Contains(string(snapshot), "other/Kubernetes") {
			t.Fatalf("the second agent's snapshot is %q, %v", snapshot, err)
		}
	})
}
