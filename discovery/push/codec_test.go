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
	content := []byte("any bytes will do")
	table, empty := &anypb.Any{TypeUrl: TypeURL, Value: content}, &anypb.Any{TypeUrl: TypeURL}
	parts := []mem.Buffer{mem.SliceBuffer(content[:3]), mem.SliceBuffer(content[3:])}
	one := newEncoded("7", "v7", content)
	if string(one.table) != string(content) {
		t.Errorf("the NameTable is %q", one.table)
	}
	for _, tt := range []struct {
		response encodedResponse
		want     proto.Message
	}{
		{newResponse(&push{}, ""), &discoveryv3.DiscoveryResponse{TypeUrl: TypeURL}},
		{newResponse(&push{version: "v", resources: newWhole(false, "v", nil)}, "1"), &discoveryv3.DiscoveryResponse{
			VersionInfo: "v", TypeUrl: TypeURL, Nonce: "1", Resources: []*anypb.Any{empty}}},
		{newResponse(&push{version: "v", resources: newWhole(false, "v", parts)}, "1"), &discoveryv3.DiscoveryResponse{
			VersionInfo: "v", TypeUrl: TypeURL, Nonce: "1", Resources: []*anypb.Any{table}}},
		{newResponse(&push{}, "2"), &discoveryv3.DeltaDiscoveryResponse{TypeUrl: TypeURL, Nonce: "2"}},
		{newResponse(&push{version: "v", resources: newWhole(true, "v", parts)}, "2"), &discoveryv3.DeltaDiscoveryResponse{
			SystemVersionInfo: "v", TypeUrl: TypeURL, Nonce: "2", Resources: []*discoveryv3.Resource{{Version: "v", Resource: table}}}},
		{newResponse(&push{resources: []mem.Buffer{&one.resource}, removed: []string{"3", ""}}, "2"), &discoveryv3.DeltaDiscoveryResponse{
			TypeUrl: TypeURL, Nonce: "2", RemovedResources: []string{"3", ""}, Resources: []*discoveryv3.Resource{{Name: "7", Version: "v7", Resource: table}}}},
	} {
		data, err := Codec().Marshal(tt.response)
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
