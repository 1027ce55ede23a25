package hosts

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/discovery/object"
)

// Changes that are merged do what they did one after another.
func TestMerge(t *testing.T) {
	web, db := key(object.KindService, "web"), key(object.KindService, "db")
	all := []Change{
		{Updated: []object.Object{clusterIP("web", "10.0.0.1"), clusterIP("db", "10.0.0.2")}},
		{Cluster: "east", Whole: true, Updated: []object.Object{clusterIP("east", "10.1.0.1")}},
		{Removed: []object.Key{web}},
		{Cluster: "east", Updated: []object.Object{clusterIP("more", "10.1.0.2")}},
		{Updated: []object.Object{clusterIP("db", "10.0.0.3")}},
		{Cluster: "east", Dropped: true},
		{Updated: []object.Object{clusterIP("web", "10.0.0.4")}, Removed: []object.Key{db}},
		{Cluster: "east", Whole: true, Updated: []object.Object{clusterIP("again", "10.1.0.3")}},
		{Cluster: "east", Removed: []object.Key{key(object.KindService, "again")}, Updated: []object.Object{clusterIP("last", "10.1.0.4")}},
		{Cluster: "west", Whole: true, Updated: []object.Object{clusterIP("west", "10.2.0.1")}},
		{Cluster: "west", Dropped: true},
	}
	for n := range len(all) + 1 {
		one, other := New(domain, 1, NewVIPs()), New(domain, 1, NewVIPs())
		before := Change{Updated: []object.Object{clusterIP("db", "10.9.0.1"), clusterIP("kept", "10.9.0.2")}}
		one.Update(before)
		other.Update(before)
		for _, c := range all[:n] {
			one.Update(c)
		}
		merged := Merge(all[:n])
		other.Update(merged...)
		if diff := cmp.Diff(ips(t, one), ips(t, other)); diff != "" {
			t.Errorf("%d changes (-one by one +merged):\n%s", n, diff)
		}
		if one.remote != other.remote || len(merged) > 3 {
			t.Errorf("%d changes: %d clusters, merged %d, in %d changes", n, one.remote, other.remote, len(merged))
		}
	}
}
