package dnsproxy_test

import (
	"os"
	"strings"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
)

// recorded returns the NameTables of a complete response of istiod, of either variant of ADS.
func recorded(t *testing.T, name string) (push [][]byte) {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name + ".pb")
	if err != nil {
		t.Fatal(err)
	}
	var sotw discovery.DiscoveryResponse
	var delta discovery.DeltaDiscoveryResponse
	if strings.Contains(name, "delta") {
		err = proto.Unmarshal(text, &delta)
	} else {
		err = proto.Unmarshal(text, &sotw)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range sotw.GetResources() {
		push = append(push, r.GetValue())
	}
	for _, r := range delta.GetResources() {
		push = append(push, r.GetResource().GetValue())
	}
	return push
}

func TestIstiodsPushes(t *testing.T) { // C1, N1, N2, N4
	t.Parallel()
	for name, want := range map[string]int{"raw-sotw-1": 20, "raw-delta-1": 20, "raw-sotw-empty-router-1": 0} {
		p, _ := startMesh(t, hosts{"old.example": external("192.0.2.1")})
		if err := p.Load(split(t, recorded(t, name)...)); err != nil {
			t.Fatal(err)
		}
		if got := p.Table().Len(); got != want || len(p.Table().Skipped())+len(p.Table().Collisions()) > 0 {
			t.Errorf("%s: %d hosts, want %d; left out: %v; collisions: %v", name, got, want, p.Table().Skipped(), p.Table().Collisions())
		}
		p.converse(t, []dialogue{{"old.example A", forwarded}})
		if want == 0 {
			continue
		}
		const mysql = "mysql.shop.svc.cluster.local."
		p.converse(t, []dialogue{
			{"mysql A", "mysql. CNAME " + mysql + "; " + mysql + " A 10.244.1.10; " + mysql + " A 10.244.1.11"},
			{"mysql-1." + mysql + " A", "mysql-1." + mysql + " A 10.244.1.11"},
			{"web.default A", "web.default. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.179.187"},
			{"upper.multi.example.com A", "upper.multi.example.com. A 192.0.2.30; upper.multi.example.com. A 192.0.2.31"},
			{"mysql.db.example.com AAAA", "mysql.db.example.com. AAAA 2001:db8::10"},
			{"any.wild.example.com A", "any.wild.example.com. A 192.0.2.20"},
		})
	}
}
