package discovery

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/internal/testkit/fakekube"
)

// vipEntry returns a ServiceEntry whose hosts need automatic VIPs.
func vipEntry(hosts ...string) string {
	return entry("vips", "hosts: ["+strings.Join(hosts, ", ")+"], resolution: DNS")
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

// D10: the VIPs that a controller has written to the status of a ServiceEntry are used as long as the entry is eligible
// for them. An address in the spec that is in the ranges of VIPs is an error: it is left out, and so is the whole object if
// it is in a file.
func TestStatusAddresses(t *testing.T) {
	status := func(host string, addrs ...string) string {
		var list []string
		for _, a := range addrs {
			list = append(list, fmt.Sprintf("{host: %s, value: '%s'}", host, a))
		}
		return "status: {addresses: [" + strings.Join(list, ", ") + "]}\n"
	}
	objects := strings.Join([]string{
		entryYAML("given", "shop", "hosts: [Given.example.com]", "resolution: DNS") + status("Given.example.com", "240.240.0.9", "2001:2::9"),
		entryYAML("same", "data", "hosts: [given.example.com]", "resolution: DNS"),
		entryYAML("addressed", "shop", "hosts: [addressed.example.com]", "resolution: DNS", "addresses: [192.0.2.1, 240.240.7.7]") + status("addressed.example.com", "240.240.0.10"),
		entryYAML("chosen", "shop", "hosts: [chosen.example.com]", "resolution: DNS", "addresses: [240.250.7.7, '2001:2::7/128']"),
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
		if err != nil || len(errs) != 3 || !strings.Contains(errs[0].Error(), "240.240.7.7 is in the range of automatic VIPs") {
			t.Fatal(errs, err)
		}
		want := map[string]string{"Given.example.com": "External 240.240.0.9 2001:2::9", "renamed.example.com": "External vip4 vip6"}
		literal := 0
		if cfg.ConfigDir == "" {
			want["addressed.example.com"], want["chosen.example.com"], literal = "External 192.0.2.1", "External vip4 vip6", 1
		}
		got := show(table)
		got["Given.example.com"] = "External " + ipsOf(t, table)["Given.example.com"]
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		table, _, err = Table(t.Context(), cfg, Client{Namespace: "shop"})
		if n := len(table.GetTable()); err != nil || n != literal {
			t.Errorf("%s: a client that asks for no VIPs gets %d hosts, %v", name, n, err)
		}
	}
}

// D39, D55: replicas, a process that starts later, and the command table give a host the same VIPs. They differ from
// those of another cluster. From files only, they depend on the host alone, without any state.
func TestVIPsOfReplicas(t *testing.T) {
	const host = "a.example.com"
	vips := func(cfg Config) string {
		table, errs, err := Table(t.Context(), cfg, Client{Namespace: "shop", AutoAllocate: true})
		if err != nil || len(errs) > 0 {
			t.Fatal(errs, err)
		}
		return ipsOf(t, table)[host]
	}
	clusterOf := func(uid string) *fakekube.API {
		a := fakekube.Start(t)
		a.Put(fakekube.Namespaces, "apiVersion: v1\nkind: Namespace\nmetadata: {name: kube-system, uid: "+uid+"}\n")
		a.Put(fakekube.Definitions, entryDefinition)
		a.Put(fakekube.ServiceEntries, entryYAML("e", "shop", "hosts: ["+host+"]", "resolution: DNS"))
		return a
	}
	a := clusterOf("one")
	want := vips(onAPI(t, a))
	for range 3 {
		r := start(t, onAPI(t, a))
		if got := ipsOf(t, openDelta(t, r, node(t, "shop", "DNS_AUTO_ALLOCATE", "true"), nil).next().tables[""])[host]; got != want {
			t.Errorf("a replica has %s, want %s", got, want)
		}
		a.Put(fakekube.ServiceEntries, entryYAML("before", "data", "hosts: [z.example.com]", "resolution: DNS"))
	}
	files := []Config{{ConfigDir: t.TempDir()}, {ConfigDir: t.TempDir()}}
	for _, cfg := range files {
		write(t, cfg.ConfigDir, "e.yaml", vipEntry(host))
	}
	if first := vips(files[0]); first == want || first == vips(onAPI(t, clusterOf("two"))) || first != vips(files[1]) {
		t.Errorf("from files, the VIPs are %s and %s; in a cluster %s", first, vips(files[1]), want)
	}
}
