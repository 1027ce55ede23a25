package discovery

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// D62: the streams of a connection count like connections, so that an address has few in a minute. The log and the client
// get the reason.
func TestStreamsOfOneAddress(t *testing.T) {
	const most = 3
	log := testlog.New(t)
	r := start(t, Config{ConfigDir: t.TempDir(), AllowEmpty: true, MaxClientsPerAddress: most, Logger: log.Logger()})
	client, served := r.dial(t), -1
	var refused error
	for ; refused == nil; served++ {
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := client.StreamAggregatedResources(ctx)
		if err != nil {
			t.Fatal(err)
		}
		_ = stream.Send(&discoveryv3.DiscoveryRequest{Node: node(t, "shop"), TypeUrl: typeURL}) // Recv has the reason of an error
		_, refused = stream.Recv()
		cancel()
	}
	const reason = "--max-clients-per-address"
	if served != most || status.Code(refused) != codes.ResourceExhausted || !strings.Contains(refused.Error(), reason) {
		t.Errorf("%d streams are served, want %d, and then %v", served, most, refused)
	}
	if log.Count("a client is refused", "client=127.0.0.1:", reason) != 1 || r.metric(t, "streams_ended_total", "too_many") != 1 {
		t.Errorf("the log does not say %q once: %s", reason, log)
	}
}

// D61: a message that is not sent in full is held within the budget of its address, whatever its length, and what a client
// says goes to the log in part only.
func TestLongMessages(t *testing.T) {
	dir, log := t.TempDir(), testlog.New(t)
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	r := start(t, Config{ConfigDir: dir, Logger: log.Logger()})
	long := strings.Repeat("long ", 12<<10)
	t.Run("refused", func(t *testing.T) {
		refused := openSotw(t, r, node(t, "shop", "OTHER", strings.Repeat(long, 2))).err()
		if status.Code(refused) != codes.ResourceExhausted || !strings.Contains(refused.Error(), "65536") {
			t.Errorf("got %v, want ResourceExhausted", refused)
		}
	})
	wait.Until(t, "nothing is held after the end of its connection", func() bool { return r.ads.conns.Held() == 0 })
	names, envoy := make([]string, 5000), node(t, "shop") // of an Envoy in a large mesh
	for i := range names {
		names[i] = "outbound|80||a-service-with-a-long-name.a-namespace-with-a-long-name.svc.cluster.local"
	}
	for range 800 {
		envoy.Extensions = append(envoy.Extensions, &corev3.Extension{Name: "envoy.filters.http.extension", TypeUrls: []string{"envoy.extensions.filters.http.extension.v3.Extension"}})
	}
	stream, err := r.dial(t).StreamAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, request := range []*discoveryv3.DiscoveryRequest{
		{Node: envoy, TypeUrl: "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment", ResourceNames: names},
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
	if held := r.ads.conns.Held(); held != 0 {
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

// TestClientThatAsksAndDoesNotRead checks that clients that ask for their table again and again, or acknowledge
// pushes that they have not read, and never read one, do not delay others.
func TestClientThatAsksAndDoesNotRead(t *testing.T) { // D33
	const slow = 8
	names := make([]string, 4000) // more than the buffers of a connection hold
	for i := range names {
		names[i] = fmt.Sprintf("host-%d.of-a-zone-with-a-long-name.example.com", i)
	}
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, entryDefinition)
	a.Put(fakekube.ServiceEntries, entryYAML("all", "shop", "hosts: ["+strings.Join(names, ", ")+"]", "addresses: [192.0.2.1, 192.0.2.2]"))
	r := start(t, onAPI(t, a))
	good := openNaming(t, r, nil)
	good.take()
	for range slow {
		str, err := r.dial(t).StreamAggregatedResources(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for i := range 10 {
			request := &discoveryv3.DiscoveryRequest{Node: node(t, "shop"), TypeUrl: typeURL}
			if i%2 == 1 {
				request.ResponseNonce = strconv.Itoa(i/2 + 1)
			}
			if err := str.Send(request); err != nil {
				t.Fatal(err)
			}
		}
	}
	wait.Until(t, "the clients are pushed to", func() bool {
		return r.metric(t, "pushes_total", variantSotw) >= slow
	})
	for i := range 3 {
		a.Put(fakekube.Services, svcYAML("shop", "web", fmt.Sprint("10.0.0.", i+1)))
		good.want("web", "")
	}
}

// Clients may ping every 10 s, as Istio's agent can be configured to, and the client of
// an old connection is asked to connect again.
func TestConnectionAge(t *testing.T) {
	r := start(t, Config{ConfigDir: t.TempDir(), AllowEmpty: true, MaxConnectionAge: 100 * time.Millisecond})
	var dials atomic.Int64
	conn, err := grpc.NewClient(r.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			dials.Add(1)
			return new(net.Dialer).DialContext(ctx, "tcp", address)
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: time.Hour, PermitWithoutStream: true}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	wait.Until(t, "the client connects again", func() bool {
		conn.Connect() // unless it is connected
		return dials.Load() > 1
	})
}

// arrivals are the connections that arrive at a listener.
type arrivals struct {
	net.Listener
	conns []*arrival
}

func (l *arrivals) Accept() (net.Conn, error) {
	if len(l.conns) == 0 {
		return nil, net.ErrClosed
	}
	conn := l.conns[0]
	l.conns = l.conns[1:]
	return conn, nil
}

// An arrival is a connection of a client at an address.
type arrival struct {
	net.Conn
	address string
	closed  bool
}

func (c *arrival) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(c.address), Port: 1} }

func (c *arrival) Close() error {
	c.closed = true
	return nil
}

// D33, D62: connections are bounded, of one address, too, and when there is no memory.
func TestConnectionsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tooMany, full := 0, false
		from := &arrivals{}
		l := &boundedListener{
			Listener: from, limit: connlimit.New("discovery", 3, 0), addresses: &perAddress{most: 2, taken: map[netip.Addr]int{}}, tooMany: func() { tooMany++ }, full: func(*connlimit.Place) bool { return full },
		}
		var open []net.Conn
		want := func(accepted, refused int, addresses ...string) {
			t.Helper()
			before := len(open)
			var all []*arrival
			for _, address := range addresses {
				all = append(all, &arrival{address: address})
			}
			from.conns = slices.Clone(all)
			for {
				conn, err := l.Accept()
				if err != nil {
					break
				}
				open = append(open, conn)
			}
			closed := 0
			for _, c := range all {
				if c.closed {
					closed++
				}
			}
			if n := len(open) - before; n != accepted || closed != len(all)-accepted || tooMany != refused {
				t.Errorf("%d of %v are accepted, %d closed, %d counted; want %d and %d", n, addresses, closed, tooMany, accepted, refused)
			}
		}
		want(2, 1, "192.0.2.1", "192.0.2.1", "192.0.2.1")
		_ = open[0].Close()
		_ = open[0].Close() // counts once
		want(0, 2, "192.0.2.1")
		full = true
		want(0, 2, "192.0.2.5")
		full = false
		time.Sleep(time.Hour)                             //nolint:forbidigo // of the bubble's clock
		want(3, 2, "192.0.2.1", "192.0.2.2", "192.0.2.3") // the first one makes room
		if !open[1].(*boundedConn).Conn.(*arrival).closed {
			t.Error("the connection that was awaited longest is open")
		}
		for _, conn := range open {
			_ = conn.Close()
		}
		time.Sleep(time.Hour) //nolint:forbidigo // of the bubble's clock
		synctest.Wait()
		if n := len(l.addresses.taken); n != 0 {
			t.Errorf("%d addresses are known that have no connection", n)
		}
	})
}

// D33: while nearly all memory is in use, streams are refused with the setting in the reason.
func TestMemoryLimit(t *testing.T) {
	log, refused := testlog.New(t), 0
	small := newMemoryLimit(100<<10, func() { refused++ }, log.Logger())
	for range 2 {
		err := small.check(streamShare, nil)
		const want = "raise its memory limit (GOMEMLIMIT, or resources.limits.memory of its container)"
		if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v", err)
		}
	}
	if refused != 2 || log.Count("level=ERROR", "clients are refused", "GOMEMLIMIT") != 1 {
		t.Errorf("%d are counted, and the log is %s", refused, log)
	}
	for _, bytes := range []int64{0, 1 << 50} {
		if err := newMemoryLimit(bytes, func() {}, log.Logger()).check(streamShare, nil); err != nil {
			t.Errorf("with %d bytes: %v", bytes, err)
		}
	}
}
