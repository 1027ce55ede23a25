package nds

import (
	"context"
	"fmt"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	_ "google.golang.org/grpc/encoding/gzip" // servers may compress responses
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api/digest"
)

// TypeURL is the type of the resources that the client subscribes to.
const TypeURL = digest.TypeURL

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
	// if another request has a node, too, istiod answers it with all resources, or not at all. versions has the
	// resources that the client announces.
	subscribe(node *corev3.Node, versions map[string]string) error
	receive() (response, error)
	// answer sends an ACK or, if rejection is not nil, a NACK of the response with this nonce. version is the version of
	// the last accepted response. Only state-of-the-world sends it.
	answer(nonce, version string, rejection *rpcstatus.Status) error
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
	bytes     int
	resources []*discoveryv3.Resource
	removed   []string
	// first is true for the first response of an incremental stream: it has all resources that the request did not
	// announce.
	first bool
	// all is true if the response has all resources.
	all bool
}

type incrementalRPC struct {
	client discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesClient
}

// subscribe sends a request without names of resources, which subscribes to all resources.
func (r incrementalRPC) subscribe(node *corev3.Node, versions map[string]string) error {
	return r.client.Send(&discoveryv3.DeltaDiscoveryRequest{
		Node: incrementalNode(node), TypeUrl: TypeURL, InitialResourceVersions: versions,
	})
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

func (r incrementalRPC) answer(nonce, _ string, rejection *rpcstatus.Status) error {
	return r.client.Send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: TypeURL, ResponseNonce: nonce, ErrorDetail: rejection})
}

type sotwRPC struct {
	client discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient
}

// subscribe announces nothing, because the control plane sends all resources in any case.
func (r sotwRPC) subscribe(node *corev3.Node, _ map[string]string) error {
	return r.client.Send(&discoveryv3.DiscoveryRequest{Node: node, TypeUrl: TypeURL})
}

// receive converts the resources to the incremental form. A NameTable does not contain its name, so a resource has a
// name only if the control plane wraps it in a discovery.v3.Resource of xDS, and not even then with the caches of
// go-control-plane. So if there are several resources without a name, receive gives them names. A response that only has
// heartbeats, which are resources without a body, does not have all resources.
func (r sotwRPC) receive() (response, error) {
	m, err := r.client.Recv()
	if err != nil {
		return response{}, err
	}
	converted := response{
		typeURL: m.GetTypeUrl(),
		version: m.GetVersionInfo(),
		nonce:   m.GetNonce(),
		bytes:   proto.Size(m),
		all:     len(m.GetResources()) == 0,
	}
	unnamed := 0
	for _, body := range m.GetResources() {
		resource := &discoveryv3.Resource{}
		if !body.MessageIs(resource) || body.UnmarshalTo(resource) != nil {
			// A malformed wrapper stays as it is, and the receiver refuses its type.
			resource = &discoveryv3.Resource{Resource: body}
		}
		if resource.GetName() == "" {
			if unnamed++; unnamed > 1 {
				resource.Name = fmt.Sprintf("\x00%d", unnamed)
			}
		}
		converted.all = converted.all || resource.GetResource() != nil
		converted.resources = append(converted.resources, resource)
	}
	return converted, nil
}

func (r sotwRPC) answer(nonce, version string, rejection *rpcstatus.Status) error {
	return r.client.Send(&discoveryv3.DiscoveryRequest{
		TypeUrl: TypeURL, VersionInfo: version, ResponseNonce: nonce, ErrorDetail: rejection,
	})
}
