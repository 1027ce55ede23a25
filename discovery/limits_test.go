package discovery

import (
	"net"
	"strings"
	"testing"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// A stream beyond MaxClients is refused with a reason. When a client disconnects, another
// one can connect.
func TestClientsAreBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	r := start(t, Config{ConfigDir: dir, MaxClients: 2})
	first := openSotw(t, r, node(t, "shop"))
	first.next()
	str, err := r.dial(t).DeltaAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "two clients", func() bool { return r.metric(t, "clients", variantSotw)+r.metric(t, "clients", variantDelta) == 2 })
	for _, variant := range []string{variantSotw, variantDelta} {
		err := open(t, variant, r, node(t, "shop")).err()
		if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "--max-clients") {
			t.Errorf("%s: got %v, want ResourceExhausted", variant, err)
		}
	}
	if n := r.metric(t, "streams_ended_total", "too_many"); n != 2 {
		t.Errorf("%v refused streams counted, want 2", n)
	}
	if err := str.CloseSend(); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "one client", func() bool { return r.metric(t, "clients", variantSotw)+r.metric(t, "clients", variantDelta) == 1 })
	openSotw(t, r, node(t, "shop")).next()
	first.quiet()
}

// D33: a client that does not read does not delay others, and its stream is ended. A
// client that is idle after its ACK stays.
func TestSlowClient(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	r := start(t, Config{ConfigDir: dir, AckTimeout: 3 * time.Second})
	slow, err := r.dial(t).StreamAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := slow.Send(&discoveryv3.DiscoveryRequest{Node: node(t, "shop"), TypeUrl: typeURL}); err != nil {
		t.Fatal(err)
	}
	good := openDelta(t, r, node(t, "shop"), nil)
	good.next()
	wait.Until(t, "the slow client's stream is ended", func() bool {
		return r.metric(t, "streams_ended_total", "slow") == 1
	})
	wait.Until(t, "only the good client is left", func() bool { return r.metric(t, "clients", variantSotw)+r.metric(t, "clients", variantDelta) == 1 })
	for err = nil; err == nil; {
		_, err = slow.Recv()
	}
	if status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("got %v, want DeadlineExceeded", err)
	}
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.2"))
	good.next()
}

// D33: only the ACK or NACK of a push counts as its acknowledgement, not another request.
func TestOtherRequestsAreNoAcknowledgement(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	r := start(t, Config{ConfigDir: dir, AckTimeout: time.Second})
	stream, err := r.dial(t).StreamAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&discoveryv3.DiscoveryRequest{Node: node(t, "shop"), TypeUrl: typeURL}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&discoveryv3.DiscoveryRequest{TypeUrl: "type.googleapis.com/envoy.config.cluster.v3.Cluster"}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := stream.Recv()
		ended <- err
	}()
	if err := wait.For(t, "the stream ends", ended); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("got %v, want DeadlineExceeded", err)
	}
}

// Clients may ping every 10 s, as Istio's agent can be configured to, and the client of
// an old connection is asked to connect again.
func TestConnectionAge(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	r := start(t, Config{ConfigDir: dir, MaxConnectionAge: 300 * time.Millisecond})
	conn, err := grpc.NewClient(r.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	conn.Connect()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		conn.WaitForStateChange(t.Context(), state)
	}
	if !conn.WaitForStateChange(t.Context(), connectivity.Ready) {
		t.Error("the client was not asked to connect again")
	}
}

// Connections without a stream are bounded, too. When one ends, another one is accepted. Not parallel: the
// server gives up connections on which nothing is sent.
func TestConnectionsAreBounded(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	r := start(t, Config{ConfigDir: dir, MaxClients: 1})
	var held []net.Conn
	defer func() {
		for _, conn := range held {
			_ = conn.Close()
		}
	}()
	for range 1 + spareConns + 10 {
		conn, err := net.Dial("tcp", r.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
	}
	wait.Until(t, "those beyond the bound are closed", func() bool {
		return r.metric(t, "streams_ended_total", "too_many") == 10
	})
	for _, conn := range held[:10] {
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// The server may not notice at once that they are closed.
	str, err := r.dial(t).StreamAggregatedResources(t.Context(), grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	if err := str.Send(&discoveryv3.DiscoveryRequest{Node: node(t, "shop"), TypeUrl: typeURL}); err != nil {
		t.Fatal(err)
	}
	if _, err := str.Recv(); err != nil {
		t.Error(err)
	}
}
