package object_test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/object"
)

// shows is what an EgressHost says.
func shows(e object.EgressHost, workload, namespace, host string) bool {
	from := e.Namespace == "*" || e.Namespace == namespace || e.Namespace == "." && workload == namespace
	suffix, wild := strings.CutPrefix(e.Host, "*")
	host = strings.ToLower(host)
	return from && (e.Host == host || wild && strings.HasSuffix(host, suffix))
}

// D12: an Egress shows what one of its hosts does.
func TestEgress(t *testing.T) {
	namespaces := []string{"*", ".", "shop", "data"}
	names := []string{"*", "*.example.com", "*.api.example.com", "api.example.com", "v1.api.example.com", "example.com", "other.net"}
	var all []object.EgressHost
	for _, namespace := range namespaces {
		for _, name := range names {
			all = append(all, object.EgressHost{Namespace: namespace, Host: name})
		}
	}
	for _, a := range all {
		for _, b := range all {
			egress := (&object.Sidecar{Egress: []object.EgressHost{a, b}}).NewEgress()
			for _, namespace := range []string{"shop", "data", "bank"} {
				for _, name := range append(names[1:], "V1.API.example.com", "*.v1.api.example.com", "xexample.com") {
					want := shows(a, "shop", namespace, name) || shows(b, "shop", namespace, name)
					if got := egress.Shows("shop", namespace, name); got != want {
						t.Fatalf("%v and %v show %s of %s: %v, want %v", a, b, name, namespace, got, want)
					}
				}
			}
		}
	}
	if !(&object.Sidecar{}).NewEgress().Shows("shop", "data", "example.com") || (&object.Sidecar{Egress: []object.EgressHost{}}).NewEgress().Shows("shop", "shop", "a") {
		t.Error("a Sidecar without egress hosts shows all, and one with an empty list none")
	}
}
