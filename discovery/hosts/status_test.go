package hosts

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/discovery/object"
)

// TestStatuses writes what Statuses returns until nothing is left to write, and checks what is
// written: one VIP per host, in all its ServiceEntries, and one host per VIP.
func TestStatuses(t *testing.T) { // D39
	h := New(domain, 1, NewVIPs())
	given := func(o object.Object, host string, ips ...string) object.Object {
		for _, ip := range ips {
			o.Entry.AddVIPs(object.VIP{Host: host, Addr: addr(ip)})
		}
		return o
	}
	none := entry("none", "none.example.com")
	none.Entry.Resolution = object.ResolutionNone
	h.Update(Change{Updated: []object.Object{
		given(entry("kept", "kept.example.com"), "kept.example.com", "240.240.9.9"),
		entry("kept2", "Kept.example.com"),
		given(entry("a-same", "a.example.com"), "a.example.com", "240.240.7.7"),
		given(entry("b-same", "b.example.com"), "b.example.com", "240.240.7.7"),
		given(entry("renamed", "now.example.com"), "before.example.com", "240.240.8.8"),
		given(entry("addressed", "addressed.example.com", "192.0.2.1"), "addressed.example.com", "240.240.6.6"),
		given(none, "none.example.com", "240.240.5.5"),
		entry("new", "new.example.com"),
		clusterIP("web", "10.0.0.1"),
		entry("service", "web.shop.svc."+domain),
	}})
	written := map[string]string{}
	rounds := 0
	for statuses := h.Statuses(0); len(statuses) > 0; statuses = h.Statuses(0) {
		if rounds++; rounds > 3 {
			t.Fatalf("after %d rounds %v is still to be written", rounds, statuses)
		}
		for key, s := range statuses {
			e := *s.Entry
			e.VIPs, e.StaleVIPs = nil, false
			for _, vip := range s.VIPs {
				e.AddVIPs(vip)
			}
			h.Update(Change{Updated: []object.Object{{Key: key, Entry: &e}}})
			written[key.Name] = strings.ReplaceAll(fmt.Sprint(s.VIPs), ".example.com", "")
		}
	}
	if rounds != 2 {
		t.Errorf("%d rounds, want 2: one takes the VIP of another host away, one gives a new one", rounds)
	}
	slot := preferredSlot("new.example.com")
	for name, want := range map[string]string{
		"kept":      "", // nothing to write
		"kept2":     "[{Kept 240.240.9.9}]",
		"a-same":    "",
		"b-same":    vipsOfSlot("b"),
		"renamed":   vipsOfSlot("now"),
		"addressed": "[]",
		"none":      "[]",
		"new":       fmt.Sprintf("[{new %s} {new %s}]", slotAddr4(slot), slotAddr6(slot)),
		"service":   "",
	} {
		if got := written[name]; got != want {
			t.Errorf("%s: %s is written, want %s", name, got, want)
		}
	}
}

// vipsOfSlot returns the VIPs that a host prefers, as they are written.
func vipsOfSlot(name string) string {
	slot := preferredSlot(name + ".example.com")
	return fmt.Sprintf("[{%s %s} {%s %s}]", name, slotAddr4(slot), name, slotAddr6(slot))
}

// D39: what the status of a ServiceEntry should be takes little time, even if it has many hosts and
// VIPs.
func TestStatusOfManyHosts(t *testing.T) {
	const n = 100_000
	e := &object.ServiceEntry{Resolution: object.ResolutionDNS}
	var vips []object.VIP
	for i := range n {
		e.Hosts = append(e.Hosts, fmt.Sprintf("h%d.example.com", i))
		vips = append(vips, object.VIP{Host: fmt.Sprintf("x%d.example.com", i), Addr: addr("240.240.0.1")})
	}
	h := New(domain, 1, NewVIPs())
	began := time.Now()
	e.AddVIPs(vips...)
	h.Update(Change{Updated: []object.Object{{Key: key(object.KindServiceEntry, "many"), Entry: e}}})
	if want := h.Statuses(0); len(want) != 1 {
		t.Errorf("%d statuses must change, want 1", len(want))
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
}
