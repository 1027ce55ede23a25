package dnsproxy_test

import (
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/dnsproxy/table"
)

// withDestinations adds destinations to an entry, in the form PORT[:TARGET] [ENDPOINT]...
func withDestinations(info *api.NameTable_NameInfo, destinations ...string) *api.NameTable_NameInfo {
	for _, text := range destinations {
		d, words := &api.NameTable_Destination{}, strings.Fields(text)
		port, target, _ := strings.Cut(words[0], ":")
		if _, err := fmt.Sscan(port, &d.Port); err != nil {
			panic(text)
		}
		if _, err := fmt.Sscan(target, &d.Target); err != nil && target != "" {
			panic(text)
		}
		d.Endpoints = words[1:]
		info.Destinations = append(info.Destinations, d)
	}
	return info
}

// destinationsOf formats the destinations of a host, in the form PORT:TARGET [ENDPOINT]...
func destinationsOf(h *table.Host) []string {
	var texts []string
	for d := range h.Destinations {
		texts = append(texts, strings.Join(append([]string{fmt.Sprintf("%d:%d", d.Port, d.Target)}, d.Endpoints...), " "))
	}
	return texts
}

// E6: a table has the destinations of external hosts. Invalid destinations are left out with a
// reason.
func TestDestinations(t *testing.T) {
	t.Parallel()
	c, err := table.NewCluster("shop", "cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	ignored := withDestinations(service("web", "shop", "10.0.0.1"), "80")
	alias := withDestinations(external("192.0.2.1"), "80")
	alias.Alias = "a.example.com"
	mixed := hosts{
		"none.example.com":           external("240.240.0.9"),
		"web.shop.svc.cluster.local": ignored,
		"alias.example.com":          alias,
		"a.example.com":              withDestinations(external("240.240.0.1", "2001:2::1"), "443", "80:8080", "65535:65535", "25 10.0.0.1:25 mx.example.com:2525 [fd00::1]:25 10.0.0.1:25"),
		"*.example.com":              withDestinations(external("240.240.0.2"), "443:8443"),
		"bad.example.com": withDestinations(external("240.240.0.3"), "0", "65536", "70000:1", "81:65536", "80", "80:8080",
			"82 10.0.0.1", "83 10.0.0.1:0 10.0.0.1:65536 10.0.0.1:83", "84 unix:///a:1 [fe80::1%eth0]:84 a..b:84 localhost:84", "85 [::1]:x"),
	}
	built, err := table.Empty(c).With(split(t, mixed.wire(t)))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string][]string{}
	for _, addr := range []string{"10.0.0.1", "240.240.0.1", "240.240.0.2", "240.240.0.3", "240.240.0.9"} {
		built.HostsAt(netip.MustParseAddr(addr), func(h table.Host) {
			if d := destinationsOf(&h); d != nil {
				got[h.Key()] = d
			}
		})
	}
	want := map[string][]string{
		"a.example.com":   {"443:443", "80:8080", "65535:65535", "25:25 10.0.0.1:25 mx.example.com:2525 [fd00::1]:25"},
		"*.example.com":   {"443:8443"},
		"bad.example.com": {"80:80", "83:83 10.0.0.1:83"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if d := maps.Collect(built.Infos)["alias.example.com"].GetDestinations(); d != nil {
		t.Errorf("an alias has the destinations %v", d)
	}
	var reasons []string
	for _, skipped := range built.Skipped() {
		reasons = append(reasons, skipped.Key+": "+skipped.Reason)
	}
	const of = "bad.example.com: destination of port "
	if diff := cmp.Diff([]string{
		of + "0: the port is not between 1 and 65535",
		of + "65536: the port is not between 1 and 65535",
		of + "70000: the port is not between 1 and 65535",
		of + `80: it is there twice`,
		of + "81: target 65536 is not between 1 and 65535",
		of + `82: endpoint "10.0.0.1": want HOST:PORT`,
		of + `83: endpoint "10.0.0.1:0": port "0" is not between 1 and 65535`,
		of + `83: endpoint "10.0.0.1:65536": port "65536" is not between 1 and 65535`,
		of + `84: endpoint "[fe80::1%eth0]:84": the address has a zone`,
		of + `84: endpoint "a..b:84": neither an IP address nor a hostname: a label is empty`,
		of + `84: endpoint "localhost:84": special-use domain name: nametap answers it itself, never from the table`,
		of + `84: endpoint "unix:///a:1": want HOST:PORT`,
		of + `85: endpoint "[::1]:x": port "x" is not between 1 and 65535`,
	}, reasons); diff != "" {
		t.Errorf("left out (-want +got):\n%s", diff)
	}

	// A change of destinations alone counts. The same push again changes nothing.
	if again, err := built.With(split(t, mixed.wire(t))); err != nil || again != built {
		t.Errorf("the same push: another table, %v", err)
	}
	mixed["a.example.com"] = withDestinations(external("240.240.0.1", "2001:2::1"), "444")
	next, err := built.With(split(t, mixed.wire(t)))
	if err != nil {
		t.Fatal(err)
	}
	next.HostsAt(netip.MustParseAddr("2001:2::1"), func(h table.Host) {
		if diff := cmp.Diff([]string{"444:444"}, destinationsOf(&h)); diff != "" {
			t.Errorf("after the change (-want +got):\n%s", diff)
		}
	})
}
