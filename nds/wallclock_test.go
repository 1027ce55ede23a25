package nds_test

import (
	"crypto/sha256"
	"os"
	"slices"
	"testing"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

// V7, C7: a table that was saved before the wall clock was set back, or long before it was set forward, is in use. Its
// age is what the wall clock says, but never negative.
func TestSnapshotOverClockJump(t *testing.T) {
	t.Parallel()
	for name, jump := range map[string]time.Duration{"back": -365 * 24 * time.Hour, "forward": 365 * 24 * time.Hour} {
		subtest(t, name, func(t *testing.T) {
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
			const head = len("nametap") + 1 + sha256.Size // the checksum is of the rest
			m := &discoveryv3.DeltaDiscoveryResponse{}
			if err := proto.Unmarshal(data[head:], m); err != nil {
				t.Fatal(err)
			}
			pushed, err := time.Parse(time.RFC3339Nano, m.GetNonce())
			if age := time.Since(pushed); err != nil || age < 0 || age > time.Minute {
				t.Fatalf("the file has the time %v, %v", pushed, err)
			}
			m.Nonce = pushed.Add(-jump).Format(time.RFC3339Nano)
			content, err := proto.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			sum := sha256.Sum256(content)
			data = slices.Concat([]byte("nametap\x05"), sum[:], content)
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			h := start(t, options{server: server, config: stateDir(dir)})
			h.wantApplied(plain(t, hosts("a.example.com")))
			least := max(0, jump).Seconds()
			h.wantStatus(func(s nds.Status) bool {
				return s.Loaded && s.Stale && s.TableAge >= least && s.TableAge < least+60
			})
			if err := server.Restart(); err != nil {
				t.Fatal(err)
			}
			h.wantStatus(func(s nds.Status) bool { return s.Connected && !s.Stale && s.TableAge < 60 })
		})
	}
}
