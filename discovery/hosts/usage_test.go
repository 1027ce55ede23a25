package hosts

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/discovery/object"
)

// D64: what all namespaces show to others is bounded, and what only one sees. The namespaces that show most give way, so
// one cannot hide another that shows less than itself.
func TestBounds(t *testing.T) {
	const size = 16 + len("0.a.example") + 2 + len("192.0.2.1")
	some := func(namespace string, n int, exportTo object.ExportTo) (all []object.Object) {
		for i := range n {
			o := entry(fmt.Sprint(namespace, i, exportTo.Restricted), fmt.Sprintf("%d.%s.example", i, namespace), "192.0.2.1")
			o.Key.Namespace, o.Entry.ExportTo = namespace, exportTo
			all = append(all, o)
		}
		return all
	}
	shown := func(namespace string, n int) []object.Object { return some(namespace, n, object.ExportTo{}) }
	own := func(namespace string, n int) []object.Object {
		return some(namespace, n, object.ExportTo{Restricted: true, Namespaces: []string{namespace}})
	}
	private := object.Object{Key: key(object.KindConfigMap, "istio"), Mesh: &object.Mesh{ExportTo: []string{"."}}}
	for name, test := range map[string]struct {
		objects [][]object.Object
		hidden  string // namespaces, with what is hidden
		seen    string // namespaces whose hosts the namespace a, and then z sees
	}{
		"within the bound":                       {[][]object.Object{shown("a", 4), shown("b", 6)}, "", "a4 b6, a4 b6"},
		"the largest gives way":                  {[][]object.Object{shown("a", 5), shown("b", 4), shown("c", 4)}, "a shown", "a5 b4 c4, b4 c4"},
		"of two, the later one":                  {[][]object.Object{shown("a", 4), shown("b", 4), shown("c", 4)}, "c shown", "a4 b4, a4 b4"},
		"a larger one cannot hide a smaller one": {[][]object.Object{shown("a", 3), shown("b", 9)}, "b shown own", "a3, a3"},
		"many small ones hide larger ones":       {[][]object.Object{shown("a", 5), shown("b", 4), shown("c", 3), shown("d", 3), shown("e", 3)}, "a shown, b shown", "a5 c3 d3 e3, c3 d3 e3"},
		"what others do not see":                 {[][]object.Object{own("a", 5), own("b", 5), shown("c", 10)}, "", "a5 c10, c10"},
		"what nobody sees":                       {[][]object.Object{own("a", 7), own("b", 5)}, "a own", ", "},
		"what is hidden counts as well":          {[][]object.Object{shown("a", 5), own("a", 2), shown("b", 4), shown("c", 4)}, "a shown own", "b4 c4, b4 c4"},
		"of a mesh that shows nothing":           {[][]object.Object{{private}, shown("a", 5), shown("b", 6), shown("c", 7)}, "c own", "a5, "},
	} {
		h := New(domain, 1)
		h.usage.maxShown, h.usage.maxOwn = 10*size, 6*size
		var before Change
		before.Updated = shown("z", 11)
		h.Update(before)
		var after Change
		for _, o := range before.Updated {
			after.Removed = append(after.Removed, o.Key)
		}
		u := h.Update(after)
		if len(u.Hidden) != 0 {
			t.Errorf("%s: %v are hidden without hosts", name, u.Hidden)
		}
		for _, objects := range test.objects {
			u = h.Update(Change{Updated: objects})
		}
		var hidden []string
		for _, one := range u.Hidden {
			text := one.Namespace
			if one.Shown {
				text += " shown"
			}
			if one.Own {
				text += " own"
			}
			hidden = append(hidden, text)
		}
		sees := func(namespace string) string {
			counts := map[string]int{}
			for host := range seen(t, h, View{Namespace: namespace, Families: Families{V4: true}}) {
				counts[strings.Split(host, ".")[1]]++
			}
			var all []string
			for _, one := range sortedKeys(counts) {
				all = append(all, fmt.Sprint(one, counts[one]))
			}
			return strings.Join(all, " ")
		}
		got := []string{strings.Join(hidden, ", "), sees("a") + ", " + sees("z")}
		if diff := cmp.Diff([]string{test.hidden, test.seen}, got); diff != "" {
			t.Errorf("%s: -want +got\n%s", name, diff)
		}
	}
}

// D64, D65: a host that is hidden because its namespace shows too much passes to no other namespace that claims it.
func TestHiddenHostKeepsItsOwner(t *testing.T) {
	first := entry("first", "bank.example", "192.0.2.1")
	first.Key.Namespace = "bank"
	second := entry("second", "bank.example", "192.0.2.66")
	second.Key.Namespace = "evil"
	h := New(domain, 1)
	h.usage.maxShown, h.usage.maxOwn = 100, 1000
	view := View{Namespace: "shop", Families: Families{V4: true}}
	h.Update(Change{Updated: []object.Object{first, second}})
	if _, found := seen(t, h, view)["bank.example"]; !found {
		t.Error("the host is missing before its namespace shows too much")
	}
	other := entry("other", "large.example", "192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4", "192.0.2.5", "192.0.2.6")
	other.Key.Namespace = "bank"
	h.Update(Change{Updated: []object.Object{other}})
	if got := seen(t, h, view); len(got) != 0 {
		t.Errorf("another namespace sees %v, want no host", got)
	}
}
