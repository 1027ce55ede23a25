package discovery

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy/table"
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

// C1, C2, C11, D30, D37: the client in nds receives changes of hosts. After each one it has the table
// that the table command prints. After a restart it is sent only what differs.
func TestAgentReceivesChanges(t *testing.T) {
	a, _ := exampleObjects(t)
	cfg := onAPI(t, a)
	r := start(t, cfg)
	agent := nds.Config{
		Addr: r.Addr().String(), StateDir: t.TempDir(),
		Node: nds.Node{PodName: "web-0", Namespace: "shop", IPs: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}},
	}
	check := func(client *nds.Client, got *agentTable) {
		t.Helper()
		want, _, err := Table(t.Context(), cfg, Client{Namespace: "shop"})
		if err != nil {
			t.Fatal(err)
		}
		got.await(t, want)
		wait.Until(t, "the status shows it", func() bool {
			s := client.Status()
			return s.Connected && !s.Stale
		})
	}
	table := newAgentTable(t)
	client, stop := runAgent(t, agent, table)
	check(client, table)
	for i := range 3 {
		built := table.built.Load()
		a.Put(fakekube.Services, svcYAML("new", "web", fmt.Sprintf("10.0.0.%d", i)))
		check(client, table)
		if n := table.built.Load() - built; n != 1 {
			t.Errorf("change %d built %d shards", i, n)
		}
	}
	stop()
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.9"))
	table = newAgentTable(t)
	client, _ = runAgent(t, agent, table)
	check(client, table)
	if s := client.Status(); s.Rejected != 0 {
		t.Errorf("status %+v", s)
	}
}

// runAgent runs an agent with a table in plaintext until stop is called, at the latest at the end of the test.
func runAgent(t *testing.T, cfg nds.Config, table *agentTable) (client *nds.Client, stop func()) {
	t.Helper()
	cfg.Plaintext = true
	client, err := nds.New(cfg, table.apply)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("client: %v", err)
		}
	})
	t.Cleanup(stop)
	return client, stop
}
