package nds

import (
	"crypto/sha256"
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
	"unicode/utf8"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
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

// testEntries returns a NameTable in wire form.
func testEntries(tb testing.TB, hosts ...string) []byte {
	tb.Helper()
	table := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{}}
	for _, host := range hosts {
		table.Table[host] = &api.NameTable_NameInfo{Ips: []string{"192.0.2.1"}}
	}
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(table)
	if err != nil {
		tb.Fatal(err)
	}
	return value
}

// newReceiver returns a receiver without a table.
func newReceiver() *receiver {
	return &receiver{table: newTable(), cfg: Config{MaxTable: maxPushBytes}}
}

// contents returns the names and versions of the resources of a table, with their entries in order.
func contents(t *table) map[string][]string {
	all := map[string][]string{}
	for name, r := range t.resources {
		var entries []string
		for _, p := range r.parts {
			for rest := p.entries; len(rest) > 0; {
				_, _, n := protowire.ConsumeField(rest)
				entries, rest = append(entries, string(rest[:n])), rest[n:]
			}
		}
		slices.Sort(entries)
		all[name] = append(entries, r.version)
	}
	return all
}

// C7: the parser does not panic on any file, and what it accepts reads the same after it
// is written again.
func FuzzSnapshot(f *testing.F) {
	r := newReceiver()
	u, err := r.update(response{typeURL: TypeURL, resources: []*discoveryv3.Resource{
		{Name: "x", Version: "1", Resource: &anypb.Any{TypeUrl: TypeURL, Value: testEntries(f, "a.example", "B.example", "c.example")}},
		{Name: "y", Resource: &anypb.Any{TypeUrl: TypeURL}},
	}})
	if err != nil {
		f.Fatal(err)
	}
	parts, err := snapshot{owner: "shop/Kubernetes", version: "v1", pushed: time.Unix(0, 1_800_000_000_000_000_000), shards: u.shards}.marshal()
	if err != nil {
		f.Fatal(err)
	}
	data := slices.Concat(parts...)
	f.Add(data)
	f.Add(data[:len(data)-1])
	f.Add(data[snapshotHead:])
	f.Add([]byte(snapshotMagic))
	f.Fuzz(func(t *testing.T, data []byte) {
		sum := sha256.Sum256(data) // the correct checksum, which a fuzzer does not find
		for _, file := range [][]byte{data, slices.Concat([]byte(snapshotMagic), sum[:], data)} {
			s, before, err := reread(file)
			if err != nil {
				continue
			}
			s.shards = before.shards
			parts, err := s.marshal()
			if err != nil {
				t.Fatalf("read, but cannot be written: %v", err)
			}
			again, after, err := reread(slices.Concat(parts...))
			if err != nil {
				t.Fatalf("written, but cannot be read: %v", err)
			}
			if diff := cmp.Diff(contents(before), contents(after)); diff != "" || s.owner != again.owner || !s.pushed.Equal(again.pushed) {
				t.Fatalf("read %+v, after writing %+v:\n%s", s, again, diff)
			}
		}
	})
}

// reread returns the snapshot in a file, and its table.
func reread(file []byte) (snapshot, *table, error) {
	s, err := parseSnapshot(file)
	if err != nil {
		return snapshot{}, nil, err
	}
	r := newReceiver()
	u, err := r.update(s.response)
	if err != nil {
		return snapshot{}, nil, err
	}
	r.table.use(u)
	return s, r.table, nil
}

// C3, C11: the parser of resources does not panic on any bytes, and keeps all hosts.
func FuzzResource(f *testing.F) {
	f.Add("x", testEntries(f, "a.example", "B.example", "c.example"))
	f.Add("a.example", []byte{0x12, 4, 0x12, 2, 'a', 'b'})
	f.Add("a.example", []byte{0x12, 0, 0x12, 0, 0x1a, 0})
	f.Add("\x00m", []byte{0x12, 0})
	f.Add("x", []byte{0x0a, 2, 0x0a, 5})
	f.Fuzz(func(t *testing.T, name string, value []byte) {
		r, err := newResource(name, "1", value)
		want, got := &api.NameTable{}, &api.NameTable{}
		if proto.Unmarshal(value, want) != nil || !utf8.ValidString(name) {
			return // what is wrong with the value of an entry, the table finds
		}
		if err != nil {
			if named := name != "" && name[0] != 0; named || want.GetNameInfo() == nil {
				t.Fatalf("refused: %v", err)
			}
			return
		}
		want = &api.NameTable{Table: want.GetTable(), NameInfo: want.GetNameInfo()} // without fields that are not known
		if want.GetNameInfo() != nil {
			want.Table = maps.Clone(want.GetTable())
			if want.Table == nil {
				want.Table = map[string]*api.NameTable_NameInfo{}
			}
			want.Table[name], want.NameInfo = want.GetNameInfo(), nil
		}
		length, last := 0, -1
		for _, p := range r.parts {
			of := &api.NameTable{}
			if err := proto.Unmarshal(p.entries, of); err != nil || p.shard <= last {
				t.Fatalf("shard %d after %d: %v", p.shard, last, err)
			}
			for host := range of.GetTable() {
				if digest.ShardOf(host) != p.shard {
					t.Fatalf("shard %d has host %q", p.shard, host)
				}
			}
			proto.Merge(got, &api.NameTable{Table: of.GetTable()}) // without fields that are not known
			length, last = length+len(p.entries), p.shard
		}
		if !proto.Equal(want, got) || length != r.bytes {
			t.Fatalf("%d bytes, want %d, of %v", r.bytes, length, got)
		}
	})
}
