package nds

import (
	"context"
	"fmt"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// response is a response of either variant.
type response struct {
	typeURL, version, nonce string
	// bytes is the length on the wire.
	bytes int
	// whole says that resources is all there is, and not a change.
	whole     bool
	resources []*discoveryv3.Resource
	removed   []string
}

// answer is an ACK, or a NACK if rejection is not nil.
type answer struct {
	// nonce is that of the response that is answered.
	nonce string
	// version is that of the last response that was accepted; the incremental
	// variant does not send it.
	version   string
	rejection *rpcstatus.Status
}

// wire is an open stream in one of the variants.
type wire interface {
	// subscribe sends the first request, the only one with the node. There is
	// no second: istiod answers it with everything, or not at all.
	subscribe(node *corev3.Node) error
	receive() (response, error)
	answer(a answer) error
}

// openWire opens a stream of the given variant.
func openWire(ctx context.Context, conn *grpc.ClientConn, variant Variant) (wire, error) {
	ads := discoveryv3.NewAggregatedDiscoveryServiceClient(conn)
	if variant == StateOfTheWorld {
		rpc, err := ads.StreamAggregatedResources(ctx)
		if err != nil {
			return nil, fmt.Errorf("opening the stream: %w", err)
		}
		return wholeWire{rpc}, nil
	}
	rpc, err := ads.DeltaAggregatedResources(ctx)
	if err != nil {
		return nil, fmt.Errorf("opening the incremental stream: %w", err)
	}
	return deltaWire{rpc}, nil
}

// deltaWire speaks the incremental variant.
type deltaWire struct {
	rpc discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesClient
}

// subscribe names no resource, which means all.
func (w deltaWire) subscribe(node *corev3.Node) error {
	return w.rpc.Send(&discoveryv3.DeltaDiscoveryRequest{Node: node, TypeUrl: TypeURL})
}

func (w deltaWire) receive() (response, error) {
	m, err := w.rpc.Recv()
	if err != nil {
		return response{}, err
	}
	return response{
		typeURL:   m.GetTypeUrl(),
		version:   m.GetSystemVersionInfo(),
		nonce:     m.GetNonce(),
		bytes:     proto.Size(m),
		resources: m.GetResources(),
		removed:   m.GetRemovedResources(),
	}, nil
}

func (w deltaWire) answer(a answer) error {
	return w.rpc.Send(&discoveryv3.DeltaDiscoveryRequest{
		TypeUrl: TypeURL, ResponseNonce: a.nonce, ErrorDetail: a.rejection,
	})
}

// wholeWire speaks the state-of-the-world variant.
type wholeWire struct {
	rpc discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient
}

func (w wholeWire) subscribe(node *corev3.Node) error {
	return w.rpc.Send(&discoveryv3.DiscoveryRequest{Node: node, TypeUrl: TypeURL})
}

// receive gives the resources the form they have in the incremental variant. A
// NameTable does not hold its name, so a resource has one only if it comes in
// the wrapper that xDS has for that purpose.
func (w wholeWire) receive() (response, error) {
	m, err := w.rpc.Recv()
	if err != nil {
		return response{}, err
	}
	r := response{
		typeURL:   m.GetTypeUrl(),
		version:   m.GetVersionInfo(),
		nonce:     m.GetNonce(),
		bytes:     proto.Size(m),
		whole:     true,
		resources: make([]*discoveryv3.Resource, len(m.GetResources())),
	}
	for i, body := range m.GetResources() {
		wrapped := &discoveryv3.Resource{}
		if !body.MessageIs(wrapped) || body.UnmarshalTo(wrapped) != nil {
			// A damaged wrapper stays one, and is refused for its type.
			wrapped = &discoveryv3.Resource{Resource: body}
		}
		r.resources[i] = wrapped
	}
	return r, nil
}

func (w wholeWire) answer(a answer) error {
	return w.rpc.Send(&discoveryv3.DiscoveryRequest{
		TypeUrl: TypeURL, VersionInfo: a.version, ResponseNonce: a.nonce, ErrorDetail: a.rejection,
	})
}
