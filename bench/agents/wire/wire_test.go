package wire_test

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"

	"github.com/nametap/nametap/bench/agents/wire"
)

func marshal(t *testing.T, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func any(table []byte) *anypb.Any { return &anypb.Any{TypeUrl: wire.TypeURL, Value: table} }

// ACKs and NACKs are what protobuf's package decodes.
func TestAnswers(t *testing.T) {
	var delta discoveryv3.DeltaDiscoveryRequest
	if err := proto.Unmarshal(wire.Incremental.AppendAnswer(nil, []byte("v"), []byte("n"), "wrong"), &delta); err != nil {
		t.Fatal(err)
	}
	if delta.GetTypeUrl() != wire.TypeURL || delta.GetResponseNonce() != "n" || delta.GetErrorDetail().GetMessage() != "wrong" || delta.GetErrorDetail().GetCode() != 3 {
		t.Errorf("%v", &delta)
	}
	var whole discoveryv3.DiscoveryRequest
	if err := proto.Unmarshal(wire.StateOfTheWorld.AppendAnswer(nil, []byte("v"), []byte("n"), ""), &whole); err != nil {
		t.Fatal(err)
	}
	if whole.GetTypeUrl() != wire.TypeURL || whole.GetResponseNonce() != "n" || whole.GetVersionInfo() != "v" || whole.GetErrorDetail() != nil {
		t.Errorf("%v", &whole)
	}
	first, err := wire.StateOfTheWorld.First(&corev3.Node{Id: "node"})
	if err != nil {
		t.Fatal(err)
	}
	whole.Reset()
	if err := proto.Unmarshal(first, &whole); err != nil || whole.GetNode().GetId() != "node" || whole.GetTypeUrl() != wire.TypeURL {
		t.Errorf("%v, %v", &whole, err)
	}
}

// Responses of both variants are decoded, with names and without.
func TestParse(t *testing.T) {
	resources := []*discoveryv3.Resource{{Name: "shop", Version: "1", Resource: any([]byte("table"))}, {Resource: any([]byte("unnamed"))}}
	want := []wire.Resource{{Name: "shop", Table: []byte("table")}, {Table: []byte("unnamed")}}
	wrapped, err := anypb.New(resources[0])
	if err != nil {
		t.Fatal(err)
	}
	for variant, message := range map[wire.Variant][]byte{
		wire.Incremental: marshal(t, &discoveryv3.DeltaDiscoveryResponse{
			SystemVersionInfo: "v", Nonce: "n", TypeUrl: wire.TypeURL, Resources: resources, RemovedResources: []string{"gone"},
		}),
		wire.StateOfTheWorld: marshal(t, &discoveryv3.DiscoveryResponse{
			VersionInfo: "v", Nonce: "n", TypeUrl: wire.TypeURL, Resources: []*anypb.Any{wrapped, resources[1].GetResource()},
		}),
	} {
		var r wire.Response
		if err := variant.Parse(message, &r); err != nil {
			t.Fatal(err)
		}
		same := slices.EqualFunc(r.Resources, want, func(a, b wire.Resource) bool { return a.Name == b.Name && string(a.Table) == string(b.Table) })
		if string(r.Version) != "v" || string(r.Nonce) != "n" || !same {
			t.Errorf("variant %d: %q", variant, r)
		}
		if removed := variant == wire.Incremental; removed != slices.Equal(r.Removed, []string{"gone"}) {
			t.Errorf("variant %d: removed %q", variant, r.Removed)
		}
		if err := variant.Parse(message[:len(message)-1], &r); err == nil {
			t.Errorf("variant %d: no error for a message that is cut", variant)
		}
	}
	other := marshal(t, &discoveryv3.DiscoveryResponse{Resources: []*anypb.Any{{TypeUrl: "other"}}})
	if err := wire.StateOfTheWorld.Parse(other, new(wire.Response)); err == nil {
		t.Error("no error for a resource of another type")
	}
}

// A response in parts of any length says the same as the whole one, without its entries.
func TestSkim(t *testing.T) {
	table := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{}, Change: &api.NameTable_Change{Removed: []string{"gone"}, Sum: make([]byte, 16), Revision: []byte("r")}}
	for i := range 300 {
		table.Table[strings.Repeat("h", i)] = &api.NameTable_NameInfo{Ips: []string{"10.0.0.1"}}
	}
	body := marshal(t, table)
	for variant, message := range map[wire.Variant][]byte{
		wire.Incremental: marshal(t, &discoveryv3.DeltaDiscoveryResponse{
			SystemVersionInfo: "v", Nonce: "n", TypeUrl: wire.TypeURL, Resources: []*discoveryv3.Resource{{Version: "1", Resource: any(body)}}, RemovedResources: []string{"x"},
		}),
		wire.StateOfTheWorld: marshal(t, &discoveryv3.DiscoveryResponse{
			VersionInfo: "v", Nonce: "n", TypeUrl: wire.TypeURL, Canary: true, Resources: []*anypb.Any{any(body)},
		}),
	} {
		s := wire.Skimmer{Variant: variant}
		for range 200 {
			for rest := message; len(rest) > 0; {
				n := min(len(rest), 1+rand.IntN(1+rand.IntN(2000)))
				s.Part(rest[:n])
				rest = rest[n:]
			}
			var r wire.Response
			if err := s.Parse(&r); err != nil {
				t.Fatal(err)
			}
			c, ok, err := wire.ParseChange(r.Resources[0].Table)
			if err != nil || !ok || string(c.Revision) != "r" || !slices.Equal(c.Removed, []string{"gone"}) || string(r.Nonce) != "n" || string(r.Version) != "v" {
				t.Fatalf("variant %d: %+v, %v: %v", variant, r, c, err)
			}
		}
		s.Part(message[:len(message)-1])
		if err := s.Parse(new(wire.Response)); err == nil {
			t.Errorf("variant %d: no error for a message that is cut", variant)
		}
	}
	s := wire.Skimmer{}
	s.Part(bytes.Repeat([]byte{0xff}, 100))
	if err := s.Parse(new(wire.Response)); err == nil {
		t.Error("no error for what is not protobuf")
	}
}

// The checksum is taken of the bytes of the table's entries.
func TestTable(t *testing.T) {
	sum := digest.Of([]byte("x"))
	set := digest.All()
	table := marshal(t, &api.NameTable{
		Table: map[string]*api.NameTable_NameInfo{"Web.shop": {Ips: []string{"10.0.0.1"}}},
		Change: &api.NameTable_Change{
			Complete: set[:], Removed: []string{"gone.shop"}, Sum: sum.Bytes(), Revision: []byte("7"),
		},
	})
	c, ok, err := wire.ParseChange(table)
	if err != nil || !ok || c.Complete != set || !slices.Equal(c.Removed, []string{"gone.shop"}) || c.Sum != sum || string(c.Revision) != "7" {
		t.Errorf("%+v, %v, %v", c, ok, err)
	}
	n := 0
	err = wire.Entries(table, func(host string, raw []byte) {
		n++
		var alone api.NameTable
		if err := proto.Unmarshal(raw, &alone); err != nil || len(alone.GetTable()) != 1 || host != "web.shop" {
			t.Errorf("host %q: %v, %v", host, &alone, err)
		}
	})
	if err != nil || n != 1 {
		t.Errorf("%d entries, %v", n, err)
	}
	if _, ok, err := wire.ParseChange(marshal(t, &api.NameTable{})); ok || err != nil {
		t.Errorf("a table without a change: %v, %v", ok, err)
	}
	bad := protowire.AppendBytes(protowire.AppendTag(nil, 1001, protowire.BytesType), []byte("\x1a\x01x"))
	if _, _, err := wire.ParseChange(bad); err == nil {
		t.Error("no error for a checksum of one byte")
	}
}
