package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/push"
	"github.com/nametap/nametap/internal/testkit/wait"
)

const (
	typeURL      = push.TypeURL
	variantSotw  = "sotw"
	variantDelta = "delta"
)

// running is a server under test.
type running struct {
	*Server
	stop func()
	done chan error
	with []grpc.DialOption // of clients over TLS; nil for plaintext
}

// start runs a server on a free port until the end of the test, and returns when it is ready.
func start(t *testing.T, cfg Config) running {
	t.Helper()
	r := startUnready(t, cfg)
	begun := make(chan error, 1)
	go func() {
		select {
		case <-r.Ready():
			begun <- nil
		case err := <-r.done:
			r.done <- err
			begun <- fmt.Errorf("Run: %w", err)
		}
	}()
	if err := wait.For(t, "the server is ready", begun); err != nil {
		t.Fatal(err)
	}
	return r
}

// startUnready runs a server that need not become ready. No time of the server passes by accident: each that the test
// has not set is an hour.
func startUnready(t *testing.T, cfg Config) running {
	t.Helper()
	cfg.GRPCAddr = cmp.Or(cfg.GRPCAddr, "127.0.0.1:0")
	cfg.AckTimeout, cfg.ClusterTimeout = cmp.Or(cfg.AckTimeout, time.Hour), cmp.Or(cfg.ClusterTimeout, time.Hour)
	cfg.MaxConnectionAge, cfg.MaxClientsPerAddress = cmp.Or(cfg.MaxConnectionAge, time.Hour), cmp.Or(cfg.MaxClientsPerAddress, 1<<20)
	s, err := New(cfg)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	s.ads.patience = time.Hour
	return run(t, s)
}

// run runs a server until the end of the test.
func run(t *testing.T, s *Server) running {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r := running{Server: s, done: make(chan error, 1)}
	go func() { r.done <- s.Run(ctx) }()
	stopped := false
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-r.done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	t.Cleanup(r.stop)
	return r
}

func (r running) dial(t *testing.T) discoveryv3.AggregatedDiscoveryServiceClient {
	t.Helper()
	address, options := r.tlsAddr.String(), r.with
	if options == nil {
		address, options = r.Addr().String(), []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	}
	conn, err := grpc.NewClient(address, append(options, grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: time.Hour}))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return discoveryv3.NewAggregatedDiscoveryServiceClient(conn)
}

// metric returns a metric of the streams; values are the values of its labels.
func (r running) metric(t *testing.T, name string, values ...string) float64 {
	t.Helper()
	all := prometheus.NewRegistry()
	all.MustRegister(append(r.push.Metrics(), r.metrics.builds)...)
	families, err := all.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			labels := []string{}
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			if family.GetName() == "nametap_discovery_"+name && slices.Equal(labels, values) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	t.Fatalf("there is no metric %s %v", name, values)
	return 0
}

// node returns a node as agents send it; pairs are keys and values of its metadata.
func node(t *testing.T, namespace string, pairs ...string) *corev3.Node {
	t.Helper()
	meta := map[string]any{"NAMESPACE": namespace, "INSTANCE_IPS": "10.0.0.1,fd00::2"}
	for i := 0; i < len(pairs); i += 2 {
		meta[pairs[i]] = pairs[i+1]
	}
	s, err := structpb.NewStruct(meta)
	if err != nil {
		t.Fatal(err)
	}
	return &corev3.Node{Id: "sidecar~10.0.0.1~web-0." + namespace + "~" + namespace + ".svc.cluster.local", Metadata: s}
}

// client is an ADS stream of either variant, with the state that it has received.
type client interface {
	// next waits for a push, acknowledges it and returns it.
	next() pushed
	// state returns all tables by resource name. In state-of-the-world, tables without a
	// name are numbered.
	state() map[string]*api.NameTable
	// err waits for the end of the stream.
	err() error
	// first waits for a push or the end of the stream.
	first() pushed
	// expect sets what the test says if no push arrives.
	expect(what string)
}

type pushed struct {
	tables  map[string]*api.NameTable
	removed []string
	version string
	raw     proto.Message
	end     error // of the stream, instead of a push
}

// stream is the part that both variants share.
type stream struct {
	t      *testing.T
	pushes chan pushed
	tables map[string]*api.NameTable
	// awaited is what the test says if no push arrives.
	awaited string
	answer  func(p pushed) error
}

func (s *stream) next() pushed {
	s.t.Helper()
	p := wait.For(s.t, "a push "+s.awaited, s.pushes)
	if p.end != nil {
		s.t.Fatalf("stream ended: %v", p.end)
	}
	if err := s.answer(p); err != nil {
		s.t.Fatalf("answering: %v", err)
	}
	return p
}

func (s *stream) state() map[string]*api.NameTable { return s.tables }
func (s *stream) expect(what string)               { s.awaited = what }

func (s *stream) err() error {
	s.t.Helper()
	p := wait.For(s.t, "the end of the stream", s.pushes)
	if p.end == nil {
		s.t.Fatalf("unexpected push: %v", p.raw)
	}
	return p.end
}

func (s *stream) first() pushed {
	s.t.Helper()
	return wait.For(s.t, "a push, or the end of the stream", s.pushes)
}

type sotwClient struct{ *stream }

func openSotw(t *testing.T, r running, n *corev3.Node) client {
	t.Helper()
	str, err := r.dial(t).StreamAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := &stream{t: t, pushes: make(chan pushed, 16)}
	s.answer = func(p pushed) error {
		resp := p.raw.(*discoveryv3.DiscoveryResponse)
		s.tables = p.tables
		return str.Send(&discoveryv3.DiscoveryRequest{TypeUrl: typeURL, VersionInfo: resp.GetVersionInfo(), ResponseNonce: resp.GetNonce()})
	}
	// io.EOF means that the server has ended the stream; the reason comes from receiving.
	req := &discoveryv3.DiscoveryRequest{Node: n, TypeUrl: typeURL}
	if err := str.Send(req); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	go func() {
		for {
			resp, err := str.Recv()
			if err != nil {
				s.pushes <- pushed{end: err}
				return
			}
			p := pushed{tables: map[string]*api.NameTable{}, version: resp.GetVersionInfo(), raw: resp}
			for i, a := range resp.GetResources() {
				name, wrapper := string(rune('0'+i)), &discoveryv3.Resource{}
				if a.MessageIs(wrapper) {
					if err := a.UnmarshalTo(wrapper); err != nil {
						t.Errorf("wrapper: %v", err)
					}
					name, a = wrapper.GetName(), wrapper.GetResource()
				}
				p.tables[name] = unmarshal(t, a.GetTypeUrl(), a.GetValue())
			}
			s.pushes <- p
		}
	}()
	return sotwClient{s}
}

type deltaClient struct{ *stream }

func openDelta(t *testing.T, r running, n *corev3.Node, initial map[string]string) client {
	t.Helper()
	str, err := r.dial(t).DeltaAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := &stream{t: t, pushes: make(chan pushed, 16), tables: map[string]*api.NameTable{}}
	s.answer = func(p pushed) error {
		maps.Copy(s.tables, p.tables)
		for _, name := range p.removed {
			delete(s.tables, name)
		}
		return str.Send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResponseNonce: p.raw.(*discoveryv3.DeltaDiscoveryResponse).GetNonce()})
	}
	req := &discoveryv3.DeltaDiscoveryRequest{Node: n, TypeUrl: typeURL, InitialResourceVersions: initial}
	if err := str.Send(req); err != nil && !errors.Is(err, io.EOF) { // as in openSotw
		t.Fatal(err)
	}
	go func() {
		for {
			resp, err := str.Recv()
			if err != nil {
				s.pushes <- pushed{end: err}
				return
			}
			p := pushed{tables: map[string]*api.NameTable{}, removed: resp.GetRemovedResources(), raw: resp}
			for _, res := range resp.GetResources() {
				p.tables[res.GetName()] = unmarshal(t, res.GetResource().GetTypeUrl(), res.GetResource().GetValue())
			}
			s.pushes <- p
		}
	}()
	return deltaClient{s}
}

func unmarshal(t *testing.T, url string, value []byte) *api.NameTable {
	t.Helper()
	table := &api.NameTable{}
	if url != typeURL {
		t.Errorf("resource of type %q", url)
	}
	if err := proto.Unmarshal(value, table); err != nil {
		t.Errorf("resource: %v", err)
	}
	return table
}

// merged merges tables, and fails the test if a host is in two of them.
func merged(t *testing.T, tables map[string]*api.NameTable) *api.NameTable {
	t.Helper()
	out := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{}}
	for _, table := range tables {
		for host, info := range table.GetTable() {
			if _, ok := out.Table[host]; ok {
				t.Errorf("%s is in two resources", host)
			}
			out.Table[host] = info
		}
	}
	return out
}

// bytesOf returns a deterministic encoding, to compare tables.
func bytesOf(t *testing.T, m proto.Message) string {
	t.Helper()
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// write writes a file as editors do: it renames a new file into place.
func write(t *testing.T, dir, name, content string) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	tmp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".swp")
	if err := os.WriteFile(tmp, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, path); err != nil {
		t.Fatal(err)
	}
}

// hostsOf returns the hosts and addresses that the client has received, as text.
func hostsOf(t *testing.T, c client) string {
	t.Helper()
	return fmt.Sprint(ipsOf(t, merged(t, c.state())))
}

// ipsOf returns the addresses of the hosts of a table.
func ipsOf(t *testing.T, table *api.NameTable) map[string]string {
	t.Helper()
	out := map[string]string{}
	for host, info := range table.GetTable() {
		out[host] = strings.Join(info.GetIps(), " ")
	}
	return out
}

// unpack writes an embedded tree to a new directory and returns its path.
func unpack(t *testing.T, fsys fs.FS) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "config")
	if err := os.CopyFS(dir, fsys); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	return dir
}
