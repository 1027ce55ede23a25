package test

import (
	"bufio"
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
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

const (
	tableType = "type.googleapis.com/istio.networking.nds.v1.NameTable"
	otherType = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	adsMethod = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
	planeName = "discovery.test"
	// limitMiB is the memory limit of the Deployment.
	limitMiB = 256
	// pods are the addresses of pods (RFC 2544).
	pods = "198.18.0.0/15"
)

// A plane is a nametap-discovery that serves both endpoints, the objects of an API server, and the log of it. They are in a
// namespace in which each address of pods can be the address of a pod.
type plane struct {
	tb                 testing.TB
	ns                 *netns.NS
	web                http.Client
	api                *fakekube.API
	plain, tls, status string
	roots              *x509.CertPool
	cmd                *exec.Cmd
	log                *testlog.Buffer
	ended              chan struct{}
}

// startPlane starts a control plane with some flags, which has the memory of the Deployment.
func startPlane(tb testing.TB, flags ...string) *plane {
	tb.Helper()
	return startPlaneWith(tb, limitMiB*85/100, flags...) // as it sets itself in the Deployment
}

// startPlaneWith is startPlane with another GOMEMLIMIT, in MiB.
func startPlaneWith(tb testing.TB, memory int, flags ...string) *plane {
	tb.Helper()
	p := &plane{tb: tb, ns: netns.New(tb), log: testlog.New(tb), roots: x509.NewCertPool(), ended: make(chan struct{})}
	p.ns.Exec("ip", "route", "add", "local", pods, "dev", "lo")
	p.ns.Run(func() { p.api = fakekube.Start(tb) })
	p.plain, p.tls, p.status = "198.18.0.1:15010", "198.18.0.1:15012", "127.0.0.1:15014"
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
	for _, namespace := range []string{"shop", "evil"} {
		p.api.SetToken(namespace, fakekube.Token{User: "system:serviceaccount:" + namespace + ":web", Audiences: []string{"istio-ca"}})
	}
	p.cmd = exec.Command(filepath.Join(planes.Dir(tb), "nametap-discovery"), append([]string{
		"--kubeconfig", p.api.Kubeconfig(), "--grpc-addr", p.plain, "--tls-addr", p.tls, "--http-addr", p.status,
		"--tls-cert", filepath.Join(files, "cert"), "--tls-key", filepath.Join(files, "key")}, flags...)...)
	p.cmd.Env = append(os.Environ(), fmt.Sprint("GOMEMLIMIT=", memory, "MiB"))
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

// metric returns the sum of the metrics with a prefix.
func (p *plane) metric(prefix string) (sum float64) {
	p.tb.Helper()
	wait.Until(p.tb, "metrics", func() bool {
		response, err := p.web.Get("http://" + p.status + "/metrics")
		if err != nil {
			return false // connections that are idle may end
		}
		defer response.Body.Close()
		sum = 0
		lines := bufio.NewScanner(response.Body)
		for lines.Scan() {
			if name, value, ok := strings.Cut(lines.Text(), " "); ok && strings.HasPrefix(name, prefix) {
				n, _ := strconv.ParseFloat(value, 64) // zero if it is none
				sum += n
			}
		}
		return lines.Err() == nil
	})
	return sum
}

// A pod is a client at an address of its own.
type pod struct {
	plane *plane
	ip    string
	token string // over TLS; in plaintext if it is empty
}

// dial opens a connection of the pod, without TLS.
func (p pod) dial(ctx context.Context) (net.Conn, error) {
	address := p.plane.plain
	if p.token != "" {
		address = p.plane.tls
	}
	return p.plane.dial(ctx, &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(p.ip)}}, "tcp", address)
}

// GetRequestMetadata returns the header with the token.
func (p pod) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + p.token}, nil
}

// RequireTransportSecurity says that the token is secret.
func (pod) RequireTransportSecurity() bool { return true }

// open opens a stream on a connection of its own. Both end with ctx.
func (p pod) open(ctx context.Context) (grpc.ClientStream, error) {
	options := []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return p.dial(ctx) }),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(encoded{}), grpc.MaxCallRecvMsgSize(1<<30)),
	}
	if p.token == "" {
		options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))
	} else {
		config := &tls.Config{RootCAs: p.plane.roots, ServerName: planeName, MinVersion: tls.VersionTLS12}
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(config)), grpc.WithPerRPCCredentials(p))
	}
	conn, err := grpc.NewClient("passthrough:///plane", options...)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { _ = conn.Close() })
	return conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, adsMethod)
}

// table connects, and returns the table that the pod is sent.
func (p pod) table(ctx context.Context, namespace string) ([]byte, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := p.open(ctx)
	if err != nil {
		return nil, err
	}
	_ = stream.SendMsg(request(namespace, tableType, nil)) // received gets the reason if the stream has ended
	response, err := received(stream)
	if err != nil {
		return nil, err
	}
	return response.GetResources()[0].GetValue(), nil
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
	if err := stream.SendMsg(request("shop", tableType, nil)); err != nil {
		p.plane.tb.Fatal(err)
	}
	var end error
	go func() {
		defer close(tables)
		for {
			response, err := received(stream)
			if err != nil {
				end = err
				return
			}
			tables <- response.GetResources()[0].GetValue()
			ack, err := proto.Marshal(&discoveryv3.DiscoveryRequest{TypeUrl: tableType, VersionInfo: response.GetVersionInfo(), ResponseNonce: response.GetNonce()})
			if err != nil || stream.SendMsg(ack) != nil {
				return
			}
		}
	}()
	return tables, func() error { return end }
}

// received returns the next response of a stream, which has a table.
func received(stream grpc.ClientStream) (*discoveryv3.DiscoveryResponse, error) {
	var data []byte
	if err := stream.RecvMsg(&data); err != nil {
		return nil, err
	}
	response := new(discoveryv3.DiscoveryResponse)
	if err := proto.Unmarshal(data, response); err != nil {
		return nil, err
	}
	if len(response.GetResources()) != 1 {
		return nil, errors.New("no table")
	}
	return response, nil
}

// request returns an encoded first request of a client in a namespace, with more metadata.
func request(namespace, of string, more map[string]any) []byte {
	meta := map[string]any{"NAMESPACE": namespace, "INSTANCE_IPS": "10.0.0.1"}
	for key, value := range more {
		meta[key] = value
	}
	fields, err := structpb.NewStruct(meta)
	if err != nil {
		panic(err)
	}
	node := &corev3.Node{Id: "sidecar~10.0.0.1~web-0." + namespace + "~x", Metadata: fields}
	data, err := proto.Marshal(&discoveryv3.DiscoveryRequest{Node: node, TypeUrl: of})
	if err != nil {
		panic(err)
	}
	return data
}

// encoded is the codec of messages that are encoded already.
type encoded struct{}

// Marshal returns the message.
func (encoded) Marshal(v any) ([]byte, error) { return v.([]byte), nil }

// Unmarshal stores the message.
func (encoded) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}

// Name returns the name of the codec.
func (encoded) Name() string { return "proto" }

// pause waits for a time, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
