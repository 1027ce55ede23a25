package nds

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	mesh "github.com/nametap/nametap/dnsproxy/table"
)

// benchTable is the table of the query path.
type benchTable struct{ current *mesh.Table }

func (b *benchTable) apply(shards map[int][]byte) error {
	next, err := b.current.With(shards)
	if err == nil {
		b.current = next
	}
	return err
}

// meshEntries returns the entries of n hosts in wire form, of which the first has this address.
func meshEntries(b *testing.B, n int, first string) []byte {
	b.Helper()
	var all []byte
	for i := range n {
		name, namespace := fmt.Sprintf("web-%d", i), fmt.Sprintf("shop-%d", i%100)
		info := &api.NameTable_NameInfo{Ips: []string{fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)}, Registry: "Kubernetes", Shortname: name, Namespace: namespace}
		if i == 0 {
			info.Ips[0] = first
		}
		raw, err := proto.Marshal(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{name + "." + namespace + ".svc.cluster.local": info}})
		if err != nil {
			b.Fatal(err)
		}
		all = append(all, raw...)
	}
	return all
}

// benchChange returns a change with entries after which the table has these entries, in wire form.
func benchChange(b *testing.B, entries, all []byte, complete digest.Set) []byte {
	b.Helper()
	var sum digest.Sum
	for rest := all; len(rest) > 0; {
		_, n, err := cutEntry(rest)
		if err != nil {
			b.Fatal(err)
		}
		sum, rest = sum.Add(digest.Of(rest[:n])), rest[n:]
	}
	end, err := marshalChange(&api.NameTable_Change{Complete: complete[:], Sum: sum.Bytes(), Revision: []byte("revision")})
	if err != nil {
		b.Fatal(err)
	}
	return append(entries[:len(entries):len(entries)], end...)
}

// BenchmarkHostChange measures a push with one changed host: from its bytes to the table of the query
// path, and to the snapshot.
func BenchmarkHostChange(b *testing.B) {
	for _, n := range []int{10_000, 100_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			dir := b.TempDir()
			cluster, err := mesh.NewCluster("shop-1", "cluster.local")
			if err != nil {
				b.Fatal(err)
			}
			empty := mesh.Empty(cluster)
			empty = empty.WithAncestors()
			c, err := New(Config{
				Addr: "localhost:1", StateDir: dir,
				Node: Node{PodName: "web-0", Namespace: "shop-1", IPs: []netip.Addr{netip.IPv6Loopback()}},
			}, (&benchTable{empty}).apply)
			if err != nil {
				b.Fatal(err)
			}
			all := meshEntries(b, n, "192.0.2.0")
			var changes [2][]byte
			for i := range changes {
				after := meshEntries(b, n, fmt.Sprintf("192.0.2.%d", i))
				_, length, _ := cutEntry(after)
				changes[i] = benchChange(b, after[:length], after, digest.Set{})
			}
			use := func(value []byte) {
				save, err := c.receiver.use(response{typeURL: TypeURL, version: "v1", bytes: len(value), resources: []*discoveryv3.Resource{{Resource: &anypb.Any{TypeUrl: TypeURL, Value: value}}}}, false)
				if err != nil {
					b.Fatal(err)
				}
				c.receiver.save(save)
				c.saver.saveNext()
			}
			use(benchChange(b, all, all, digest.All()))
			path := filepath.Join(dir, snapshotName)
			before, err := os.Stat(path)
			if err != nil {
				b.Fatal(err)
			}
			use(changes[1])
			after, err := os.Stat(path)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			i := 0
			for ; b.Loop(); i++ {
				use(changes[i%2])
			}
			b.ReportMetric(float64(after.Size()-before.Size()), "written-B")
			b.ReportMetric(float64(len(changes[0])), "received-B")
		})
	}
}

// BenchmarkRestore measures the start with a snapshot of many hosts whose log is full.
func BenchmarkRestore(b *testing.B) {
	for _, n := range []int{10_000, 100_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			all := meshEntries(b, n, "192.0.2.0")
			first, err := parseChange(benchChange(b, all, all, digest.All()))
			if err != nil {
				b.Fatal(err)
			}
			table, err := new(hostTable).apply(&first)
			if err != nil {
				b.Fatal(err)
			}
			parts, err := snapshot{table: table, owner: snapshotOwner(Node{Namespace: "shop-1", ClusterID: defaultClusterID})}.marshal()
			if err != nil {
				b.Fatal(err)
			}
			data := slices.Concat(parts...)
			_, length, _ := cutEntry(all)
			r := record{version: "v1", change: benchChange(b, all[:length], all, digest.Set{})}
			records := 0
			for log := len(data) / 2; log > 0; records++ {
				before := len(data)
				data = r.append(data)
				log -= len(data) - before
			}
			dir := b.TempDir()
			if err := os.WriteFile(filepath.Join(dir, snapshotName), data, 0o600); err != nil {
				b.Fatal(err)
			}
			cluster, err := mesh.NewCluster("shop-1", "cluster.local")
			if err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(len(data)))
			b.ReportMetric(float64(records), "records")
			for b.Loop() {
				c, err := New(Config{
					Addr: "localhost:1", StateDir: dir,
					Node: Node{PodName: "web-0", Namespace: "shop-1", IPs: []netip.Addr{netip.IPv6Loopback()}},
				}, (&benchTable{mesh.Empty(cluster)}).apply)
				if err != nil {
					b.Fatal(err)
				}
				if c.receiver.restore(); c.receiver.table == nil {
					b.Fatal("not restored")
				}
				c.receiver.dir.Unlock()
			}
		})
	}
}
