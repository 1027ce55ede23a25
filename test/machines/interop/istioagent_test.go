package interop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

const (
	istioDNSAddr    = "127.0.0.1:15153"
	istioStatusPort = 15121
)

// istioAgent starts Istio's own agent of a pod, without Envoy, with its DNS proxy, and returns when it is connected. It
// reads relative paths, so the host's directory is its pod.
func (h *host) istioAgent(d *lab.Istiod, name, namespace string) *lab.Process {
	h.TB.Helper()
	h.Write("var/run/secrets/tokens/istio-token", token(h.c, namespace, "default", audience))
	h.Write("var/run/secrets/istio/root-cert.pem", root(h.c, namespace, "istio-ca-root-cert"))
	h.Mkdir("etc/istio/proxy", 0)
	config, err := json.Marshal(map[string]any{"discoveryAddress": h.address(d.Port(15012)), "statusPort": istioStatusPort})
	if err != nil {
		h.TB.Fatal(err)
	}
	// It always reads /etc/resolv.conf.
	cmd := exec.Command("sh", "-c", `mount --bind "$0" /etc/resolv.conf && exec "$@"`, h.resolvConf(namespace),
		lab.Peer(h.TB, "istiod"), "agent", "proxy", "sidecar")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	cmd.Env = append(os.Environ(), "POD_NAME="+name, "POD_NAMESPACE="+namespace, "INSTANCE_IP="+h.addrs[0],
		"ISTIO_META_CLUSTER_ID=Kubernetes", "ISTIO_META_DNS_CAPTURE=true", "DNS_PROXY_ADDR="+istioDNSAddr,
		"DISABLE_ENVOY=true", "ISTIOD_SAN=istiod.istio-system.svc", "PROXY_CONFIG="+string(config))
	a := h.Spawn(name, cmd)
	var node *corev3.Node
	a.Await("Istio's agent has written the node", func() (ok bool) {
		node, ok = readBootstrap(h.Path("etc/istio/proxy/grpc-bootstrap.json"))
		return ok
	})
	h.beEnvoy(node)
	return a
}

// readBootstrap returns the node in the bootstrap configuration that Istio's agent writes for
// gRPC; ok is false if the file is not complete.
func readBootstrap(path string) (node *corev3.Node, ok bool) {
	var bootstrap struct {
		Node struct {
			ID       string         `json:"id"`
			Metadata map[string]any `json:"metadata"`
		} `json:"node"`
	}
	text, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(text, &bootstrap) != nil {
		return nil, false
	}
	delete(bootstrap.Node.Metadata, "GENERATOR") // it would subscribe to gRPC's resources
	metadata, err := structpb.NewStruct(bootstrap.Node.Metadata)
	return &corev3.Node{Id: bootstrap.Node.ID, Metadata: metadata}, err == nil
}

// beEnvoy opens the stream of Envoy to Istio's agent, which connects to istiod only while
// there is one, and subscribes to listeners, after which the agent subscribes to names.
func (h *host) beEnvoy(node *corev3.Node) {
	h.TB.Helper()
	conn, err := grpc.NewClient("unix:"+h.Path("etc/istio/proxy/XDS"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		h.TB.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if err := subscribe(ctx, conn, node); err != nil && ctx.Err() == nil {
				fmt.Fprintf(os.Stderr, "Envoy's stream to Istio's agent: %v\n", err)
			}
		}
	}()
	h.TB.Cleanup(func() {
		cancel()
		wait.For(h.TB, "Envoy's stream has ended", done)
		if err := conn.Close(); err != nil {
			h.TB.Error(err)
		}
	})
}

// subscribe opens a stream, subscribes to listeners and acknowledges them until it ends.
func subscribe(ctx context.Context, conn *grpc.ClientConn, node *corev3.Node) error {
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(ctx, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	request := &discoveryv3.DiscoveryRequest{Node: node, TypeUrl: "type.googleapis.com/envoy.config.listener.v3.Listener"}
	for {
		if err := stream.Send(request); err != nil {
			_, received := stream.Recv() // the reason
			return errors.Join(err, received)
		}
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		request = &discoveryv3.DiscoveryRequest{
			TypeUrl: response.GetTypeUrl(), VersionInfo: response.GetVersionInfo(), ResponseNonce: response.GetNonce(),
		}
	}
}
