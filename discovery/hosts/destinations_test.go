package hosts

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/object"
)

// leading adds ports to a ServiceEntry, each in the form NUMBER[:TARGET], and endpoints.
func leading(o object.Object, ports string, endpoints ...string) object.Object {
	var list []object.EntryPort
	for text := range strings.FieldsSeq(ports) {
		p := object.EntryPort{Name: "p" + text}
		_, _ = fmt.Sscanf(text, "%d:%d", &p.Number, &p.Target) // the target may be missing
		list = append(list, p)
	}
	var to []object.EntryEndpoint
	for _, address := range endpoints {
		to = append(to, object.EntryEndpoint{Address: address})
	}
	o.Entry.Destinations = object.NewDestinations(o.Entry.Resolution, list, to)
	return o
}

// destinationsAt formats the destinations of the hosts that a view shows.
func destinationsAt(t *testing.T, h *Hosts, v View) map[string]string {
	t.Helper()
	viewer, out := h.Viewer(v), map[string]string{}
	for host := range h.All() {
		entry := viewer.Entry(host)
		if entry == nil {
			continue
		}
		var table api.NameTable
		if err := proto.Unmarshal(entry.Encoded, &table); err != nil {
			t.Fatal(err)
		}
		var texts []string
		for _, d := range table.GetTable()[entry.Host].GetDestinations() {
			texts = append(texts, strings.TrimSpace(fmt.Sprintf("%d:%d %s", d.GetPort(), d.GetTarget(), strings.Join(d.GetEndpoints(), " "))))
		}
		out[entry.Host] = strings.Join(texts, ", ")
	}
	return out
}

// E6: the entry of a host with an automatic VIP has the ports of all ServiceEntries of the host, and for
// each port the endpoints of all of them. Hosts with addresses, and views without VIPs, have none.
func TestDestinations(t *testing.T) {
	one := leading(entry("one", "a.example.com"), "443 80:8080")
	two := leading(entry("two", "A.example.com"), "443 80:8081 25", "192.0.2.2", "mx.example.com", "fd00::1")
	none := entry("none", "a.example.com")
	dynamic := leading(entry("wild", "*.example.com"), "443:8443")
	dynamic.Entry.Resolution = object.ResolutionDynamic
	other := leading(entry("wild-2", "*.example.com"), "443 80")
	other.Entry.Resolution = object.ResolutionDynamic
	own := leading(entry("own", "b.example.com", "192.0.2.9"), "443")
	hidden := leading(entry("hidden", "c.example.com"), "443")
	hidden.Entry.NoVIP = true
	shadowed := leading(entry("web", "web.shop.svc.cluster.local"), "443")
	all := []object.Object{one, two, none, dynamic, other, own, hidden, shadowed, entry("bare", "d.example.com"), clusterIP("web", "10.96.0.1")}
	want := map[string]string{
		"A.example.com": "25:0 192.0.2.2:25 [fd00::1]:25 mx.example.com:25, " +
			"80:0 192.0.2.2:8081 A.example.com:8080 [fd00::1]:8081 mx.example.com:8081, " +
			"443:0 192.0.2.2:443 A.example.com:443 [fd00::1]:443 mx.example.com:443",
		"*.example.com":              "80:0, 443:0",
		"b.example.com":              "",
		"d.example.com":              "",
		"web.shop.svc.cluster.local": "",
	}
	vips := View{Namespace: "shop", Families: Families{V4: true}, VIPs: true}
	h, back := New(domain, 1), New(domain, 1)
	h.Update(in("", all...))
	for i := range all {
		back.Update(in("", all[len(all)-1-i]))
	}
	for name, h := range map[string]*Hosts{"at once": h, "one by one, from the last": back} {
		if diff := cmp.Diff(want, destinationsAt(t, h, vips)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	without := map[string]string{"b.example.com": "", "web.shop.svc.cluster.local": ""}
	if diff := cmp.Diff(without, destinationsAt(t, h, View{Namespace: "shop", Families: Families{V4: true}})); diff != "" {
		t.Errorf("without VIPs (-want +got):\n%s", diff)
	}

	// A change of a port alone is a change.
	h.Update(in("", leading(entry("one", "a.example.com"), "443")), Change{Removed: []object.Key{key(object.KindServiceEntry, "two")}})
	if got := destinationsAt(t, h, vips)["a.example.com"]; got != "443:0" {
		t.Errorf("after the change: %q", got)
	}
	h.Update(in("", leading(entry("one", "a.example.com"), "444")))
	if got := destinationsAt(t, h, vips)["a.example.com"]; got != "444:0" {
		t.Errorf("after the change of a port: %q", got)
	}
}
