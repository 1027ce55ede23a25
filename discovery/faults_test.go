package discovery

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

var (
	faultsSeed   = flag.Uint64("faults.seed", 0, "seed of TestFaults; 0 for another one in each run")
	faultsRounds = flag.Int("faults.rounds", 25, "rounds of TestFaults")
)

// A line passes connections on to one of several servers, and disturbs them.
type line struct {
	listener net.Listener
	mu       sync.Mutex
	backends []string // addresses
	next     int
	open     map[net.Conn]bool
	truncate int           // how many bytes of a server the next connection passes on; 0 for all
	held     chan struct{} // open while nothing is passed on; nil if it is
}

func newLine(t *testing.T) *line {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &line{listener: listener, open: map[net.Conn]bool{}}
	var done sync.WaitGroup
	done.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			done.Go(func() { l.serve(client) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		l.resume()
		l.cut()
		done.Wait()
	})
	return l
}

// lead makes the line lead to a replica.
func (l *line) lead(i int, r running) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.backends) <= i {
		l.backends = append(l.backends, "")
	}
	l.backends[i] = r.Addr().String()
}

// serve passes a connection on until one side ends it.
func (l *line) serve(client net.Conn) {
	defer client.Close()
	l.mu.Lock()
	backend, limit := l.backends[l.next%len(l.backends)], l.truncate
	l.next, l.truncate = l.next+1, 0
	l.mu.Unlock()
	server, err := net.Dial("tcp", backend)
	if err != nil {
		return
	}
	l.mu.Lock()
	l.open[client], l.open[server] = true, true
	l.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { l.pass(server, client, 0) })
	both.Go(func() { l.pass(client, server, limit) })
	both.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, client)
	delete(l.open, server)
}

// pass copies up to limit bytes, 0 for all, and then ends both sides.
func (l *line) pass(to, from net.Conn, limit int) {
	defer to.Close()
	defer from.Close()
	buffer := make([]byte, 4<<10)
	for passed := 0; limit == 0 || passed < limit; {
		n, err := from.Read(buffer)
		if limit > 0 {
			n = min(n, limit-passed)
		}
		passed += n
		l.mu.Lock()
		held := l.held
		l.mu.Unlock()
		if held != nil {
			<-held
		}
		if _, writeErr := to.Write(buffer[:n]); err != nil || writeErr != nil {
			return
		}
	}
}

// cut ends all connections.
func (l *line) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.open {
		_ = c.Close()
	}
}

// hold lets nothing through until resume.
func (l *line) hold() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held == nil {
		l.held = make(chan struct{})
	}
}

func (l *line) resume() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held != nil {
		close(l.held)
		l.held = nil
	}
}

// A faultyAgent is an agent behind a line, with a disk that fails.
type faultyAgent struct {
	t         *testing.T
	cfg       nds.Config
	client    *nds.Client
	table     *agentTable
	stop      func()
	namespace string
}

// start starts the agent, again after stop.
func (a *faultyAgent) start() {
	a.t.Helper()
	a.table = newAgentTable(a.t)
	var err error
	if a.client, err = nds.New(a.cfg, a.table.apply); err != nil {
		a.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(a.t.Context())
	done := make(chan error, 1)
	go func() { done <- a.client.Run(ctx) }()
	a.stop = func() {
		cancel()
		if err := <-done; err != nil {
			a.t.Errorf("agent: %v", err)
		}
	}
}

// breakDisk puts a file in the place of the state directory, or removes it if it is there.
func (a *faultyAgent) breakDisk() {
	dir := a.cfg.StateDir
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		_ = os.Remove(dir)
		_ = os.Rename(dir+".away", dir)
		return
	}
	_ = os.RemoveAll(dir + ".away")
	if err := errors.Join(os.Rename(dir, dir+".away"), os.WriteFile(dir, nil, 0o600)); err != nil && !errors.Is(err, os.ErrNotExist) {
		a.t.Error(err)
	}
}

// damageSnapshot changes a byte of the snapshot, which the next start reads.
func (a *faultyAgent) damageSnapshot(r *rand.Rand) {
	path := filepath.Join(a.cfg.StateDir, "nametable.snapshot")
	if content, err := os.ReadFile(path); err == nil && len(content) > 0 {
		content[r.IntN(len(content))] ^= 1 << r.IntN(8)
		_ = os.WriteFile(path, content, 0o600)
	}
}

// fault does something to the agents, their lines, or the replicas.
func (c *churn) fault(agents []*faultyAgent, l *line) {
	a := agents[c.rand.IntN(len(agents))]
	switch c.rand.IntN(8) {
	case 0:
		l.cut()
	case 1:
		l.mu.Lock()
		l.truncate = 1 + c.rand.IntN(3000)
		l.mu.Unlock()
		l.cut()
	case 2:
		l.hold()
	case 3:
		a.stop()
		a.start()
	case 4:
		a.stop()
		a.damageSnapshot(c.rand)
		a.start()
	case 5:
		a.breakDisk()
	case 6:
		i := c.rand.IntN(len(c.replicas))
		c.replace(i)
		l.lead(i, c.replicas[i])
	}
}

// settled waits until each agent has the table of a client of a new server.
func (c *churn) settled(agents []*faultyAgent, round int) {
	c.t.Helper()
	want := map[string]client{}
	fresh := start(c.t, onAPI(c.t, c.api))
	defer fresh.stop()
	for _, a := range agents {
		if want[a.namespace] == nil {
			want[a.namespace] = openSotw(c.t, fresh, node(c.t, a.namespace))
			want[a.namespace].next()
		}
		if a.client.Status().Reconnects > 2 { // the next pauses would be long
			a.stop()
			a.start()
		}
		a.table.await(c.t, merged(c.t, want[a.namespace].state()))
		if c.t.Failed() {
			c.t.Fatalf("round %d: an agent of %s: %+v", round, a.namespace, a.client.Status())
		}
	}
}

// TestFaults disturbs agents in random ways: their connections to two replicas are cut, held and
// truncated, agents and replicas restart, disks fail and snapshots are damaged, while objects
// change. After each round, every agent has the table of a client of a new server, entry by entry.
func TestFaults(t *testing.T) { // C7, C11, C12, D37, D38, D41
	t.Parallel()
	seed := cmp.Or(*faultsSeed, uint64(time.Now().UnixNano()))
	t.Logf("-faults.seed=%d", seed)
	c := &churn{t: t, rand: rand.New(rand.NewPCG(seed, 0)), api: fakekube.Start(t), replicas: make([]running, 2)}
	for _, name := range []string{"serviceentries", "sidecars"} {
		c.api.Put(fakekube.Definitions, fmt.Sprintf("apiVersion: meta.k8s.io/v1\nkind: PartialObjectMetadata\nmetadata: {name: %s.networking.istio.io}\n", name))
	}
	c.api.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	l := newLine(t)
	for i := range c.replicas {
		c.replace(i)
		l.lead(i, c.replicas[i])
	}
	var agents []*faultyAgent
	for i := range 4 {
		a := &faultyAgent{t: t, namespace: []string{"shop", "data"}[i%2]}
		a.cfg = nds.Config{
			Addr: l.listener.Addr().String(), Plaintext: true, StateDir: filepath.Join(t.TempDir(), "state"),
			Node: nds.Node{PodName: fmt.Sprint("a-", i), Namespace: a.namespace, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}},
		}
		a.start()
		t.Cleanup(func() { a.stop() })
		agents = append(agents, a)
	}
	for round := range *faultsRounds {
		for range 1 + c.rand.IntN(4) {
			c.edit()
			c.fault(agents, l)
		}
		l.resume()
		c.settled(agents, round)
	}
	wait.Until(t, "all agents are connected", func() bool {
		for _, a := range agents {
			if s := a.client.Status(); !s.Connected || s.Stale {
				return false
			}
		}
		return true
	})
}
