package nds_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

func TestMain(m *testing.M) {
	wait.Main(m)
}

// The tests run in bubbles of testing/synctest, where pauses and timeouts take no time. The connections are in memory.

// subtest runs a subtest in a bubble of its own.
func subtest(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

// serve starts a control plane in memory.
func serve(t *testing.T, opts fakexds.Options) *fakexds.Server {
	t.Helper()
	opts.InMemory, opts.Addr = true, "127.0.0.1:15010"
	return fakexds.Start(t, opts)
}

// harness is a running client of a fake control plane.
type harness struct {
	t      *testing.T
	ctx    context.Context // bounds waits in a bubble, so that a lost event fails the test
	server *fakexds.Server
	losses atomic.Int64 // calls of lose
	client *nds.Client
	logs   *testlog.Buffer
	table  *fakeTable
	// applied receives the table after each call of the apply function, in order.
	applied chan []byte
	stop    func()
}

// options says how a harness differs from an incremental client, without TLS, of a new
// server, whose apply function accepts everything.
type options struct {
	server *fakexds.Server
	plane  fakexds.Options // of the new server
	config func(*nds.Config)
	// apply is called first; if it returns an error, the shards are not applied.
	apply nds.ApplyFunc
	// many is true if more is applied than the test waits for.
	many bool
}

// start runs a client until the test ends or stop is called.
func start(t *testing.T, o options) *harness {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	t.Cleanup(cancel)
	h := &harness{t: t, ctx: ctx, server: o.server, logs: testlog.New(t), table: &fakeTable{}, applied: make(chan []byte, 100)}
	if h.server == nil {
		h.server = serve(t, o.plane)
	}
	cfg := testConfig(h.server.Addr())
	cfg.Dial, cfg.Clock = h.dial, clock.From(func() time.Duration { return 0 })
	cfg.Logger = slog.New(slog.NewTextHandler(h.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	if o.config != nil {
		o.config(&cfg)
	}
	client, err := nds.New(cfg, func(shards map[int][]byte) error {
		if o.apply != nil {
			if err := o.apply(shards); err != nil {
				return err
			}
		}
		err := h.table.apply(shards)
		if err == nil && !o.many {
			h.applied <- h.table.whole()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	h.client = client
	runContext, end := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- client.Run(runContext) }()
	h.stop = sync.OnceFunc(func() {
		end()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
	t.Cleanup(h.stop)
	return h
}

// dial connects to the server, over a network that may lose everything.
func (h *harness) dial(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := h.server.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	return lossyConn{conn, h, h.losses.Load()}, nil
}

// lose makes the connections so far lose what is sent, in both directions, without an error.
func (h *harness) lose() { h.losses.Add(1) }

type lossyConn struct {
	net.Conn
	of     *harness
	losses int64 // before the connection
}

func (c lossyConn) Read(b []byte) (int, error) {
	for {
		n, err := c.Conn.Read(b)
		if err != nil || c.of.losses.Load() == c.losses {
			return n, err
		}
	}
}

func (c lossyConn) Write(b []byte) (int, error) {
	if c.of.losses.Load() != c.losses {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// testConfig is the configuration of a pod. Its node is as in wantNode.
func testConfig(addr string) nds.Config {
	return nds.Config{
		Addr:      addr,
		Plaintext: true,
		Node: nds.Node{
			PodName:        "web-0",
			Namespace:      "shop",
			IPs:            []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("::ffff:192.0.2.2"), netip.MustParseAddr("fd00::2")},
			ServiceAccount: "default",
			Labels:         map[string]string{"app": "web"},
			Version:        "v0.1.0",
		},
	}
}

// wantNode checks the node that the control plane has received in the incremental variant, in which the client can read istiod's
// form of a resource for each host. istiod requires strings in place of booleans.
func (h *harness) wantNode() {
	h.t.Helper()
	metadata, err := structpb.NewStruct(map[string]any{
		"NAME": "web-0", "NAMESPACE": "shop", "SERVICE_ACCOUNT": "default",
		"INSTANCE_IPS": "10.0.0.1,192.0.2.2,fd00::2", "CLUSTER_ID": "Kubernetes",
		"DNS_CAPTURE": "false", "DNS_AUTO_ALLOCATE": "false",
		"LABELS": map[string]any{"app": "web"}, "DELTA_NDS": "true", "ISTIO_VERSION": "1.32.0",
	})
	if err != nil {
		h.t.Fatal(err)
	}
	want := &corev3.Node{
		Id:                   "sidecar~10.0.0.1~web-0.shop~shop.svc.cluster.local",
		Metadata:             metadata,
		UserAgentName:        "nametap",
		ClientFeatures:       []string{"nametap.named-tables"},
		UserAgentVersionType: &corev3.Node_UserAgentVersion{UserAgentVersion: "v0.1.0"},
	}
	if diff := cmp.Diff(want, h.server.Requests()[0].Node(), protocmp.Transform()); diff != "" {
		h.t.Errorf("node (-want +got):\n%s", diff)
	}
}

// sotw makes a control plane without the incremental variant, so that the client falls back.
func sotw() fakexds.Options { return fakexds.Options{NoDelta: true} }

// bothVariants runs a test with a control plane that has both variants, and with one that has only
// state-of-the-world.
func bothVariants(t *testing.T, f func(*testing.T, fakexds.Options)) {
	t.Helper()
	t.Parallel()
	for name, plane := range map[string]fakexds.Options{"incremental": {}, "sotw": sotw()} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { f(t, plane) }) })
	}
}

// wantApplied waits for the next table in use and compares it, without regard to the order of entries.
func (h *harness) wantApplied(want []byte) {
	h.t.Helper()
	select {
	case got := <-h.applied:
		h.wantEntries(got, want)
	case <-h.ctx.Done():
		h.t.Fatal("no table was applied")
	}
}

// wantEntries compares two tables, without regard to the order of entries.
func (h *harness) wantEntries(got, want []byte) {
	h.t.Helper()
	if diff := cmp.Diff(entriesIn(h.t, want), entriesIn(h.t, got)); diff != "" {
		h.t.Fatalf("table in use (-want +got):\n%s", diff)
	}
}

// entriesIn returns the entries of a table, sorted.
func entriesIn(t *testing.T, table []byte) (entries []string) {
	t.Helper()
	for len(table) > 0 {
		_, _, n := protowire.ConsumeField(table)
		if n < 0 {
			t.Fatalf("%q is no table", table)
		}
		entries, table = append(entries, string(table[:n])), table[n:]
	}
	slices.Sort(entries)
	return entries
}

// wantNothingApplied checks that nothing more was applied. Call it after an answer has
// arrived, because a table is applied before the answer is sent.
func (h *harness) wantNothingApplied() {
	h.t.Helper()
	select {
	case got := <-h.applied:
		h.t.Fatalf("applied again: %d bytes", len(got))
	default:
	}
}

// wantAnswer waits for the answer to the push with version.
func (h *harness) wantAnswer(version string) fakexds.Request {
	h.t.Helper()
	r, err := h.server.WaitAnswer(h.ctx, version)
	if err != nil {
		h.t.Fatal(err)
	}
	return r
}

// wantACK waits for the answer to the push with version and checks that it is an ACK.
func (h *harness) wantACK(version string) {
	h.t.Helper()
	if r := h.wantAnswer(version); r.Rejection() != nil {
		h.t.Fatalf("push %s rejected: %s", version, r.Rejection().GetMessage())
	}
}

// wantStatus waits until the result of Status is as wanted. The status changes after the
// table that it describes is applied.
func (h *harness) wantStatus(check func(nds.Status) bool) {
	h.t.Helper()
	defer func() {
		if h.t.Failed() {
			h.t.Logf("status is %+v", h.client.Status())
		}
	}()
	wait.Until(h.t, "the status is as wanted", func() bool { return check(h.client.Status()) })
}

// hosts returns a table with these hosts.
func hosts(names ...string) *api.NameTable {
	table := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{}}
	for _, name := range names {
		table.Table[name] = &api.NameTable_NameInfo{Ips: []string{"192.0.2.1"}, Registry: "External"}
	}
	return table
}

// plain returns a table in wire form, as the fake control plane sends it.
func plain(t *testing.T, table *api.NameTable) []byte {
	t.Helper()
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(table)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

// wantLog waits until a line of the log contains all parts.
func (h *harness) wantLog(parts ...string) {
	h.t.Helper()
	h.wantLogs(1, parts...)
}

// wantLogs waits until a number of lines of the log contain all parts.
func (h *harness) wantLogs(want int, parts ...string) {
	h.t.Helper()
	what := fmt.Sprintf("%d lines of the log with %q", want, parts)
	wait.Until(h.t, what, func() bool { return h.logs.Count(parts...) >= want })
}
