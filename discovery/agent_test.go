package discovery

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/nametap/nametap/examples"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

// C1, C2: the client in nds gets the table that the table command prints, and
// receives an edit. Hosts that need automatic VIPs are in it if the client
// asks for VIPs.
func TestWithNametapsClient(t *testing.T) {
	t.Parallel()
	const external = "mysql-instance1.us-east-1.rds.amazonaws.com"
	for _, asks := range []bool{false, true} {
		t.Run(fmt.Sprintf("asks for VIPs %t", asks), func(t *testing.T) {
			dir := unpack(t, examples.Files)
			r := start(t, Config{ConfigDir: dir})
			a := newAgentTable(t)
			client, err := nds.New(nds.Config{
				Addr: r.Addr().String(), Plaintext: true,
				Node: nds.Node{PodName: "web-0", Namespace: "shop", AutoAllocate: asks, IPs: []netip.Addr{
					netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}},
			}, a.apply)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- client.Run(ctx) }()
			defer func() {
				cancel()
				if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
					t.Errorf("client: %v", err)
				}
			}()

			check := func() {
				t.Helper()
				want, _, err := Table(t.Context(), Config{ConfigDir: dir}, Client{Namespace: "shop", AutoAllocate: asks})
				if err != nil {
					t.Fatal(err)
				}
				a.await(t, want)
				if _, has := a.current.Load().NameTable().GetTable()[external]; has != asks {
					t.Errorf("%s is in the table: %t, want %t", external, has, asks)
				}
			}
			check()
			write(t, dir, "more.yaml", svcYAML("new", "web", "10.0.0.9"))
			check()
			write(t, dir, "more.yaml", svcYAML("shop", "web", "10.0.0.9"))
			check()
		})
	}
}

// C7, D43: an agent keeps its table when its control plane restarts with an empty
// directory and no state. It logs why, and gets the objects that are added later.
func TestAgentKeepsTableOverEmptyRestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.1"))
	r := start(t, Config{ConfigDir: dir})
	addr := r.Addr().String()
	applied, table := make(chan int, 16), newAgentTable(t)
	client, err := nds.New(nds.Config{
		Addr: addr, Plaintext: true, StateDir: t.TempDir(),
		Node: nds.Node{PodName: "web-0", Namespace: "shop", IPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}},
	}, func(shards map[int][]byte) error {
		err := table.apply(shards)
		applied <- table.current.Load().Len()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("client: %v", err)
		}
	}()
	if n := <-applied; n != 1 {
		t.Fatalf("%d hosts at first, want 1", n)
	}
	r.stop()
	empty := t.TempDir()
	s, err := New(Config{ConfigDir: empty, GRPCAddr: addr})
	if err != nil {
		t.Fatal(err)
	}
	run(t, s)
	wait.Until(t, "the agent says why it has no stream", func() bool {
		return strings.Contains(client.Status().LastError, "--allow-empty")
	})
	if status := client.Status(); !status.Loaded || status.Pushes != 1 || len(applied) != 0 {
		t.Errorf("the agent took something: %+v, %d", status, len(applied))
	}
	for i, name := range []string{"a.yaml", "b.yaml"} {
		write(t, empty, name, svcYAML("shop", fmt.Sprintf("new%d", i), "10.0.0.2"))
	}
	for n := 0; n != 2; {
		if n = <-applied; n == 0 {
			t.Error("the agent was given an empty table")
		}
	}
}
