package nds_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/net/http2"
	"google.golang.org/grpc/test/bufconn"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

// C5: a stream that ends is opened again, with the node and with new protocol state. The
// same table is ACKed and not applied again.
func TestCutStream(t *testing.T) {
	t.Parallel()
	h := start(t, options{apply: func(shards map[int][]byte) error {
		if strings.Contains(string(flat(shards)), "bad") {
			return errors.New("bad")
		}
		return nil
	}, plane: sotw()})
	h.server.Push(hosts("a.example.com"))
	h.wantACK("v1")
	h.wantApplied(plain(t, hosts("a.example.com")))
	h.server.CutStreams(nil)
	h.wantLog("level=INFO", "no stream to the control plane", "max_age", "retry_in")
	if _, err := h.server.Wait(h.ctx, func(r fakexds.Request) bool { return r.Stream == 2 && r.Nonce() != "" }); err != nil {
		t.Fatal(err)
	}
	h.wantNothingApplied()

	// The version in a NACK is the previous one of the same stream.
	h.server.CutStreams(nil)
	if _, err := h.server.WaitStream(h.ctx, 3); err != nil {
		t.Fatal(err)
	}
	h.server.Push(hosts("bad.example.com"))
	h.wantAnswer("v2")
	h.wantSotW(
		&discoveryv3.DiscoveryRequest{Node: testNode(t)},
		&discoveryv3.DiscoveryRequest{VersionInfo: "v1", ResponseNonce: "nonce-1"},
		&discoveryv3.DiscoveryRequest{Node: testNode(t)},
		&discoveryv3.DiscoveryRequest{VersionInfo: "v1", ResponseNonce: "nonce-2"},
		&discoveryv3.DiscoveryRequest{Node: testNode(t)},
		&discoveryv3.DiscoveryRequest{VersionInfo: "v1", ResponseNonce: "nonce-3"},
		&discoveryv3.DiscoveryRequest{VersionInfo: "v1", ResponseNonce: "nonce-4", ErrorDetail: refused("bad")},
	)
	h.wantStatus(func(s nds.Status) bool { return s.Reconnects == 2 })
}

// C5: the table stays in use while the control plane is away, and Status has its age.
func TestControlPlaneAway(t *testing.T) {
	t.Parallel()
	h := start(t, options{})
	h.server.Push(hosts("a.example.com"))
	h.wantACK("v1")
	h.wantApplied(plain(t, hosts("a.example.com")))
	h.server.Stop()
	h.wantLog("level=WARN", "no stream to the control plane", "connection refused")
	h.wantStatus(func(s nds.Status) bool {
		return !s.Connected && s.Loaded && !s.Stale && s.Version == "v1" && s.TableAge > 0 &&
			strings.Contains(s.LastError, "connection refused")
	})
	h.wantNothingApplied()

	h.server.Push(hosts("b.example.com"))
	if err := h.server.Restart(); err != nil {
		t.Fatal(err)
	}
	h.wantApplied(plain(t, hosts("b.example.com")))
	h.wantACK("v2")
	h.wantStatus(func(s nds.Status) bool { return s.Connected && s.Reconnects > 0 && s.LastError == "" })
}

// C5: attempts that fail for the same reason are logged once, and once more, with the
// count, when the control plane is back.
func TestFailureIsLoggedOnce(t *testing.T) {
	t.Parallel()
	server := fakexds.Start(t, fakexds.Options{})
	server.Push(hosts("a.example.com"))
	server.Stop()
	h := start(t, options{server: server})
	h.wantLog("no stream to the control plane", "connection refused", "(--xds-addr)")
	wait.Until(t, "it reconnects four times", func() bool { return h.client.Status().Reconnects >= 4 })
	if n := h.logs.Count("level=WARN"); n != 1 {
		t.Errorf("%d warnings", n)
	}
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	h.wantApplied(plain(t, hosts("a.example.com")))
	h.wantLog("level=INFO", "the stream to the control plane is back", "repeated=")
}

// C5: Run returns while it is connected, and before its first attempt.
func TestRunEnds(t *testing.T) {
	t.Parallel()
	connected := start(t, options{})
	connected.server.Push(hosts("a.example.com"))
	connected.wantACK("v1")
	connected.stop()
	connected.wantStatus(func(s nds.Status) bool { return !s.Connected && s.Loaded })

	client, err := nds.New(testConfig("127.0.0.1:1"), func(map[int][]byte) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := client.Run(ctx); err != nil {
		t.Fatal(err)
	}
}

// C10: the client backs off from a control plane that pushes and then ends the stream.
func TestBackOffFromPushAndEnd(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			server, connect := inMemory(t, fakexds.Options{NoDelta: plane.NoDelta, EndAfterAnswer: true})
			server.Push(hosts("a.example.com"))
			h := start(t, options{server: server, config: func(cfg *nds.Config) { cfg.Dial = connect.dial }})
			h.wantACK("v1")
			// Pauses of 50 ms on average, as after a first failure, would allow 80 streams in
			// this time; pauses that double allow 7.
			const many = 25
			ctx, cancel := context.WithTimeout(h.ctx, 4*time.Second)
			defer cancel()
			if _, err := server.WaitStream(ctx, many); err == nil {
				t.Fatalf("%d streams within 4 s", many)
			}
			if _, err := server.WaitStream(h.ctx, 3); err != nil {
				t.Fatal(err)
			}
			h.wantStatus(func(s nds.Status) bool { return s.Loaded && s.Version == "v1" })
		})
	})
}

// C5: a peer that vanished without closing the connection is noticed.
func TestKeepalive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server, connect := inMemory(t, fakexds.Options{})
		h := start(t, options{server: server, config: func(cfg *nds.Config) { cfg.Dial = connect.dial }})
		server.Push(hosts("a.example.com"))
		h.wantACK("v1")
		began := time.Now()
		connect.lost.Store(true)
		h.wantLog("no stream to the control plane", "keepalive")
		if took := time.Since(began); took < 10*time.Second || took > 31*time.Second {
			t.Fatalf("it took %v", took)
		}
		h.wantStatus(func(s nds.Status) bool { return !s.Connected && s.Loaded })
	})
}

// connections are made in memory, so that a test runs in a bubble of testing/synctest, where time
// passes at once.
type connections struct {
	listener *bufconn.Listener
	lost     atomic.Bool // whether they lose what is sent, in both directions, without an error
}

// inMemory starts a server with connections in memory.
func inMemory(t *testing.T, opts fakexds.Options) (*fakexds.Server, *connections) {
	t.Helper()
	c := &connections{listener: bufconn.Listen(64 << 10)}
	opts.Listener, opts.Addr = c.listener, "istiod.test:15010"
	return fakexds.Start(t, opts), c
}

// dial is for [nds.Config].
func (c *connections) dial(ctx context.Context, _ string) (net.Conn, error) {
	conn, err := c.listener.DialContext(ctx)
	return lossyConn{conn, c}, err
}

// A lossyConn is a connection over a network that may lose everything.
type lossyConn struct {
	net.Conn
	of *connections
}

func (c lossyConn) Read(b []byte) (int, error) {
	for {
		n, err := c.Conn.Read(b)
		if err != nil || !c.of.lost.Load() {
			return n, err
		}
	}
}

func (c lossyConn) Write(b []byte) (int, error) {
	if c.of.lost.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// C5: after "too_many_pings" the client pings less often on later connections.
func TestTooManyPings(t *testing.T) {
	t.Parallel()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer lis.Close()
	h := start(t, options{server: fakexds.Start(t, fakexds.Options{}), config: func(cfg *nds.Config) { cfg.Addr = lis.Addr().String() }})
	for range 2 {
		conn, err := lis.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if err := complain(conn); err != nil {
			t.Fatal(err)
		}
	}
	h.wantLog("level=WARN", "too many pings", "every=40s")
	h.wantLog("level=WARN", "too many pings", "every=1m20s")
}

// complain answers the first stream of a connection as gRPC servers answer clients that
// ping too often.
func complain(conn net.Conn) error {
	defer conn.Close()
	if _, err := io.CopyN(io.Discard, conn, int64(len(http2.ClientPreface))); err != nil {
		return err
	}
	framer := http2.NewFramer(conn, conn)
	if err := framer.WriteSettings(); err != nil {
		return err
	}
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			return err
		}
		if frame.Header().Type == http2.FrameHeaders {
			break
		}
	}
	if err := framer.WriteGoAway(1, http2.ErrCodeEnhanceYourCalm, []byte("too_many_pings")); err != nil {
		return err
	}
	// Wait until the client has read it, because closing would discard it.
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, conn)
	return err
}

// blackHole is a TCP proxy that stops forwarding over the connections so far, in both directions, without
// closing anything.
type blackHole struct {
	addr   string
	mu     sync.Mutex
	losses int // calls of lose
}

func newBlackHole(t *testing.T, target string) *blackHole {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hole := &blackHole{addr: lis.Addr().String()}
	var conns sync.WaitGroup
	t.Cleanup(func() {
		_ = lis.Close()
		conns.Wait()
	})
	conns.Go(func() {
		for {
			near, err := lis.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", target)
			if err != nil {
				_ = near.Close()
				continue
			}
			losses := hole.lost()
			conns.Go(func() { hole.forward(far, near, losses) })
			conns.Go(func() { hole.forward(near, far, losses) })
		}
	})
	return hole
}

// forward copies until src ends, and drops what arrives after lose. losses is the number of calls of it
// before the connection.
func (b *blackHole) forward(dst io.WriteCloser, src io.Reader, losses int) {
	defer func() { _ = dst.Close() }()
	buf := make([]byte, 16<<10)
	for {
		n, err := src.Read(buf)
		if err != nil {
			return
		}
		if b.lost() != losses {
			continue
		}
		if _, err := dst.Write(buf[:n]); err != nil {
			return
		}
	}
}

// lose drops everything that arrives over the connections so far; new ones work.
func (b *blackHole) lose() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.losses++
}

func (b *blackHole) lost() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.losses
}

// C5: the metrics during the life of a stream.
func TestMetrics(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	h := start(t, options{
		config: func(cfg *nds.Config) { cfg.Registerer = registry },
		apply: func(shards map[int][]byte) error {
			if len(flat(shards)) == 0 {
				return errors.New("empty")
			}
			return nil
		},
	})
	values := []string{
		"nametap_xds_connected", "nametap_xds_pushes_total", "nametap_xds_reconnects_total", "nametap_xds_table_stale",
	}
	want := func(text string) {
		t.Helper()
		if err := testutil.GatherAndCompare(registry, strings.NewReader(text), values...); err != nil {
			t.Fatal(err)
		}
	}
	h.server.Push(hosts("a.example.com"))
	h.wantACK("v1")
	h.server.Push(hosts("a.example.com"))
	h.wantACK("v2")
	h.server.PushBytes(nil)
	h.wantAnswer("v3")
	want(`
# HELP nametap_xds_connected 1 while a stream to the control plane is open and has received a response.
# TYPE nametap_xds_connected gauge
nametap_xds_connected 1
# HELP nametap_xds_pushes_total Responses from the control plane, by result: applied, unchanged or rejected.
# TYPE nametap_xds_pushes_total counter
nametap_xds_pushes_total{result="applied"} 1
nametap_xds_pushes_total{result="rejected"} 1
nametap_xds_pushes_total{result="unchanged"} 1
# HELP nametap_xds_reconnects_total Connection attempts to the control plane after the first.
# TYPE nametap_xds_reconnects_total counter
nametap_xds_reconnects_total 0
# HELP nametap_xds_table_stale 1 while the table in use is from the snapshot and no push has confirmed it.
# TYPE nametap_xds_table_stale gauge
nametap_xds_table_stale 0
`)
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) != 0 {
		t.Fatal(problems, err)
	}
	if n, err := testutil.GatherAndCount(registry); err != nil || n != 11 {
		t.Fatalf("%d series, %v", n, err)
	}
}
