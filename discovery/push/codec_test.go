package push

import (
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// The bytes of a response, of either variant, decode to the message with the same fields.
func TestCodec(t *testing.T) {
	table, empty := &anypb.Any{TypeUrl: TypeURL, Value: []byte("any bytes will do")}, &anypb.Any{TypeUrl: TypeURL}
	full, none := &resource{version: "1"}, &resource{}
	full.add(mem.SliceBuffer(table.GetValue()[:3]))
	full.add(mem.SliceBuffer(table.GetValue()[3:]))
	for _, tt := range []struct {
		response response
		delta    bool
		want     proto.Message
	}{
		{response{}, false, &discoveryv3.DiscoveryResponse{TypeUrl: TypeURL}},
		{response{nonce: "1", version: "v", resource: none}, false, &discoveryv3.DiscoveryResponse{
			VersionInfo: "v", TypeUrl: TypeURL, Nonce: "1", Resources: []*anypb.Any{empty}}},
		{response{nonce: "1", version: "v", resource: full}, false, &discoveryv3.DiscoveryResponse{
			VersionInfo: "v", TypeUrl: TypeURL, Nonce: "1", Resources: []*anypb.Any{table}}},
		{response{}, true, &discoveryv3.DeltaDiscoveryResponse{TypeUrl: TypeURL}},
		{response{nonce: "2", version: "v", resource: full}, true, &discoveryv3.DeltaDiscoveryResponse{
			SystemVersionInfo: "v", TypeUrl: TypeURL, Nonce: "2", Resources: []*discoveryv3.Resource{{Version: "1", Resource: table}}}},
		{response{nonce: "2", version: "v", resource: none}, true, &discoveryv3.DeltaDiscoveryResponse{
			SystemVersionInfo: "v", TypeUrl: TypeURL, Nonce: "2", Resources: []*discoveryv3.Resource{{Resource: empty}}}},
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
