package nds_test

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

// flat returns the entries of shards.
func flat(shards map[int][]byte) (all []byte) {
	for _, entries := range shards {
		all = append(all, entries...)
	}
	return all
}

// C3, C8: a push that cannot be applied is NACKed with the reason, and the table stays. TestServers checks the versions.
func TestReject(t *testing.T) {
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		refuse := func(shards map[int][]byte) error {
			if strings.Contains(string(flat(shards)), "bad") {
				return errors.New("the table is bad")
			}
			return nil
		}
		var handled atomic.Int32 // then the memory of a push is freed
		h := start(t, options{plane: plane, apply: refuse, config: func(cfg *nds.Config) { cfg.Handled = func() { handled.Add(1) } }})
		h.server.Push(hosts("a.example.com"))
		h.wantApplied(plain(t, hosts("a.example.com")))
		h.server.Push(hosts("bad.example.com"))
		h.wantAnswer("v2")
		h.wantStatus(func(s nds.Status) bool {
			return s.Version == "v1" && s.Rejected == 1 && s.Pushes == 2 && s.LastError == "the table is bad"
		})
		h.server.Push(hosts("b.example.com"))
		h.wantApplied(plain(t, hosts("b.example.com")))
		h.wantACK("v3")
		h.wantStatus(func(s nds.Status) bool { return s.Version == "v3" && s.LastError == "" })
		if got := handled.Load(); got != 3 {
			t.Errorf("handled %d times, want 3", got)
		}
		h.wantLog("level=WARN", "push rejected", "version=v2", "the table is bad")
		if !plane.NoDelta {
			h.wantNode()
		}
	})
}

// C3: a reason with bytes that a protobuf string cannot hold, or as long as the push,
// still arrives.
func TestRejectReason(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := start(t, options{apply: func(shards map[int][]byte) error {
			key, err := digest.KeyOf(flat(shards))
			return errors.Join(err, fmt.Errorf("bad: %s", key))
		}})
		keyed := func(key string) []byte {
			entry := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), key)
			return protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), entry)
		}
		h.wantAnswer(h.server.PushBytes(keyed("\xff\xfex")))
		r := h.wantAnswer(h.server.PushBytes(keyed(strings.Repeat("long", 1<<16))))
		if got := r.Rejection().GetMessage(); !strings.HasPrefix(got, "bad: longlong") || len(got) > 5000 {
			t.Fatalf("rejected with %d bytes: %.40q", len(got), got)
		}
		if got := h.wantAnswer("v1").Rejection().GetMessage(); got != "bad: \uFFFDx" {
			t.Fatalf("rejected with %q", got)
		}
	})
}

// C8: 100,000 hosts in one push, and a push that is longer than permitted.
func TestLongPush(t *testing.T) {
	const many = 100_000
	var value []byte
	for i := range many {
		value = append(value, entryOf(t, fmt.Sprintf("service-%06d.namespace-%03d.svc.cluster.local", i, i%500), &api.NameTable_NameInfo{
			Ips:       []string{fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&0xff, i&0xff)},
			Registry:  "Kubernetes",
			Shortname: fmt.Sprintf("service-%06d", i),
			Namespace: fmt.Sprintf("namespace-%03d", i%500),
		})...)
	}
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		h := start(t, options{plane: plane})
		h.server.PushBytes(value)
		if got := <-h.applied; len(got) != len(value) {
			t.Fatalf("%d bytes, want the %d of %d hosts", len(got), len(value), many)
		}
		h.wantACK("v1")
	})
	subtest(t, "too long", func(t *testing.T) {
		t.Helper()
		h := start(t, options{})
		h.server.Push(hosts("a.example.com"))
		h.wantApplied(plain(t, hosts("a.example.com")))
		h.server.PushBytes(make([]byte, 64<<20))
		h.wantLog("no stream to the control plane", "push longer than 64 MiB")
		h.wantStatus(func(s nds.Status) bool { return s.Version == "v1" && s.Loaded })
	})
}
