package test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

const (
	planeName = "discovery.test"
	planeAddr = "198.18.0.1:15012"
	// limitMiB is the memory limit of the Deployment.
	limitMiB = 256
	// pods are the addresses of pods (RFC 2544).
	pods = "198.18.0.0/15"
)

// A plane is a nametap-discovery that serves the objects of an API server, and the log of it. They are in a
// namespace in which each address of pods can be the address of a pod.
type plane struct {
	tb    testing.TB
	ns    *netns.NS
	api   *fakekube.API
	roots *x509.CertPool
	cmd   *exec.Cmd
	log   *testlog.Buffer
}

// startPlane starts a control plane, which has the memory of the Deployment.
func startPlane(tb testing.TB) *plane {
	tb.Helper()
	p := &plane{tb: tb, ns: netns.New(tb), log: testlog.New(tb), roots: x509.NewCertPool()}
	p.ns.Exec("ip", "route", "add", "local", pods, "dev", "lo")
	p.ns.Run(func() { p.api = fakekube.Start(tb) })
	authority := fakexds.NewAuthority(tb, planeName, "spiffe://cluster.local/ns/shop/sa/web")
	p.roots.AppendCertsFromPEM([]byte(authority.Root()))
	certificate, key := authority.Server()
	files := tb.TempDir()
	for name, text := range map[string]string{"cert": certificate, "key": key} {
		if err := os.WriteFile(filepath.Join(files, name), []byte(text), 0o600); err != nil {
			tb.Fatal(err)
		}
	}
	p.put("web", "10.0.0.1")
	p.api.SetToken("shop", fakekube.Token{User: "system:serviceaccount:shop:web", Audiences: []string{"istio-ca"}})
	p.cmd = exec.Command(filepath.Join(planes.Dir(tb), "nametap-discovery"), "--kubeconfig", p.api.Kubeconfig(), "--tls-addr", planeAddr,
		"--http-addr", "127.0.0.1:15014", "--tls-cert", filepath.Join(files, "cert"), "--tls-key", filepath.Join(files, "key"))
	p.cmd.Env = append(os.Environ(), fmt.Sprint("GOMEMLIMIT=", limitMiB*85/100, "MiB")) // as it sets itself in the Deployment
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if err := p.ns.Start(p.cmd); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _, _ = p.cmd.Process.Kill(), p.cmd.Wait() }) // it has nothing to save
	wait.Until(tb, "the control plane listens", func() bool {
		conn, err := p.dial(tb.Context(), new(net.Dialer))
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	return p
}

// dial connects to the control plane in the namespace.
func (p *plane) dial(ctx context.Context, dialer *net.Dialer) (conn net.Conn, err error) {
	p.ns.Run(func() { conn, err = dialer.DialContext(ctx, "tcp", planeAddr) })
	return conn, err
}

// put changes the address of a Service in the namespace shop.
func (p *plane) put(name, ip string) {
	p.api.Put(fakekube.Services, "{apiVersion: v1, kind: Service, metadata: {namespace: shop, name: "+name+"}, spec: {clusterIP: "+ip+", ports: [{port: 80}]}}")
}

// peak returns the most memory that the process has had, in MiB.
func (p *plane) peak() int {
	p.tb.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	_, most, _ := strings.Cut(string(text), "VmHWM:")
	kib := 0
	if _, scanErr := fmt.Sscan(most, &kib); err != nil || scanErr != nil {
		p.tb.Fatalf("the control plane has ended: %v, %v", err, scanErr)
	}
	return kib >> 10
}

// A pod is a client of the namespace shop at an address of its own.
type pod struct {
	plane *plane
	ip    string
}

// GetRequestMetadata returns the header with the token.
func (pod) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer shop"}, nil
}

// RequireTransportSecurity says that the token is secret.
func (pod) RequireTransportSecurity() bool { return true }

// follow connects, and calls use with the tables that the pod is sent, which it acknowledges, until use returns false.
func (p pod) follow(ctx context.Context, use func(table []byte) bool) error {
	config := &tls.Config{RootCAs: p.plane.roots, ServerName: planeName, MinVersion: tls.VersionTLS12}
	conn, err := grpc.NewClient("passthrough:///plane", grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return p.plane.dial(ctx, &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(p.ip)}})
	}), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)), grpc.WithTransportCredentials(credentials.NewTLS(config)), grpc.WithPerRPCCredentials(p))
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(ctx)
	if err != nil {
		return err
	}
	meta := map[string]*structpb.Value{"NAMESPACE": structpb.NewStringValue("shop"), "INSTANCE_IPS": structpb.NewStringValue("10.0.0.1")}
	request := &discoveryv3.DiscoveryRequest{Node: &corev3.Node{Id: "sidecar~10.0.0.1~web-0.shop~x", Metadata: &structpb.Struct{Fields: meta}}, TypeUrl: fakexds.TypeURL}
	for {
		_ = stream.Send(request) // Recv gets the reason if the stream has ended
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		if len(response.GetResources()) != 1 {
			return errors.New("no table")
		}
		if !use(response.GetResources()[0].GetValue()) {
			return nil
		}
		request = &discoveryv3.DiscoveryRequest{TypeUrl: fakexds.TypeURL, VersionInfo: response.GetVersionInfo(), ResponseNonce: response.GetNonce()}
	}
}
