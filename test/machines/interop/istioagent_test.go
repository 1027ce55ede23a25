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
)

const (
	istioDNSAddr    = "127.0.0.1:15153"
	istioStatusPort = 15121
)

// An istioAgent is Istio's own agent, without Envoy.
type istioAgent struct {
	*daemon
	pod pod
}

// proxy is the name of the agent at istiod.
func (a *istioAgent) proxy() string { return a.pod.name + "." + a.pod.namespace }

// istioAgent starts Istio's agent of a pod, with its DNS proxy, and returns when it is
// connected. It reads relative paths, so the machine's directory is its pod.
func (m *machine) istioAgent(d *istiod, p pod) *istioAgent {
	m.tb.Helper()
	m.write("var/run/secrets/tokens/istio-token", m.c.token(p.namespace, "istio-ca"))
	m.write("var/run/secrets/istio/root-cert.pem", m.c.root(p.namespace))
	if err := os.MkdirAll(m.path("etc/istio/proxy"), 0o755); err != nil {
		m.tb.Fatal(err)
	}
	config, err := json.Marshal(map[string]any{"discoveryAddress": m.address(d.port(15012)), "statusPort": istioStatusPort})
	if err != nil {
		m.tb.Fatal(err)
	}
	// It always reads /etc/resolv.conf.
	cmd := exec.Command("sh", "-c", `mount --bind "$0" /etc/resolv.conf && exec "$@"`, m.resolvConf(p.namespace),
		m.c.istio, "agent", "proxy", "sidecar")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	cmd.Env = append(os.Environ(), "POD_NAME="+p.name, "POD_NAMESPACE="+p.namespace, "INSTANCE_IP="+m.addrs[0],
		"ISTIO_META_CLUSTER_ID=Kubernetes", "ISTIO_META_DNS_CAPTURE=true", "DNS_PROXY_ADDR="+istioDNSAddr,
		"DISABLE_ENVOY=true", "ISTIOD_SAN=istiod.istio-system.svc", "PROXY_CONFIG="+string(config))
	a := &istioAgent{daemon: m.run(p.name, cmd), pod: p}
	var node *corev3.Node
	a.await("Istio's agent has written the node", func() (ok bool) {
		node, ok = readBootstrap(m.path("etc/istio/proxy/grpc-bootstrap.json"))
		return ok
	})
	m.beEnvoy(node)
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
func (m *machine) beEnvoy(node *corev3.Node) {
	m.tb.Helper()
	conn, err := grpc.NewClient("unix:"+m.path("etc/istio/proxy/XDS"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		m.tb.Fatal(err)
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
	m.tb.Cleanup(func() {
		cancel()
		wait.For(m.tb, "Envoy's stream has ended", done)
		if err := conn.Close(); err != nil {
			m.tb.Error(err)
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
