package hosts

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/object"
)

// D39: replicas of several releases agree, so the hash must not change.
func TestSameVIPs(t *testing.T) {
	for key, want := range map[string]string{
		"":                                     "[240.132.54.192 2001:2::fccf:99c:716b:bc92]",
		"0a0e0b5c-6f0c-4a41-9a47-0c2f3d0e7f11": "[240.181.16.46 2001:2::694a:45fc:884c:19b4]",
	} {
		if got := fmt.Sprint(automaticVIPs(key, "a.example.com")); got != want {
			t.Errorf("with the key %q: %s, want %s", key, got, want)
		}
	}
}

// D39, D40: the VIPs of a host depend on its name and the cluster only. They stay when other hosts come and go, also
// hosts with the same VIP, and are the same for a server that starts later. Of 10,000 hosts, some 6 pairs share an IPv4
// VIP, and none an IPv6 VIP.
func TestAutomaticVIPs(t *testing.T) {
	const n = 10_000
	byAddr, pairs := map[netip.Addr]string{}, 0
	var host, other string
	for i := range n {
		name := fmt.Sprintf("h%d.example.com", i)
		for _, a := range automaticVIPs("uid", name) {
			if !object.IsVIP(a) || netip.MustParsePrefix("240.240.0.0/16").Contains(a) {
				t.Fatalf("%s has %s", name, a)
			}
			if byAddr[a] != "" {
				pairs++
				if host, other = byAddr[a], name; a.Is6() {
					t.Errorf("%s and %s share %s", host, other, a)
				}
			}
			byAddr[a] = name
		}
	}
	if pairs < 1 || pairs > 15 {
		t.Fatalf("%d pairs of %d hosts share a VIP", pairs, n)
	}

	cluster := func(uid string) object.Object {
		return object.Object{Key: object.Key{Kind: object.KindCluster, Name: "kube-system"}, Cluster: &object.Cluster{UID: uid}}
	}
	of := func(h *Hosts) string {
		return seen(t, h, View{Namespace: "shop", Families: Families{V4: true, V6: true}, VIPs: true})[host]
	}
	early, late := New(domain, 1), New(domain, 1)
	one, two := entry("one", host), entry("two", other)
	early.Update(Change{Updated: []object.Object{one, cluster("uid")}})
	want := of(early)
	if a := automaticVIPs("uid", host); !strings.Contains(want, a[0].String()) || !strings.Contains(want, a[1].String()) {
		t.Fatalf("%s has %s, want %v", host, want, a)
	}
	late.Update(Change{Updated: []object.Object{two}}, Change{Updated: []object.Object{entry("three", "x.example.com"), cluster("uid")}})
	late.Update(Change{Updated: []object.Object{one}})
	early.Update(Change{Updated: []object.Object{two}})
	for name, h := range map[string]*Hosts{"the same server": early, "another server": late} {
		if got := of(h); got != want {
			t.Errorf("%s: %s has %s, had %s", name, host, got, want)
		}
	}
	early.Update(Change{Removed: []object.Key{one.Key}})
	early.Update(Change{Updated: []object.Object{one}})
	if got := of(early); got != want {
		t.Errorf("added again, %s has %s, had %s", host, got, want)
	}
	early.Update(Change{Updated: []object.Object{cluster("another uid")}})
	if got := of(early); got == want || slices.Equal(automaticVIPs("", host), automaticVIPs("uid", host)) {
		t.Errorf("in another cluster, %s has %s, too", host, got)
	}
}
