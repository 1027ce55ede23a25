package dnsproxy_test

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/miekg/dns"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
)

// The fixtures are complete responses of istiod, as wire bytes and as JSON.
const fixtures = "testdata/"

// resources returns the resources of a response, of either variant of ADS.
func resources(t *testing.T, decode func(proto.Message) error, delta bool) []*anypb.Any {
	t.Helper()
	if !delta {
		var resp discovery.DiscoveryResponse
		if err := decode(&resp); err != nil {
			t.Fatal(err)
		}
		return resp.GetResources()
	}
	var resp discovery.DeltaDiscoveryResponse
	if err := decode(&resp); err != nil {
		t.Fatal(err)
	}
	var out []*anypb.Any
	for _, r := range resp.GetResources() {
		out = append(out, r.GetResource())
	}
	return out
}

func TestIstiodsPushes(t *testing.T) { // C1, N1, N2, N4
	t.Parallel()
	for name, want := range map[string]int{"raw-sotw-1": 20, "raw-delta-1": 20, "raw-sotw-empty-router-1": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			delta := strings.Contains(name, "delta")
			wire, err := os.ReadFile(fixtures + name + ".pb")
			if err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(fixtures + name + ".json")
			if err != nil {
				t.Fatal(err)
			}
			var push [][]byte
			for _, r := range resources(t, func(m proto.Message) error { return proto.Unmarshal(wire, m) }, delta) {
				push = append(push, r.GetValue())
			}
			p, fake := startMesh(t, hosts{"old.example": external("192.0.2.1")})
			if err := p.Load(split(t, push...)); err != nil {
				t.Fatal(err)
			}
			if got := p.Table().Len(); got != want || len(p.Table().Skipped())+len(p.Table().Collisions()) > 0 {
				t.Errorf("%d hosts, want %d; left out: %v; collisions: %v", got, want,
					p.Table().Skipped(), p.Table().Collisions())
			}
			for _, r := range resources(t, func(m proto.Message) error { return protojson.Unmarshal(text, m) }, delta) {
				var table api.NameTable
				if err := r.UnmarshalTo(&table); err != nil {
					t.Fatal(err)
				}
				for key, info := range table.GetTable() {
					askHost(t, p, key, info)
				}
			}
			wantAsked(t, 0, fake)
			p.converse(t, []dialogue{{"old.example A", forwarded}})
		})
	}
}

// askHost queries all names of a host.
func askHost(t *testing.T, p *proxy, key string, info *api.NameTable_NameInfo) {
	t.Helper()
	name := strings.Replace(key, "*", "any", 1)
	names := []string{name, strings.ToLower(name), strings.ToUpper(name)}
	direct := len(names) // the others are short names
	if info.GetRegistry() == "Kubernetes" {
		short := info.GetShortname() + "." + info.GetNamespace()
		names = append(names, short, short+".svc")
		if info.GetNamespace() == "shop" {
			names = append(names, info.GetShortname())
		}
	}
	for i, name := range names {
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
			var want []string
			owner := name + "."
			if i >= direct {
				owner = key + "."
			}
			for _, ip := range info.GetIps() {
				if netip.MustParseAddr(ip).Is4() == (qtype == dns.TypeA) {
					want = append(want, owner+" "+dns.TypeToString[qtype]+" "+ip)
				}
			}
			slices.Sort(want)
			expected := strings.Join(want, "; ")
			if expected == "" {
				expected = "NODATA " + name + "."
			} else if i >= direct {
				expected = name + ". CNAME " + owner + "; " + expected
			}
			p.converse(t, []dialogue{{name + " " + dns.TypeToString[qtype], expected}})
		}
	}
}
