package discovery

import (
	"fmt"
	"testing"

	"github.com/nametap/nametap/discovery/hosts"
)

// A client that names other namespaces again and again does not fill the memory with views.
// Those with watches and those that were used last stay.
func TestIdleViewsAreBounded(t *testing.T) {
	c := newCache(hosts.New(defaultClusterDomain, 1, hosts.NewVIPs()))
	c.waitingFor("")
	get := func(namespace string) *view {
		t.Helper()
		c.mu.Lock()
		defer c.mu.Unlock()
		v, err := c.viewLocked(subscriber{view: viewKey{View: hosts.View{Namespace: namespace}}})
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	watched := get("watched")
	watched.watches[&watch{}] = struct{}{}
	used, unused := get("used"), get("unused")
	for i := range 10 * maxIdleViews {
		get(fmt.Sprint("other-", i))
		if get("used") != used {
			t.Fatalf("after %d others, the view that was used last is gone", i+1)
		}
	}
	if got := len(c.views); got != 1+maxIdleViews {
		t.Errorf("%d views, want one with a watch and %d others", got, maxIdleViews)
	}
	if get("watched") != watched {
		t.Error("the view with a watch is gone")
	}
	if get("unused") == unused {
		t.Error("the view that was used least recently is still there")
	}
}
