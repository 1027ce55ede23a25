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

// TypeURL is the type of the resources that the client subscribes to.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// A variant is one of the two variants of ADS.
type variant int

const (
	// incremental sends only the resources that changed.
	incremental variant = iota
	// stateOfTheWorld sends all resources with each push.
	stateOfTheWorld
)

// String returns the variant's name in [Status].
func (v variant) String() string {
	if v == stateOfTheWorld {
		return "sotw"
	}
	return "incremental"
}

// rpc is the RPC of one of the two variants.
type rpc interface {
	// subscribe sends the first request, which is the only request with the node. It must be called only once:
	// if another request has a node, too, istiod answers it with all resources, or not at all.
	subscribe(node *corev3.Node) error
	receive() (response, error)
	answer(a answer) error
	// closeSend ends the requests. The control plane then ends the stream.
	closeSend() error
}

// openRPC starts the RPC of a variant.
func openRPC(ctx context.Context, conn *grpc.ClientConn, v variant) (rpc, error) {
	ads := discoveryv3.NewAggregatedDiscoveryServiceClient(conn)
	if v == stateOfTheWorld {
		client, err := ads.StreamAggregatedResources(ctx)
		if err != nil {
			return nil, fmt.Errorf("opening the stream: %w", err)
		}
		return sotwRPC{client}, nil
	}
	client, err := ads.DeltaAggregatedResources(ctx)
	if err != nil {
		return nil, fmt.Errorf("opening the incremental stream: %w", err)
	}
	return incrementalRPC{client}, nil
}

// response is what the control plane sends, in either variant.
type response struct {
	typeURL, version, nonce string
	// bytes is the length of the response in wire form.
	bytes int
	// allResources is true if a response has all resources, so a response without a resource means an empty table.
	// Otherwise a response without a resource has no table.
	allResources bool
	resources    []*discoveryv3.Resource
	removed      []string
}

// table returns the NameTable of a response. found is true if the response has a NameTable.
func (r response) table() (table []byte, found bool, err error) {
	if r.typeURL != TypeURL {
		return nil, false, fmt.Errorf("response of type %q: want %q", r.typeURL, TypeURL)
	}
	for _, resource := range r.resources {
		switch body := resource.GetResource(); {
		case body.GetTypeUrl() != TypeURL:
			return nil, false, fmt.Errorf("resource %q of type %q: want %q", resource.GetName(), body.GetTypeUrl(), TypeURL)
		case len(r.resources) > 1:
			return nil, false, fmt.Errorf("response with %d resources: want one table", len(r.resources))
		case resource.GetName() != "":
			return nil, false, fmt.Errorf("resource %q: want a table without a name", resource.GetName())
		default:
			table, found = body.GetValue(), true
		}
	}
	return table, found, nil
}

// answer is an ACK or, if rejection is not nil, a NACK.
type answer struct {
	// nonce is the nonce of the response that is answered.
	nonce string
	// version is the version of the last accepted response. Only state-of-the-world
	// sends it.
	version   string
	rejection *rpcstatus.Status
}

type incrementalRPC struct {
	client discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesClient
}

// subscribe sends a request without names of resources, which subscribes to all resources.
func (r incrementalRPC) subscribe(node *corev3.Node) error {
	return r.client.Send(&discoveryv3.DeltaDiscoveryRequest{Node: node, TypeUrl: TypeURL})
}

func (r incrementalRPC) receive() (response, error) {
	m, err := r.client.Recv()
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

func (r incrementalRPC) answer(a answer) error {
	return r.client.Send(&discoveryv3.DeltaDiscoveryRequest{
		TypeUrl: TypeURL, ResponseNonce: a.nonce, ErrorDetail: a.rejection,
	})
}

func (r incrementalRPC) closeSend() error { return r.client.CloseSend() }

type sotwRPC struct {
	client discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient
}

func (r sotwRPC) subscribe(node *corev3.Node) error {
	return r.client.Send(&discoveryv3.DiscoveryRequest{Node: node, TypeUrl: TypeURL})
}

// receive converts the resources to the incremental form. A NameTable does not contain
// its name, so a resource has a name only if the control plane wraps it in a
// discovery.v3.Resource of xDS.
func (r sotwRPC) receive() (response, error) {
	m, err := r.client.Recv()
	if err != nil {
		return response{}, err
	}
	converted := response{
		typeURL:      m.GetTypeUrl(),
		version:      m.GetVersionInfo(),
		nonce:        m.GetNonce(),
		bytes:        proto.Size(m),
		allResources: true,
		resources:    make([]*discoveryv3.Resource, len(m.GetResources())),
	}
	for i, body := range m.GetResources() {
		wrapped := &discoveryv3.Resource{}
		if !body.MessageIs(wrapped) || body.UnmarshalTo(wrapped) != nil {
			// A malformed wrapper stays as it is, and response.table refuses its type.
			wrapped = &discoveryv3.Resource{Resource: body}
		}
		converted.resources[i] = wrapped
	}
	return converted, nil
}

func (r sotwRPC) answer(a answer) error {
	return r.client.Send(&discoveryv3.DiscoveryRequest{
		TypeUrl: TypeURL, VersionInfo: a.version, ResponseNonce: a.nonce, ErrorDetail: a.rejection,
	})
}

func (r sotwRPC) closeSend() error { return r.client.CloseSend() }
