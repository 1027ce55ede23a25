package discovery

import (
	"context"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/examples"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

// An agentTable is a table of an agent, which receives changes of hosts.
type agentTable struct {
	current atomic.Pointer[table.Table]
	built   atomic.Int64 // shards
}

func newAgentTable(t *testing.T) *agentTable {
	t.Helper()
	cluster, err := table.NewCluster("shop", "cluster.local")
	if err != nil {
		t.Fatal(err)
	}
	a := &agentTable{}
	a.current.Store(table.Empty(cluster))
	return a
}

func (a *agentTable) apply(shards map[int][]byte) error {
	next, err := a.current.Load().With(shards)
	if err == nil {
		a.built.Add(int64(len(shards)))
		a.current.Store(next)
	}
	return err
}

// await waits until the table has these hosts.
func (a *agentTable) await(t *testing.T, hosts *api.NameTable) {
	t.Helper()
	shards, err := digest.Split([]byte(bytesOf(t, hosts)))
	if err != nil {
		t.Fatal(err)
	}
	want, err := table.New("shop", "cluster.local", shards)
	if err != nil {
		t.Fatal(err)
	}
	var diff string
	defer func() {
		if t.Failed() {
			t.Log(diff)
		}
	}()
	wait.Until(t, "the agent has the table", func() bool {
		diff = cmp.Diff(want.NameTable(), a.current.Load().NameTable(), protocmp.Transform())
		return diff == ""
	})
}

// C11, D30, D37: the client in nds receives changes of hosts. After each one it has the table
// that the table command prints. After a restart, of either side, it is sent only what differs.
func TestAgentReceivesChanges(t *testing.T) {
	t.Parallel()
	dir, state := unpack(t, examples.Files), t.TempDir()
	r := start(t, Config{ConfigDir: dir})
	begin := func() (*nds.Client, *agentTable, func()) {
		a := newAgentTable(t)
		client, err := nds.New(nds.Config{
			Addr: r.Addr().String(), Plaintext: true, StateDir: state,
			Node: nds.Node{PodName: "web-0", Namespace: "shop", IPs: []netip.Addr{
				netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}},
		}, a.apply)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- client.Run(ctx) }()
		return client, a, func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("client: %v", err)
			}
		}
	}
	client, a, stop := begin()
	defer func() { stop() }()
	check := func() {
		t.Helper()
		want, _, err := Table(t.Context(), Config{ConfigDir: dir}, Client{Namespace: "shop"})
		if err != nil {
			t.Fatal(err)
		}
		a.await(t, want)
		wait.Until(t, "the status shows it", func() bool {
			s := client.Status()
			return s.Connected && !s.Stale && s.Mode == nds.ModeHosts
		})
	}
	check()
	first := client.Status().Digest
	for i := range 20 {
		built := a.built.Load()
		write(t, dir, "more.yaml", svcYAML("new", "web", fmt.Sprintf("10.0.0.%d", i)))
		check()
		if n := a.built.Load() - built; n != 1 {
			t.Errorf("change %d built %d shards", i, n)
		}
	}
	stop()
	write(t, dir, "more.yaml", svcYAML("shop", "web", "10.0.0.9"))
	client, a, stop = begin()
	check()
	if s := client.Status(); s.Digest == first || s.ChecksumDifferences != 0 || s.Rejected != 0 {
		t.Errorf("status %+v", s)
	}
	if _, err := hex.DecodeString(client.Status().Digest); err != nil {
		t.Error(err)
	}
}

// runAgent runs an agent with a table in plaintext until the end of the test.
func runAgent(t *testing.T, cfg nds.Config, table *agentTable) *nds.Client {
	t.Helper()
	cfg.Plaintext = true
	client, err := nds.New(cfg, table.apply)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("client: %v", err)
		}
	})
	return client
}

// D28: an agent of a cluster whose API server is down keeps its table, says why, and tries again until it is
// back.
func TestAgentOfClusterThatIsDown(t *testing.T) {
	t.Parallel()
	f := newFleet(t, "east")
	east := f.others["east"]
	f.own.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	east.Put(fakekube.Services, svcYAML("shop", "far", "10.1.0.1"))
	f.cfg.ClusterTimeout = time.Second
	r := start(t, f.cfg)
	f.cfg.GRPCAddr = r.Addr().String()
	table := newAgentTable(t)
	client := runAgent(t, nds.Config{Addr: f.cfg.GRPCAddr, Node: nds.Node{
		PodName: "web-0", Namespace: "shop", ClusterID: "east", IPs: []netip.Addr{netip.MustParseAddr("10.1.0.9")},
	}}, table)
	wait.Until(t, "the agent has a table", func() bool { return client.Status().Digest != "" })
	before := client.Status()
	east.Leave()
	r.stop()
	f.own.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.2"))
	start(t, f.cfg)
	wait.Until(t, "the agent says why it has no stream", func() bool { return strings.Contains(client.Status().LastError, "cluster east: ") })
	if s := client.Status(); s.Connected || s.Digest != before.Digest || s.Pushes != before.Pushes || table.current.Load().Len() != 2 {
		t.Errorf("%d hosts, and the status is %+v", table.current.Load().Len(), s)
	}
	east.Return()
	wait.Until(t, "the agent has the current table", func() bool { return client.Status().Digest != before.Digest })
	if s := client.Status(); !s.Connected || s.LastError != "" || s.Rejected != 0 || table.current.Load().Len() != 2 {
		t.Errorf("%d hosts, and the status is %+v", table.current.Load().Len(), s)
	}
}

// C1, D41: an agent to which an address of another family is assigned later is sent another table. That is no
// difference between replicas.
func TestFamilyIsAdded(t *testing.T) {
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svc("web", "clusterIPs: [10.0.0.1, 'fd00::1']"))
	r := start(t, onAPI(t, a))
	var both atomic.Bool
	changed := make(chan struct{}, 1)
	client := runAgent(t, nds.Config{
		Addr: r.Addr().String(), Changed: changed,
		Node: nds.Node{PodName: "web-0", Namespace: "shop", IPs: []netip.Addr{netip.MustParseAddr("10.0.0.9")}},
		Refresh: func(node nds.Node) (nds.Node, error) {
			if both.Load() {
				node.IPs = []netip.Addr{netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("fd00::9")}
			}
			return node, nil
		},
	}, newAgentTable(t))
	wait.Until(t, "the agent has a table", func() bool { return client.Status().Digest != "" })
	first := client.Status().Digest
	both.Store(true)
	changed <- struct{}{}
	wait.Until(t, "the agent has the table of both families", func() bool {
		s := client.Status()
		return s.Connected && s.Digest != first
	})
	if n := r.metric(t, "replica_differences_total"); n != 0 {
		t.Errorf("%v differences between replicas are counted, and there is one replica", n)
	}
}
