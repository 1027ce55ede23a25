package lab

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/encoding/protowire"
)

func contains(s, part string) bool { return strings.Contains(s, part) }

func TestMakeHosts(t *testing.T) {
	services, wildcards := makeHosts(250)
	if len(services) != 250 || len(wildcards) != 3 {
		t.Fatalf("%d services and %d wildcards, want 250 and 3", len(services), len(wildcards))
	}
	again, _ := makeHosts(250)
	if !reflect.DeepEqual(services, again) {
		t.Error("the same number made other hosts")
	}
	names, ips := map[string]bool{}, map[netip.Addr]bool{}
	count := 0
	for _, h := range append(services, wildcards...) {
		names[h.Name] = true
		for _, ip := range h.ips {
			ips[ip] = true
			count++
		}
	}
	if len(names) != 253 || len(ips) != count || count != 250+2*25+3 {
		t.Errorf("%d names, %d addresses, %d of them different", len(names), count, len(ips))
	}
	if want := "svc-000007.ns-07.svc.cluster.local"; services[7].Name != want {
		t.Errorf("host 7 is %q, want %q", services[7].Name, want)
	}
}

func TestMoved(t *testing.T) {
	services, _ := makeHosts(20)
	changed := Moved(services, 1)
	if reflect.DeepEqual(services[0].ips, changed[0].ips) || !reflect.DeepEqual(services[1:], changed[1:]) {
		t.Error("want other addresses for the first host only")
	}
	if again, _ := makeHosts(20); !reflect.DeepEqual(services, again) {
		t.Error("the original has changed")
	}
}

// fields takes a message apart: the values of each field, in order.
func fields(t *testing.T, message []byte) map[protowire.Number][]string {
	t.Helper()
	all := map[protowire.Number][]string{}
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 || kind != protowire.BytesType {
			t.Fatalf("field %d of type %d: %v", number, kind, protowire.ParseError(n))
		}
		value, m := protowire.ConsumeBytes(message[n:])
		if m < 0 {
			t.Fatal(protowire.ParseError(m))
		}
		all[number] = append(all[number], string(value))
		message = message[n+m:]
	}
	return all
}

func TestNameTable(t *testing.T) {
	services, wildcards := makeHosts(1)
	entries := fields(t, NameTable(services, wildcards))[1]
	if len(entries) != 2 {
		t.Fatalf("%d entries, want 2", len(entries))
	}
	for i, want := range []struct {
		name string
		info map[protowire.Number][]string
	}{
		{"svc-000000.ns-00.svc.cluster.local", map[protowire.Number][]string{
			1: {"10.0.0.1", "10.0.0.2", "10.0.0.3"}, 2: {"Kubernetes"}, 3: {"svc-000000"}, 4: {"ns-00"},
		}},
		{"*.wild-000000.example.com", map[protowire.Number][]string{1: {"240.240.0.1"}, 2: {"External"}}},
	} {
		entry := fields(t, []byte(entries[i]))
		if got := entry[1]; !reflect.DeepEqual(got, []string{want.name}) {
			t.Errorf("entry %d: key %q, want %q", i, got, want.name)
		}
		if got := fields(t, []byte(entry[2][0])); !reflect.DeepEqual(got, want.info) {
			t.Errorf("entry %d: %q, want %q", i, got, want.info)
		}
	}
}

func TestQueries(t *testing.T) {
	services, wildcards := makeHosts(1)
	want := map[string]string{
		"direct":   "svc-000000.ns-00.svc.cluster.local A\n",
		"short":    "svc-000000.ns-00 A\n",
		"autopath": "svc-000000.ns-00.svc.cluster.local.ns-07.svc.cluster.local A\n",
		"wildcard": "some.wild-000000.example.com A\n",
		"nodata":   "svc-000000.ns-00.svc.cluster.local AAAA\n",
		"ptr":      "1.0.0.10.in-addr.arpa PTR\n",
	}
	for _, m := range Mixes() {
		if got := string(m.queries(services, wildcards)); got != want[m.Name] {
			t.Errorf("%s: %q, want %q", m.Name, got, want[m.Name])
		}
		delete(want, m.Name)
	}
	if len(want) > 0 {
		t.Errorf("not there: %v", want)
	}
}

// reply makes a response of records.
func reply(t *testing.T, records ...string) *dns.Msg {
	t.Helper()
	m := new(dns.Msg)
	for _, text := range records {
		record, err := dns.NewRR(text)
		if err != nil {
			t.Fatal(err)
		}
		m.Answer = append(m.Answer, record)
	}
	return m
}

func TestChecks(t *testing.T) {
	h := Host{Name: "a.example", ips: []netip.Addr{Address(10, 1), Address(10, 2)}}
	both := []string{"x. A 10.0.0.2", "x. A 10.0.0.1"}
	alias := append([]string{"x. CNAME A.example."}, both...)
	byName := map[string]Mix{}
	for _, m := range Mixes() {
		byName[m.Name] = m
	}
	for _, c := range []struct {
		mix     string
		records []string
		ok      bool
	}{
		{"direct", both, true},
		{"direct", both[:1], false},
		{"direct", append(both, "x. A 10.0.0.3"), false},
		{"direct", nil, false},
		{"autopath", alias, true},
		{"autopath", both, false},
		{"autopath", []string{"x. CNAME b.example.", both[0], both[1]}, false},
		{"autopath", alias[:1], false},
		{"nodata", nil, true},
		{"nodata", both, false},
		{"ptr", []string{"x. PTR a.example."}, true},
		{"ptr", []string{"x. PTR b.example."}, false},
		{"ptr", nil, false},
	} {
		if err := byName[c.mix].check(h, reply(t, c.records...)); (err == nil) != c.ok {
			t.Errorf("%s %q: %v", c.mix, c.records, err)
		}
	}
}
