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
