package fakexds_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) { wait.Main(m) }

// testContext bounds a test, so that a lost event fails it instead of hanging.
func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// dial opens a client of s.
func dial(t *testing.T, s *fakexds.Server) discoveryv3.AggregatedDiscoveryServiceClient {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+s.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return discoveryv3.NewAggregatedDiscoveryServiceClient(conn)
}

func table(host string) *api.NameTable {
	return &api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		host: {Ips: []string{"192.0.2.1"}, Registry: "External"},
	}}
}

func body(t *testing.T, m *api.NameTable) *anypb.Any {
	t.Helper()
	a, err := anypb.New(m)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestDelta(t *testing.T) {
	ctx := testContext(t)
	s := fakexds.Start(t, fakexds.Options{})
	stream, err := dial(t, s).DeltaAggregatedResources(ctx)
	if err != nil {
		t.Fatal(err)
	}
	send := func(m *discoveryv3.DeltaDiscoveryRequest) {
		t.Helper()
		m.TypeUrl = fakexds.TypeURL
		if err := stream.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	want := func(m *discoveryv3.DeltaDiscoveryResponse) {
		t.Helper()
		m.TypeUrl = fakexds.TypeURL
		got, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(m, got, protocmp.Transform()); diff != "" {
			t.Fatalf("response (-want +got):\n%s", diff)
		}
	}

	s.Push(table("a.example.com"))
	send(&discoveryv3.DeltaDiscoveryRequest{Node: &corev3.Node{Id: "n"}})
	want(&discoveryv3.DeltaDiscoveryResponse{
		SystemVersionInfo: "v1", Nonce: "nonce-1",
		Resources: []*discoveryv3.Resource{{Resource: body(t, table("a.example.com"))}},
	})
	send(&discoveryv3.DeltaDiscoveryRequest{ResponseNonce: "nonce-1"})
	ack, err := s.WaitAnswer(ctx, "v1")
	if err != nil {
		t.Fatal(err)
	}
	if ack.Rejection() != nil || ack.Stream != 1 {
		t.Fatalf("ACK recorded as %+v", ack)
	}

	// Only changes are sent.
	s.PushNamed(map[string]*api.NameTable{"x": table("x.example.com")}, "")
	want(&discoveryv3.DeltaDiscoveryResponse{
		SystemVersionInfo: "v2", Nonce: "nonce-2",
		Resources:        []*discoveryv3.Resource{{Name: "x", Version: "v2", Resource: body(t, table("x.example.com"))}},
		RemovedResources: []string{""},
	})

	s.CutStreams(nil)
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Fatalf("a cut stream ended with %v", err)
	}
}

func TestSotW(t *testing.T) {
	ctx := testContext(t)
	s := fakexds.Start(t, fakexds.Options{NoDelta: true})
	client := dial(t, s)
	delta, err := client.DeltaAggregatedResources(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := delta.Recv(); status.Code(err) != codes.Unimplemented {
		t.Fatalf("the incremental RPC ended with %v", err)
	}

	stream, err := client.StreamAggregatedResources(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&discoveryv3.DiscoveryRequest{Node: &corev3.Node{Id: "n"}, TypeUrl: fakexds.TypeURL}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.WaitStream(ctx, 1); err != nil {
		t.Fatal(err)
	}
	s.PushNamed(map[string]*api.NameTable{"b": table("b.example.com"), "a": table("a.example.com")})
	got, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	want := &discoveryv3.DiscoveryResponse{
		VersionInfo: "v1", Nonce: "nonce-1", TypeUrl: fakexds.TypeURL,
		Resources: []*anypb.Any{body(t, table("a.example.com")), body(t, table("b.example.com"))},
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Fatalf("response (-want +got):\n%s", diff)
	}
}

func TestRefusals(t *testing.T) {
	ctx := testContext(t)
	s := fakexds.Start(t, fakexds.Options{Token: "old"})
	s.SetToken("secret")
	for _, tc := range []struct {
		name, token string
		want        codes.Code
	}{
		{"wrong token", "old", codes.Unauthenticated},
		{"no node", "secret", codes.InvalidArgument},
	} {
		t.Run(tc.name, func(t *testing.T) {
			out := metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+tc.token)
			stream, err := dial(t, s).DeltaAggregatedResources(out)
			if err != nil {
				t.Fatal(err)
			}
			// A refused stream may end before the request is written.
			_ = stream.Send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: fakexds.TypeURL})
			if _, err := stream.Recv(); status.Code(err) != tc.want {
				t.Fatalf("stream ended with %v, want %v", err, tc.want)
			}
		})
	}
}

func TestRestart(t *testing.T) {
	s := fakexds.Start(t, fakexds.Options{})
	addr := s.Addr()
	if err := s.Restart(); err == nil {
		t.Fatal("a running server was started again")
	}
	s.Stop()
	s.Stop()
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	if s.Addr() != addr {
		t.Fatalf("address is %s after the restart, was %s", s.Addr(), addr)
	}
}
