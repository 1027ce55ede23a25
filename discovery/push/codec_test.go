package push

import (
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// The bytes of a response, of either variant, decode to the message with the same fields.
func TestCodec(t *testing.T) {
	table, empty := &anypb.Any{TypeUrl: TypeURL, Value: []byte("any bytes will do")}, &anypb.Any{TypeUrl: TypeURL}
	shop := &discoveryv3.Resource{Name: "shop", Version: "1", Resource: table}
	named, unnamed := newResource("shop", "1", table.GetValue()), newResource("", "", nil)
	for _, tt := range []struct {
		response response
		delta    bool
		want     proto.Message
	}{
		{response{}, false, &discoveryv3.DiscoveryResponse{TypeUrl: TypeURL}},
		{response{nonce: "1", version: "v", resources: []*resource{unnamed, newResource("", "1", table.GetValue())}}, false, &discoveryv3.DiscoveryResponse{
			VersionInfo: "v", TypeUrl: TypeURL, Nonce: "1", Resources: []*anypb.Any{empty, table}}},
		{response{}, true, &discoveryv3.DeltaDiscoveryResponse{TypeUrl: TypeURL}},
		{response{nonce: "2", version: "v", resources: []*resource{named, unnamed}, removed: []string{"a", ""}}, true, &discoveryv3.DeltaDiscoveryResponse{
			SystemVersionInfo: "v", TypeUrl: TypeURL, Nonce: "2", RemovedResources: []string{"a", ""},
			Resources: []*discoveryv3.Resource{shop, {Resource: empty}}}},
	} {
		data, err := Codec().Marshal(tt.response.encode(tt.delta))
		if err != nil {
			t.Fatal(err)
		}
		got := tt.want.ProtoReflect().New().Interface()
		if err := proto.Unmarshal(data.Materialize(), got); err != nil || !proto.Equal(got, tt.want) {
			t.Errorf("got %v, %v, want %v", got, err, tt.want)
		}
	}
	// In state-of-the-world, a resource with a name is in xDS's wrapper.
	response := response{resources: []*resource{named}}
	data, err := Codec().Marshal(response.encode(false))
	if err != nil {
		t.Fatal(err)
	}
	var got discoveryv3.DiscoveryResponse
	var wrapped discoveryv3.Resource
	if err := proto.Unmarshal(data.Materialize(), &got); err != nil {
		t.Fatal(err)
	}
	if err := got.GetResources()[0].UnmarshalTo(&wrapped); err != nil || !proto.Equal(&wrapped, shop) {
		t.Errorf("got %v, %v, want %v in a wrapper", &got, err, shop)
	}
}

// Other messages are encoded as gRPC's codec does.
func TestCodecOfOtherMessages(t *testing.T) {
	request := &discoveryv3.DiscoveryRequest{VersionInfo: "another message"}
	data, err := Codec().Marshal(request)
	got := new(discoveryv3.DiscoveryRequest)
	if err != nil || proto.Unmarshal(data.Materialize(), got) != nil || !proto.Equal(got, request) {
		t.Errorf("got %v, %v, want %v", got, err, request)
	}
}
