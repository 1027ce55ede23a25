package hosts

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/object"
)

// ports returns a list of ports, each in the form NAME=NUMBER.
func ports(texts ...string) object.Ports {
	var list []object.Port
	for _, text := range texts {
		p := object.Port{Protocol: "TCP"}
		name, number, _ := strings.Cut(text, "=")
		if _, err := fmt.Sscan(number, &p.Number); err != nil {
			panic(text)
		}
		p.Name = name
		list = append(list, p)
	}
	return object.NewPorts(list)
}

// withPorts adds ports to a Service or a slice.
func withPorts(o object.Object, texts ...string) object.Object {
	if o.Service != nil {
		o.Service.Ports = ports(texts...)
	} else {
		o.Slice.Ports = ports(texts...)
	}
	return o
}

// portsAt returns what the entry of a Service says about ports to a client at a place: its addresses,
// "headless", and each port with the addresses that have it unless all have.
func portsAt(t *testing.T, h *Hosts, claimed Place, name string) string {
	t.Helper()
	viewer := h.Viewer(View{Namespace: "shop", Families: Families{V4: true}, Place: h.Place(claimed.Cluster, claimed.Network)})
	e := viewer.Entry(h.hosts[name+".shop.svc."+domain])
	if e == nil {
		return ""
	}
	var table api.NameTable
	if err := proto.Unmarshal(e.Encoded, &table); err != nil {
		t.Fatal(err)
	}
	info := table.GetTable()[e.Host]
	words := info.GetIps()
	if info.GetHeadless() {
		words = append(words, "headless")
	}
	for _, p := range info.GetPorts() {
		words = append(words, fmt.Sprintf("%s=%d%v", p.GetName(), p.GetNumber(), p.GetIps()))
	}
	return strings.Join(words, " ")
}

// D22, D24, D25: a Service has the ports of the clusters whose addresses a client gets. A host is
// headless for a client that gets endpoints only.
func TestPortsOfClusters(t *testing.T) {
	h := New(domain, 1)
	h.Update(
		in("", withPorts(clusterIP("web", "10.0.0.1"), "http=80"), headless("db"), withPorts(endpoints("db", "db-0=10.0.0.9", "=10.0.0.8"), "sql=1"), network("net1")),
		in("west", withPorts(clusterIP("web", "10.2.0.1"), "http=8080"), headless("db"), withPorts(endpoints("db", "db-0=10.2.0.9"), "sql=2"), network("net1")),
		in("east", headless("web"), withPorts(endpoints("web", "=10.3.0.9"), "http=3"), withPorts(clusterIP("db", "10.3.0.1"), "sql=3"), network("net3")),
	)
	for _, tt := range []struct {
		cluster, name, want string
	}{
		{"", "web", "10.0.0.1 http=80[]"},
		{"west", "web", "10.2.0.1 http=8080[]"},
		{"east", "web", "10.3.0.9 headless http=3[]"},
		{"", "db", "10.0.0.8 10.0.0.9 10.2.0.9 headless sql=1[10.0.0.8 10.0.0.9] sql=2[10.2.0.9]"},
		{"west", "db", "10.2.0.9 10.0.0.8 10.0.0.9 headless sql=1[10.0.0.8 10.0.0.9] sql=2[10.2.0.9]"},
		{"east", "db", "10.3.0.1 sql=3[]"},
		{"", "db-0.db", "10.0.0.9"},
		{"west", "db-0.db", "10.2.0.9"},
	} {
		if got := portsAt(t, h, Place{Cluster: tt.cluster}, tt.name); got != tt.want {
			t.Errorf("%s in %q: got %q, want %q", tt.name, tt.cluster, got, tt.want)
		}
	}
}

// Equal lists of ports are ==, whatever their order, and come back as they were.
func TestPortLists(t *testing.T) { // D22
	list := []object.Port{{Name: "b", Number: 65535, Protocol: "SCTP"}, {Number: 1, Protocol: "UDP"}, {Name: "b", Number: 2, Protocol: "TCP"}, {Number: 1, Protocol: "UDP"}}
	p := object.NewPorts(list)
	if got := fmt.Sprint(p.List()); got != "[{ 1 UDP} {b 2 TCP} {b 65535 SCTP}]" {
		t.Errorf("got %s", got)
	}
	list[0], list[2] = list[2], list[0]
	if p != object.NewPorts(list) || p == object.NewPorts(list[1:]) {
		t.Error("equal lists differ, or others are equal")
	}
	if object.NewPorts(nil) != (object.Ports{}) || len((object.Ports{}).List()) > 0 {
		t.Error("a list without ports is not the zero value")
	}
}
