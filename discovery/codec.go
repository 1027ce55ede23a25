package discovery

import (
	"fmt"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	protobuf "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// Field numbers of the messages that are encoded here.
const (
	fieldResources   = 2 // of both responses
	fieldAnyTypeURL  = 1
	fieldAnyValue    = 2
	fieldResVersion  = 1
	fieldResResource = 2
	fieldResName     = 3
)

// codec is gRPC's codec, except that it encodes responses around the bytes of their
// tables, which all streams share. A push to 10,000 clients, or one that a slow client
// does not read, costs a few hundred bytes per stream instead of a table.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(proto.Name)} }

// Marshal encodes a message.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	switch m := v.(type) {
	case *discoveryv3.DiscoveryResponse:
		if len(m.GetResourceErrors()) > 0 || m.GetControlPlane() != nil {
			break // the server in this package never sets these
		}
		return marshalResponse(m)
	case *discoveryv3.DeltaDiscoveryResponse:
		if len(m.GetResourceErrors()) > 0 || m.GetControlPlane() != nil || len(m.GetRemovedResourceNames()) > 0 {
			break
		}
		return marshalDelta(m)
	}
	return c.CodecV2.Marshal(v)
}

func marshalResponse(m *discoveryv3.DiscoveryResponse) (mem.BufferSlice, error) {
	out, err := marshalHead(&discoveryv3.DiscoveryResponse{
		VersionInfo: m.GetVersionInfo(), Canary: m.GetCanary(), TypeUrl: m.GetTypeUrl(), Nonce: m.GetNonce(),
	})
	if err != nil {
		return nil, err
	}
	for _, a := range m.GetResources() {
		prefix := anyPrefix(a)
		head := protowire.AppendTag(nil, fieldResources, protowire.BytesType)
		head = protowire.AppendVarint(head, uint64(len(prefix)+len(a.GetValue())))
		out = append(out, mem.SliceBuffer(append(head, prefix...)), mem.SliceBuffer(a.GetValue()))
	}
	return out, nil
}

func marshalDelta(m *discoveryv3.DeltaDiscoveryResponse) (mem.BufferSlice, error) {
	out, err := marshalHead(&discoveryv3.DeltaDiscoveryResponse{
		SystemVersionInfo: m.GetSystemVersionInfo(), TypeUrl: m.GetTypeUrl(), Nonce: m.GetNonce(),
		RemovedResources: m.GetRemovedResources(),
	})
	if err != nil {
		return nil, err
	}
	for _, r := range m.GetResources() {
		a := r.GetResource()
		prefix := anyPrefix(a)
		body := protowire.AppendTag(nil, fieldResName, protowire.BytesType)
		body = protowire.AppendString(body, r.GetName())
		body = protowire.AppendTag(body, fieldResVersion, protowire.BytesType)
		body = protowire.AppendString(body, r.GetVersion())
		body = protowire.AppendTag(body, fieldResResource, protowire.BytesType)
		body = protowire.AppendVarint(body, uint64(len(prefix)+len(a.GetValue())))
		body = append(body, prefix...)
		head := protowire.AppendTag(nil, fieldResources, protowire.BytesType)
		head = protowire.AppendVarint(head, uint64(len(body)+len(a.GetValue())))
		out = append(out, mem.SliceBuffer(append(head, body...)), mem.SliceBuffer(a.GetValue()))
	}
	return out, nil
}

func marshalHead(m protobuf.Message) (mem.BufferSlice, error) {
	head, err := protobuf.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encoding a response: %w", err)
	}
	return mem.BufferSlice{mem.SliceBuffer(head)}, nil
}

// anyPrefix returns the encoding of an Any up to the bytes of its value.
func anyPrefix(a *anypb.Any) []byte {
	out := protowire.AppendTag(nil, fieldAnyTypeURL, protowire.BytesType)
	out = protowire.AppendString(out, a.GetTypeUrl())
	out = protowire.AppendTag(out, fieldAnyValue, protowire.BytesType)
	return protowire.AppendVarint(out, uint64(len(a.GetValue())))
}
