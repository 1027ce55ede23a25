package dnsproxy_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/dnsproxy/table"
)

// V5: the domains of a table cover all of its hosts, except hosts below the cluster domain and
// a wildcard of the root.
func TestDomains(t *testing.T) {
	current := table.Empty(must(table.NewCluster("shop", "cluster.local")))
	next := func(hosts ...string) (names []string, fingerprint uint64) {
		t.Helper()
		push := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{}}
		for _, host := range hosts {
			push.Table[host] = &api.NameTable_NameInfo{Ips: []string{"10.0.0.1"}, Registry: "External", Namespace: "shop"}
		}
		current = must(current.With(split(t, must(proto.Marshal(push)))))
		domains, fingerprint := current.Domains()
		for _, domain := range domains {
			names = append(names, domain.String())
		}
		slices.Sort(names)
		return names, fingerprint
	}
	names, first := next("web.shop.svc.cluster.local", "cluster.local", "Api.Example.com", "v1.api.example.com",
		"*.wild.example", "wild.example", "a.wild.example", "*.b.wild.example", "*.outer.test", "*.a.outer.test", "com2", "*")
	want := []string{"api.example.com.", "com2.", "outer.test.", "wild.example."}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
	if _, other := next("api.example.com"); other == first {
		t.Error("other names have the same fingerprint")
	}
	_, again := next("api.example.com")
	if _, other := next("new.shop.svc.cluster.local", "api.example.com"); other == again {
		t.Error("a new Service does not change the fingerprint")
	}
	if _, back := next("api.example.com"); back != again {
		t.Error("the same names have another fingerprint")
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}
