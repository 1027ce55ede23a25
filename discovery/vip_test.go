package discovery

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/testkit/fakekube"
)

// vipEntry returns a ServiceEntry whose hosts need automatic VIPs.
func vipEntry(hosts ...string) string {
	return entry("vips", "hosts: ["+strings.Join(hosts, ", ")+"], resolution: DNS")
}

// preferredVIP returns the IPv4 address that a host gets if it is free.
func preferredVIP(host string) string {
	all := allOf([]object.Object{{
		Key:   object.Key{Kind: object.KindServiceEntry, Namespace: "shop", Name: "e"},
		Entry: &object.ServiceEntry{Hosts: []string{host}, Resolution: "DNS"},
	}})
	t, err := Client{Namespace: "shop", AutoAllocate: true}.table(all)
	if err != nil {
		panic(err)
	}
	return t.GetTable()[host].GetIps()[0]
}

// colliding returns n hosts that prefer the same VIP.
func colliding(n int) []string {
	byVIP := map[string][]string{}
	for i := 0; ; i++ {
		h := fmt.Sprintf("h%d.example.com", i)
		vip := preferredVIP(h)
		if byVIP[vip] = append(byVIP[vip], h); len(byVIP[vip]) == n {
			return byVIP[vip]
		}
	}
}

// D54: a client gets automatic VIPs if it asks for them and does not say that it does not
// capture DNS. For other clients a host without an address is not in the table.
func TestAutoAllocateMetadata(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "e.yaml", vipEntry("a.example.com")+entry("e", "hosts: [b.example.com], addresses: [192.0.2.1]"))
	r := start(t, Config{ConfigDir: dir})
	for _, test := range []struct {
		asks, captures string
		want           int
	}{
		{"", "", 1}, {"", "true", 1}, {"false", "true", 1}, {"yes", "true", 1},
		{"true", "", 2}, {"true", "true", 2}, {"true", "false", 1},
	} {
		n := node(t, "shop", "DNS_AUTO_ALLOCATE", test.asks, "DNS_CAPTURE", test.captures)
		for name, value := range map[string]string{"DNS_AUTO_ALLOCATE": test.asks, "DNS_CAPTURE": test.captures} {
			if value == "" {
				delete(n.Metadata.Fields, name)
			}
		}
		if got := len(openSotw(t, r, n).next().tables["0"].GetTable()); got != test.want {
			t.Errorf("%+v: %d hosts", test, got)
		}
	}
}

// TestStatusAddresses checks that the VIPs that a controller has written to the status of a
// ServiceEntry are used as long as the entry is eligible for them, and that no other host gets one
// of them.
func TestStatusAddresses(t *testing.T) { // D10
	status := func(host string, addrs ...string) string {
		var list []string
		for _, a := range addrs {
			list = append(list, fmt.Sprintf("{host: %s, value: '%s'}", host, a))
		}
		return "status: {addresses: [" + strings.Join(list, ", ") + "]}\n"
	}
	taken := preferredVIP("free.example.com")
	objects := strings.Join([]string{
		entryYAML("given", "shop", "hosts: [Given.example.com]", "resolution: DNS") + status("Given.example.com", "240.240.0.9", "2001:2::9"),
		entryYAML("taken", "shop", "hosts: [taken.example.com]", "resolution: STATIC") + status("taken.example.com", taken),
		entryYAML("free", "shop", "hosts: [free.example.com]", "resolution: DNS"),
		entryYAML("same", "data", "hosts: [given.example.com]", "resolution: DNS"),
		entryYAML("addressed", "shop", "hosts: [addressed.example.com]", "resolution: DNS", "addresses: [192.0.2.1]") + status("addressed.example.com", "240.240.0.10"),
		entryYAML("none", "shop", "hosts: [none.example.com]", "resolution: NONE") + status("none.example.com", "240.240.0.11"),
		entryYAML("wildcard", "shop", "hosts: ['*.wild.example.com']", "resolution: DNS") + status("'*.wild.example.com'", "240.240.0.12"),
		strings.Replace(entryYAML("refused", "shop", "hosts: [refused.example.com]", "resolution: DNS"),
			"namespace: shop", "namespace: shop, labels: {networking.istio.io/enable-autoallocate-ip: 'false'}", 1) + status("refused.example.com", "240.240.0.13"),
		entryYAML("renamed", "shop", "hosts: [renamed.example.com]", "resolution: DNS") + status("before.example.com", "240.240.0.14"),
	}, "---\n")
	dir := t.TempDir()
	write(t, dir, "objects.yaml", objects)
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, entryDefinition)
	for document := range strings.SplitSeq(objects, "---\n") {
		a.Put(fakekube.ServiceEntries, document)
	}
	for name, cfg := range map[string]Config{"files": {ConfigDir: dir}, "API": onAPI(t, a)} {
		table, errs, err := Table(t.Context(), cfg, Client{Namespace: "shop", AutoAllocate: true})
		if err != nil || len(errs) > 0 {
			t.Fatal(errs, err)
		}
		got := ipsOf(t, table)
		free, renamed := got["free.example.com"], got["renamed.example.com"]
		if !strings.HasPrefix(free, "240.240.") || strings.HasPrefix(free, taken+" ") || !strings.HasPrefix(renamed, "240.240.") {
			t.Errorf("%s: free.example.com %q, renamed.example.com %q; %s is taken", name, free, renamed, taken)
		}
		delete(got, "free.example.com")
		delete(got, "renamed.example.com")
		want := map[string]string{"Given.example.com": "240.240.0.9 2001:2::9", "taken.example.com": taken, "addressed.example.com": "192.0.2.1"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		table, _, err = Table(t.Context(), cfg, Client{Namespace: "shop"})
		if n := len(table.GetTable()); err != nil || n != 1 {
			t.Errorf("%s: a client that asks for no VIPs gets %d hosts, %v", name, n, err)
		}
	}
}
