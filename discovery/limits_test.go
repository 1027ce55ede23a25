package discovery

import (
	"net"
	"strings"
	"testing"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
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

// D62: clients in plaintext, of one namespace, or at one address leave places to others. The log
// says which one was refused, and why.
func TestPlaces(t *testing.T) {
	t.Parallel()
	s := startSecuredWith(t, func(_ *fakekube.API, cfg *Config) {
		cfg.GRPCAddr, cfg.MaxClients, cfg.MaxClientsPerAddress = "127.0.0.1:0", 4, 7
	})
	s.good()
	s.api.SetToken("data", fakekube.Token{User: "system:serviceaccount:data:db", Audiences: []string{"istio-ca"}})
	want := func(r running, namespace, refusal string) {
		t.Helper()
		c := openSotw(t, r, node(t, namespace))
		if refusal == "" {
			c.next()
			return
		}
		err := c.err()
		if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), refusal) {
			t.Errorf("got %v, want ResourceExhausted with %q", err, refusal)
		}
		if s.log.Count("a client is refused", "client=127.0.0.1:", refusal) == 0 {
			t.Errorf("the log does not say %q: %s", refusal, s.log)
		}
	}
	shop, data := s.as(t, s.authority, &bearer{token: "good"}, nil), s.as(t, s.authority, &bearer{token: "data"}, nil)
	want(s.running, "shop", "")
	want(s.running, "shop", "")
	want(s.running, "shop", "in plaintext")
	want(shop, "shop", "")
	want(data, "data", "")
	want(data, "data", "--max-clients")
	want(shop, "shop", "--max-clients")
	// The seventh client was the last one that 127.0.0.1 had in this minute, and its connections were as many.
	if err := openSotw(t, shop, node(t, "shop")).err(); err == nil {
		t.Error("another client is served")
	}
	if n := s.metric(t, "streams_ended_total", "too_many"); n < 4 {
		t.Errorf("%v refused clients counted, want 4 or more", n)
	}
}

// D61: a message that is not sent in full is held within the budget of its address, whatever its length, and what a client
// says goes to the log in part only.
func TestLongMessages(t *testing.T) {
	t.Parallel()
	dir, log := t.TempDir(), testlog.New(t)
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	r := start(t, Config{ConfigDir: dir, Logger: log.Logger()})
	long := strings.Repeat("long ", 12<<10)
	refused := openSotw(t, r, node(t, "shop", "OTHER", strings.Repeat(long, 2))).err()
	if status.Code(refused) != codes.InvalidArgument || !strings.Contains(refused.Error(), "want at most 65536") {
		t.Errorf("got %v, want InvalidArgument", refused)
	}
	names := make([]string, 10_000)
	for i := range names {
		names[i] = "outbound|80||a.example.com"
	}
	stream, err := r.dial(t).StreamAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, request := range []*discoveryv3.DiscoveryRequest{
		{Node: node(t, "shop"), TypeUrl: "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment", ResourceNames: names},
		{TypeUrl: typeURL},
	} {
		if err := stream.Send(request); err != nil {
			t.Fatal(err)
		}
	}
	got, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if held := r.ads.unread.Held(); held != 0 {
		t.Errorf("%d bytes of messages that were read are held", held)
	}
	rejection := &rpcstatus.Status{Message: long}
	if err := stream.Send(&discoveryv3.DiscoveryRequest{TypeUrl: typeURL, ResponseNonce: got.GetNonce(), ErrorDetail: rejection}); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the NACK is logged", func() bool { return log.Count("a client rejected a push", "long long") == 1 })
	if n := len(log.String()); n > 2000 {
		t.Errorf("%d bytes of log", n)
	}
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
	r := start(t, Config{ConfigDir: dir, MaxClients: 1, MaxClientsPerAddress: 2 * spareConns})
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
