package table

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
)

// C12, D41: any bit of a shard that changes in memory is found, and a table that is built anew is intact.
func TestDamaged(t *testing.T) {
	t.Parallel()
	entries := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"web.shop.svc.cluster.local": {Ips: []string{"10.0.0.1"}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
		"api.example":                {Ips: []string{"192.0.2.1", "2001:db8::1"}, Registry: "External"},
	}}
	raw, err := proto.Marshal(entries)
	if err != nil {
		t.Fatal(err)
	}
	current, err := New("shop", "cluster.local", [][]byte{raw})
	if err != nil {
		t.Fatal(err)
	}
	bits := 0
	for at := range current.shards {
		s := &current.shards[at]
		if current.Damaged(at) {
			t.Fatalf("shard %d is damaged from the start", at)
		}
		for bit := range 8 * len(s.records) {
			s.records[bit/8] ^= 1 << (bit % 8)
			if !current.Damaged(at) {
				t.Errorf("bit %d of the records of shard %d is not checked", bit, at)
			}
			s.records[bit/8] ^= 1 << (bit % 8)
		}
		for bit := range 32 * len(s.index) {
			s.index[bit/32] ^= 1 << (bit % 32)
			if !current.Damaged(at) {
				t.Errorf("bit %d of the index of shard %d is not checked", bit, at)
			}
			s.index[bit/32] ^= 1 << (bit % 32)
		}
		bits += 8*len(s.records) + 32*len(s.index)
	}
	if bits == 0 {
		t.Fatal("the table has no hosts")
	}
	at := current.ShardOf("api.example")
	current.shards[at].records[9] ^= 1
	next, err := current.Next([][]byte{raw}) // the same push again
	if err != nil || next == current || next.Damaged(at) || next.Len() != 2 {
		t.Fatalf("the next push: the same table %v, damaged, or %v", next == current, err)
	}
	if same, err := next.Next([][]byte{raw}); err != nil || same != next {
		t.Errorf("a table that is intact was built anew, or %v", err)
	}
	again, err := current.With(map[int][]byte{at: nil}, true)
	if err != nil || again.Damaged(at) {
		t.Errorf("built anew: damaged, or %v", err)
	}
	if again.Len() != 0 {
		t.Errorf("%d hosts, want those of the given shards only", again.Len())
	}
}
