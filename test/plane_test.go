package test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
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
	// limitMiB is the memory limit of the Deployment.
	limitMiB = 256
	// pods are the addresses of pods (RFC 2544).
	pods = "198.18.0.0/15"
)

// A plane is a nametap-discovery that serves the objects of an API server, and the log of it. They are in a
// namespace in which each address of pods can be the address of a pod.
type plane struct {
	tb          testing.TB
	ns          *netns.NS
	web         http.Client
	api         *fakekube.API
	tls, status string
	roots       *x509.CertPool
	cmd         *exec.Cmd
	log         *testlog.Buffer
	ended       chan struct{}
}

// startPlane starts a control plane, which has the memory of the Deployment.
func startPlane(tb testing.TB) *plane {
	tb.Helper()
	p := &plane{tb: tb, ns: netns.New(tb), log: testlog.New(tb), roots: x509.NewCertPool(), ended: make(chan struct{})}
	p.ns.Exec("ip", "route", "add", "local", pods, "dev", "lo")
	p.ns.Run(func() { p.api = fakekube.Start(tb) })
	p.tls, p.status = "198.18.0.1:15012", "127.0.0.1:15014"
	p.web.Transport = &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		return p.dial(ctx, new(net.Dialer), network, address)
	}}
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
	p.cmd = exec.Command(filepath.Join(planes.Dir(tb), "nametap-discovery"),
		"--kubeconfig", p.api.Kubeconfig(), "--tls-addr", p.tls, "--http-addr", p.status,
		"--tls-cert", filepath.Join(files, "cert"), "--tls-key", filepath.Join(files, "key"))
	p.cmd.Env = append(os.Environ(), fmt.Sprint("GOMEMLIMIT=", limitMiB*85/100, "MiB")) // as it sets itself in the Deployment
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if err := p.ns.Start(p.cmd); err != nil {
		tb.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait() // it is killed
		close(p.ended)
	}()
	tb.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
	})
	wait.Until(tb, "the control plane is ready", func() bool {
		response, err := p.web.Get("http://" + p.status + "/healthz/ready")
		if err != nil {
			return false
		}
		_ = response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return p
}

// dial opens a connection in the namespace.
func (p *plane) dial(ctx context.Context, dialer *net.Dialer, network, address string) (conn net.Conn, err error) {
	p.ns.Run(func() { conn, err = dialer.DialContext(ctx, network, address) })
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
	if err != nil {
		p.tb.Fatal(err)
	}
	found := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(text)
	if found == nil {
		p.tb.Fatalf("the control plane has ended: %s", text)
	}
	kib, err := strconv.Atoi(string(found[1]))
	if err != nil {
		p.tb.Fatal(err)
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

// A tableStream is a stream of tables.
type tableStream = discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient

// open requests the table on a connection of its own. The connection ends with ctx.
func (p pod) open(ctx context.Context) (tableStream, error) {
	config := &tls.Config{RootCAs: p.plane.roots, ServerName: planeName, MinVersion: tls.VersionTLS12}
	conn, err := grpc.NewClient("passthrough:///plane", grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return p.plane.dial(ctx, &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(p.ip)}}, "tcp", p.plane.tls)
	}), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)), grpc.WithTransportCredentials(credentials.NewTLS(config)), grpc.WithPerRPCCredentials(p))
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { _ = conn.Close() })
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(ctx)
	if err != nil {
		return nil, err
	}
	meta := map[string]*structpb.Value{"NAMESPACE": structpb.NewStringValue("shop"), "INSTANCE_IPS": structpb.NewStringValue("10.0.0.1")}
	node := &corev3.Node{Id: "sidecar~10.0.0.1~web-0.shop~x", Metadata: &structpb.Struct{Fields: meta}}
	_ = stream.Send(&discoveryv3.DiscoveryRequest{Node: node, TypeUrl: fakexds.TypeURL}) // received gets the reason if the stream has ended
	return stream, nil
}

// received returns the next response of a stream, and its table.
func received(stream tableStream) (*discoveryv3.DiscoveryResponse, []byte, error) {
	response, err := stream.Recv()
	if err == nil && len(response.GetResources()) != 1 {
		err = errors.New("no table")
	}
	if err != nil {
		return nil, nil, err
	}
	return response, response.GetResources()[0].GetValue(), nil
}

// table connects, and returns the table that the pod is sent.
func (p pod) table(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := p.open(ctx)
	if err != nil {
		return nil, err
	}
	_, table, err := received(stream)
	return table, err
}

// follow connects, and returns a channel with the tables that the pod is sent, which it acknowledges. The channel is closed
// when the stream ends, and then the function why returns the reason.
func (p pod) follow(ctx context.Context) (tables chan []byte, why func() error) {
	p.plane.tb.Helper()
	tables = make(chan []byte, 100)
	stream, err := p.open(ctx)
	if err != nil {
		p.plane.tb.Fatal(err)
	}
	var end error
	go func() {
		defer close(tables)
		for {
			var response *discoveryv3.DiscoveryResponse
			var table []byte
			if response, table, end = received(stream); end != nil {
				return
			}
			tables <- table
			ack := &discoveryv3.DiscoveryRequest{TypeUrl: fakexds.TypeURL, VersionInfo: response.GetVersionInfo(), ResponseNonce: response.GetNonce()}
			if stream.Send(ack) != nil {
				return
			}
		}
	}()
	return tables, func() error { return end }
}
