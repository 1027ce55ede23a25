package nds

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/fakexds"
)

// C5: pauses from 0.1 s to 30 s, with full jitter. A test from outside would have to wait
// for them.
func TestPause(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		failures int
		part     float64
		want     time.Duration
	}{
		{0, 0, 0},
		{0, 1, 100 * time.Millisecond},
		{0, 0.5, 50 * time.Millisecond},
		{1, 1, 200 * time.Millisecond},
		{8, 1, 25600 * time.Millisecond},
		{9, 1, 30 * time.Second},
		{15, 1, 30 * time.Second},
		{1 << 40, 0.1, 3 * time.Second},
	} {
		if got := pause(tc.failures, tc.part); got != tc.want {
			t.Errorf("pause after %d failures, part %v, is %v, want %v", tc.failures, tc.part, got, tc.want)
		}
	}
}

// C1, C5: a change of the node ends the pause before the next connect. A signal without a
// change does not shorten it.
func TestChangeEndsPause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ips := []netip.Addr{netip.MustParseAddr("127.0.0.1")}
		node := Node{PodName: "web-0", Namespace: "shop", IPs: ips}
		changed := make(chan struct{}, 1)
		c := &Client{cfg: Config{Clock: clock.New(), Changed: changed, Node: node, Refresh: func(n Node) (Node, error) {
			n.IPs = ips
			return n, nil
		}}}
		var err error
		if c.sentNode, err = c.currentNode(); err != nil {
			t.Fatal(err)
		}
		changed <- struct{}{}
		began := time.Now()
		c.wait(t.Context(), 30*time.Second)
		if took := time.Since(began); took != 30*time.Second {
			t.Errorf("the node is the same, and the pause was %v", took)
		}
		ips = []netip.Addr{netip.MustParseAddr("10.0.0.1")}
		changed <- struct{}{}
		began = time.Now()
		c.wait(t.Context(), 30*time.Second)
		if took := time.Since(began); took > nodeSettle {
			t.Errorf("the node changed, and the pause was %v", took)
		}
	})
}

// V7, C5: a suspend ends the pause before the next connect, the pauses begin again, and
// the workload certificate is checked. A brief suspend has no effect.
func TestResumeEndsPause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		asleep := time.Duration(0)
		node := Node{PodName: "web-0", Namespace: "shop", IPs: []netip.Addr{netip.IPv6Loopback()}}
		c := &Client{
			cfg:      Config{Node: node, Clock: clock.From(func() time.Duration { return asleep })},
			renewer:  &certRenewer{wake: make(chan struct{}, 1)},
			failures: 20,
		}
		for _, suspend := range []struct{ length, pause time.Duration }{
			{briefSleep - 1, 30 * time.Second}, {1, clock.Tick}, {8 * time.Hour, clock.Tick},
		} {
			var err error
			if c.sentNode, err = c.currentNode(); err != nil {
				t.Fatal(err)
			}
			asleep += suspend.length
			began := time.Now()
			c.wait(t.Context(), 30*time.Second)
			if took := time.Since(began); took > suspend.pause || suspend.pause > clock.Tick && took != suspend.pause {
				t.Errorf("after a suspend of %v the pause was %v, want at most %v", suspend.length, took, suspend.pause)
			}
		}
		if c.failures != 0 || len(c.renewer.wake) != 1 {
			t.Errorf("%d failures, %d checks of the certificate", c.failures, len(c.renewer.wake))
		}
	})
}

// C1: the expected name in the control plane's certificate follows from its address.
func TestServerNameFollowsAddress(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string]string{
		"istiod-canary.istio-system.svc:15012": "istiod-canary.istio-system.svc",
		"istiod.example.com:443":               "istiod.example.com",
		"localhost:15012":                      defaultServerName,
		"198.51.100.7:15012":                   defaultServerName,
		"[2001:db8::7]:15012":                  defaultServerName,
	} {
		cfg, err := Config{Addr: addr, Node: Node{PodName: "a", Namespace: "b", IPs: []netip.Addr{netip.IPv6Loopback()}}}.withDefaults()
		if err != nil || cfg.ServerName != want || cfg.caServerName() != want {
			t.Errorf("%s: %q, %v, want %q", addr, cfg.ServerName, err, want)
		}
	}
}

// C1: the second file of root certificates is read if the first does not exist. An error is
// about the file that exists.
func TestReadRoots(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	missing, good, bad := filepath.Join(dir, "missing"), filepath.Join(dir, "good"), filepath.Join(dir, "bad")
	if err := errors.Join(
		os.WriteFile(good, []byte(fakexds.NewAuthority(t, "a", "spiffe://a/b").Root()), 0o600),
		os.Symlink(bad, bad), // even root cannot read a link to itself
	); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ file, fallback, want string }{
		{"", "", ""}, {good, bad, ""}, {missing, good, ""},
		{missing, bad, bad}, {missing, missing + "2", missing + ":"}, {bad, good, bad}, {missing, "", missing},
	} {
		pool, err := readRoots(tc.file, tc.fallback)
		switch {
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%q, %q: error %v, want one about %q", tc.file, tc.fallback, err, tc.want)
		case tc.want == "" && (err != nil || (pool == nil) != (tc.file == "")):
			t.Errorf("%q, %q: %v, %v", tc.file, tc.fallback, pool, err)
		}
	}
}

func testSnapshot(tb testing.TB) snapshot {
	tb.Helper()
	table, err := wholeTable(testEntries(tb, "a.example", "B.example", "c.example"))
	if err != nil {
		tb.Fatal(err)
	}
	return snapshot{owner: "shop/Kubernetes", version: "v1", pushed: time.Unix(0, 1_800_000_000_000_000_000), table: table}
}

// C7: the parser does not panic on any file, and what it accepts reads the same after it
// is written again.
func FuzzSnapshot(f *testing.F) {
	parts, err := testSnapshot(f).marshal()
	if err != nil {
		f.Fatal(err)
	}
	data := slices.Concat(parts...)
	f.Add(data)
	f.Add(data[:len(data)-1])
	f.Add(data[snapshotBase:])
	f.Add([]byte(snapshotMagic))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, file := range [][]byte{data, resealed(data)} {
			s, err := parseSnapshot(file)
			if err != nil {
				continue
			}
			again, err := s.marshal()
			if err != nil {
				t.Fatalf("read, but cannot be written: %v", err)
			}
			reread, err := parseSnapshot(slices.Concat(again...))
			if err != nil {
				t.Fatalf("written, but cannot be read: %v", err)
			}
			if !maps.EqualFunc(s.table.content(), reread.table.content(), bytes.Equal) || s.table.mode != reread.table.mode || s.owner != reread.owner || !s.pushed.Equal(reread.pushed) {
				t.Fatalf("read %+v, after writing %+v", s, reread)
			}
		}
	})
}

// resealed returns a file with the base data and its correct checksum, which a fuzzer does not
// find.
func resealed(data []byte) []byte {
	base := append(binary.BigEndian.AppendUint64(nil, uint64(len(data))), data...)
	sum := sha256.Sum256(base)
	return slices.Concat([]byte(snapshotMagic), make([]byte, 8), sum[:], base)
}

// C3, C11: any response has one table, or is refused. The table has the entries of the response.
func FuzzResponse(f *testing.F) {
	m := &discoveryv3.DeltaDiscoveryResponse{TypeUrl: TypeURL, Resources: []*discoveryv3.Resource{
		{Resource: &anypb.Any{TypeUrl: TypeURL, Value: testEntries(f, "a.example", "B.example")}},
	}}
	data, err := proto.Marshal(m)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		m := &discoveryv3.DeltaDiscoveryResponse{}
		if proto.Unmarshal(data, m) != nil {
			return
		}
		value, there, err := response{typeURL: m.GetTypeUrl(), resources: m.GetResources()}.table()
		if err != nil {
			return
		}
		if there != (len(m.GetResources()) == 1) || there && m.GetResources()[0].GetName() != "" {
			t.Fatalf("a table of %v", m)
		}
		table, err := wholeTable(value)
		if err != nil {
			return
		}
		size := 0
		for at := range table.shards {
			size += len(table.shards[at].entries)
		}
		if size > len(value) || (table.len() == 0) != (size == 0) {
			t.Fatalf("%d hosts, of %d bytes, in %q", table.len(), size, value)
		}
	})
}
