// Package fleet plays many agents: each has a connection and a stream of incremental ADS to a control plane, takes all tables
// and acknowledges them.
package fleet

import (
	"context"
	"crypto/tls"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// tableType is the type of the tables, whole or in shards.
const tableType = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// A Config says how agents connect, and as what.
type Config struct {
	Addr      string
	Agents    int
	Namespace string
	// TLS is nil for plaintext.
	TLS *tls.Config
	// Named agents are nametap's, which take a resource for each shard. Others get whole tables, as Istio's do.
	Named bool
}

// A Fleet is a number of agents. They end with the test.
type Fleet struct {
	cfg    Config
	agents []*agent
	read   atomic.Int64 // bytes of all pushes
	end    context.CancelFunc
	ended  sync.WaitGroup
}

// An agent is a simulated agent.
type agent struct {
	mu       sync.Mutex
	versions map[string]string // by the names of resources; the version of a whole table is a hash of it
	pushes   int
	pushed   time.Time // when the last push arrived
}

// seed is for hashes of whole tables.
var seed = maphash.MakeSeed() //nolint:gochecknoglobals // as maphash wants it

// Start connects all agents, and returns when each has a table.
func Start(tb testing.TB, cfg Config) *Fleet {
	tb.Helper()
	f := &Fleet{cfg: cfg}
	for range cfg.Agents {
		f.agents = append(f.agents, &agent{versions: map[string]string{}})
	}
	tb.Cleanup(f.Stop)
	f.Connect(tb)
	return f
}

// Connect connects all agents, which announce what they have, and returns when each has an answer.
func (f *Fleet) Connect(tb testing.TB) {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f.end = cancel
	f.mark()
	for i, a := range f.agents {
		f.ended.Go(func() {
			for ctx.Err() == nil {
				if err := f.stream(ctx, i, a); ctx.Err() == nil {
					tb.Logf("agent %d: %v", i, err)
				}
			}
		})
	}
	f.Await(tb, 1)
}

// Stop ends all connections.
func (f *Fleet) Stop() {
	f.end()
	f.ended.Wait()
}

// stream opens a connection and a stream, and takes what arrives, until ctx or the stream ends.
func (f *Fleet) stream(ctx context.Context, i int, a *agent) error {
	transport := insecure.NewCredentials()
	if f.cfg.TLS != nil {
		transport = credentials.NewTLS(f.cfg.TLS)
	}
	conn, err := grpc.NewClient("passthrough:///"+f.cfg.Addr, grpc.WithTransportCredentials(transport), grpc.WithReadBufferSize(4<<10), grpc.WithWriteBufferSize(1<<10),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	metadata := map[string]any{"NAMESPACE": f.cfg.Namespace, "CLUSTER_ID": "Kubernetes", "DNS_CAPTURE": "true"}
	node := &corev3.Node{Id: fmt.Sprintf("sidecar~10.1.%d.%d~agent-%d.%s~cluster.local", i>>8&255, i&255, i, f.cfg.Namespace)}
	if node.Metadata, err = structpb.NewStruct(metadata); err != nil {
		return err
	}
	request := &discoveryv3.DeltaDiscoveryRequest{Node: node, TypeUrl: tableType}
	if f.cfg.Named {
		node.ClientFeatures = []string{"nametap.named-tables"}
		a.mu.Lock()
		request.InitialResourceVersions = maps.Clone(a.versions)
		a.mu.Unlock()
	}
	for {
		if err := stream.Send(request); err != nil {
			return err
		}
		push, err := stream.Recv()
		if err != nil {
			return err
		}
		f.read.Add(int64(proto.Size(push)))
		a.take(push)
		request = &discoveryv3.DeltaDiscoveryRequest{TypeUrl: tableType, ResponseNonce: push.GetNonce()}
	}
}

// take notes the resources of a push.
func (a *agent) take(push *discoveryv3.DeltaDiscoveryResponse) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, resource := range push.GetResources() {
		version := strings.Clone(resource.GetVersion())
		if version == "" {
			version = strconv.FormatUint(maphash.Bytes(seed, resource.GetResource().GetValue()), 16)
		}
		a.versions[strings.Clone(resource.GetName())] = version
	}
	for _, name := range push.GetRemovedResources() {
		delete(a.versions, name)
	}
	a.pushes++
	a.pushed = time.Now()
}

// mark forgets the pushes so far.
func (f *Fleet) mark() {
	for _, a := range f.agents {
		a.mu.Lock()
		a.pushes = 0
		a.mu.Unlock()
	}
}

// Await returns when all agents have had n pushes since the last change or connection. It returns when the last push of each
// arrived, sorted.
func (f *Fleet) Await(tb testing.TB, n int) (arrived []time.Time) {
	tb.Helper()
	for i, a := range f.agents {
		wait.Until(tb, fmt.Sprintf("push %d to agent %d", n, i), func() bool {
			a.mu.Lock()
			defer a.mu.Unlock()
			return a.pushes >= n
		})
		a.mu.Lock()
		arrived = append(arrived, a.pushed)
		a.mu.Unlock()
	}
	slices.SortFunc(arrived, time.Time.Compare)
	return arrived
}

// Change calls edit, and returns the times from its return until the change has arrived at each agent, sorted.
func (f *Fleet) Change(tb testing.TB, edit func()) (took []time.Duration) {
	tb.Helper()
	f.mark()
	edit()
	began := time.Now()
	for _, at := range f.Await(tb, 1) {
		took = append(took, at.Sub(began))
	}
	return took
}

// AwaitSame returns when all agents have the same table.
func (f *Fleet) AwaitSame(tb testing.TB) {
	tb.Helper()
	first := f.agents[0]
	for i, a := range f.agents[1:] {
		wait.Until(tb, fmt.Sprintf("agents 0 and %d have the same table", i+1), func() bool {
			first.mu.Lock()
			defer first.mu.Unlock()
			a.mu.Lock()
			defer a.mu.Unlock()
			return maps.Equal(first.versions, a.versions)
		})
	}
}

// Read returns the bytes of all pushes so far.
func (f *Fleet) Read() int64 { return f.read.Load() }
