package object_test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/object"
)

// matches is what an EgressHost selects, or excludes.
func matches(e object.EgressHost, workload, namespace, host string) bool {
	from := e.Namespace == "*" || e.Namespace == namespace || e.Namespace == "." && workload == namespace
	suffix, wild := strings.CutPrefix(e.Host, "*")
	host = strings.ToLower(host)
	return from && (e.Host == host || wild && strings.HasSuffix(host, suffix))
}

// D12: an Egress shows what one of its listeners selects and does not exclude, if the listener has no port, or the host
// has that port.
func TestEgress(t *testing.T) {
	var all []object.EgressHost
	for _, namespace := range []string{"*", ".", "shop", "data", "~*", "~.", "~data"} {
		namespace, excluded := strings.CutPrefix(namespace, "~")
		for _, name := range []string{"*", "*.example.com", "*.api.example.com", "api.example.com", "example.com"} {
			all = append(all, object.EgressHost{Namespace: namespace, Host: name, Excluded: excluded})
		}
	}
	names := []string{"*.example.com", "api.example.com", "v1.api.example.com", "example.com", "V1.API.example.com", "*.v1.api.example.com", "xexample.com"}
	for i, a := range all {
		for j, b := range all {
			c, port := all[(i*7+j*3)%len(all)], uint16((i+j)%3*80)
			listeners := []object.EgressListener{{Hosts: []object.EgressHost{a, b}}, {Port: port, Hosts: []object.EgressHost{c}}}
			egress := (&object.Sidecar{Egress: listeners}).NewEgress()
			for _, namespace := range []string{"shop", "data", "bank"} {
				for _, name := range names {
					selected, excluded := map[uint16]bool{}, map[uint16]bool{}
					for _, l := range listeners {
						for _, h := range l.Hosts {
							is := matches(h, "shop", namespace, name)
							selected[l.Port] = selected[l.Port] || is && !h.Excluded
							excluded[l.Port] = excluded[l.Port] || is && h.Excluded
						}
					}
					shown := selected[0] && !excluded[0] || selected[80] && !excluded[80]
					if got := egress.Shows("shop", namespace, name, []uint16{80, 443}); got != shown {
						t.Fatalf("%v show %s of %s: %v, want %v", listeners, name, namespace, got, shown)
					}
				}
			}
		}
	}
	if !(&object.Sidecar{}).NewEgress().Shows("shop", "data", "example.com", nil) ||
		(&object.Sidecar{Egress: []object.EgressListener{}}).NewEgress().Shows("shop", "shop", "a", nil) {
		t.Error("a Sidecar without egress listeners shows all, and one with an empty list none")
	}
}
