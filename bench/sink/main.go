// Command sink is an ADS client that receives and acknowledges every push, and does nothing
// else. It shows the cost of gRPC and protobuf.
package main

import (
	"context"
	"fmt"
	"os"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/nametap/nametap/api/digest"
)

// maxPush is the limit of a push, as in the agent.
const maxPush = 64 << 20

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: sink ADDRESS:PORT")
		os.Exit(2)
	}
	if err := receive(context.Background(), os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "sink:", err)
		os.Exit(1)
	}
}

// receive acknowledges pushes until the stream ends.
func receive(ctx context.Context, address string) error {
	conn, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxPush), grpc.WaitForReady(true)))
	if err != nil {
		return fmt.Errorf("connecting to %q: %w", address, err)
	}
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	if err != nil {
		return fmt.Errorf("opening a stream: %w", err)
	}
	request := &discovery.DeltaDiscoveryRequest{TypeUrl: digest.TypeURL, Node: &core.Node{Id: "sink"}}
	for {
		if err := stream.Send(request); err != nil {
			return fmt.Errorf("sending a request: %w", err)
		}
		push, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("receiving a push: %w", err)
		}
		request = &discovery.DeltaDiscoveryRequest{TypeUrl: digest.TypeURL, ResponseNonce: push.GetNonce()}
	}
}
