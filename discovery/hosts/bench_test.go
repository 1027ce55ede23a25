package hosts

import (
	"fmt"
	"testing"

	"github.com/nametap/nametap/discovery/object"
)

// BenchmarkManyObjects measures that many objects of one namespace are added and removed. Objects with one host, a row of
// aliases, and wildcards above many aliases should take about as long as objects with a host each.
func BenchmarkManyObjects(b *testing.B) {
	const n = 20_000
	var each, one, aliases, wildcards []object.Object
	for i := range n {
		name := fmt.Sprint("e", i)
		each = append(each, entry(name, name+".example.com", "192.0.2.1"))
		one = append(one, entry(name, "api.example.com", "192.0.2.1"))
		aliases = append(aliases, external(name, name+".example.com"))
		wildcards = append(wildcards, entry(name, "*."+name+".example.org", "192.0.2.1"))
	}
	for name, test := range map[string]struct{ before, objects []object.Object }{
		"a host each": {nil, each}, "one host": {nil, one}, "a row of aliases": {nil, row(n)}, "wildcards": {aliases, wildcards},
	} {
		b.Run(name, func(b *testing.B) {
			var keys []object.Key
			for _, o := range test.objects {
				keys = append(keys, o.Key)
			}
			h := New(domain, 1)
			h.Update(Change{Updated: test.before})
			b.ReportAllocs()
			for b.Loop() {
				h.Update(Change{Updated: test.objects})
				h.Update(Change{Removed: keys})
			}
		})
	}
}

// BenchmarkEdit measures that one of 100,000 hosts in 10,000 namespaces gets another address: while all hosts are within the
// bounds, and while a namespace is hidden because the hosts have more than MaxShown.
func BenchmarkEdit(b *testing.B) {
	for name, more := range map[string]int{"within the bound": 0, "beyond the bound": 100_000} {
		b.Run(name, func(b *testing.B) {
			var objects []object.Object
			for i := range 100_000 + more {
				o := entry(fmt.Sprint("e", i), fmt.Sprintf("host-%d.with-a-name-of-some-length.example.com", i), "192.0.2.1")
				o.Key.Namespace = fmt.Sprint("n", i%10_000)
				if i%3 == 0 && i >= 100_000 {
					o.Key.Namespace = "large"
				}
				objects = append(objects, o)
			}
			h := New(domain, 1)
			h.Update(Change{Updated: objects})
			edits := []object.Object{entry("e7", objects[7].Entry.Hosts[0], "192.0.2.2"), objects[7]}
			edits[0].Key = objects[7].Key
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				h.Update(Change{Updated: edits[i%2 : i%2+1]})
			}
		})
	}
}
