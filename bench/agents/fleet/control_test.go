package fleet_test

import (
	"encoding/base64"
	"maps"
	"net"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"

	"github.com/nametap/nametap/bench/agents/wire"
)

// A control is a control plane on grpc-go that sends changes of hosts, or whole tables to agents that do
// not ask for changes.
type control struct {
	discoveryv3.UnimplementedAggregatedDiscoveryServiceServer
	t    *testing.T
	addr string

	mu      sync.Mutex
	table   contents       // replaced at each change
	changed chan struct{}  // closed at the next change
	old     bool           // it does not know changes; set before the first stream
	corrupt string         // name of an agent whose next change lacks its entry
	firsts  []*corev3.Node // of all streams
	reasons []string       // of NACKs
}

// The contents of a table do not change.
type contents struct {
	hosts   map[string]string // addresses
	entries map[string][]byte // as they are encoded in a table
	shards  digest.Sums
}

// newContents returns the contents of a table. It encodes the entries that before does not have.
func newContents(t *testing.T, hosts map[string]string, before contents) contents {
	t.Helper()
	c := contents{hosts: hosts, entries: map[string][]byte{}}
	for host, address := range hosts {
		raw := before.entries[host]
		if before.hosts[host] != address {
			var err error
			if raw, err = proto.Marshal(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{host: {Ips: []string{address}}}}); err != nil {
				t.Error(err)
			}
		}
		b := digest.ShardOf(host)
		c.entries[host], c.shards[b] = raw, c.shards[b].Add(digest.Of(raw))
	}
	return c
}

// startControl starts a control plane.
func startControl(t *testing.T, hosts map[string]string) *control {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &control{t: t, addr: listener.Addr().String(), table: newContents(t, hosts, contents{}), changed: make(chan struct{})}
	rpc := grpc.NewServer()
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(rpc, c)
	go func() { _ = rpc.Serve(listener) }()
	t.Cleanup(rpc.Stop)
	return c
}

// set changes hosts; an empty address removes one.
func (c *control) set(addresses map[string]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	hosts := maps.Clone(c.table.hosts)
	for host, address := range addresses {
		if hosts[host] = address; address == "" {
			delete(hosts, host)
		}
	}
	c.table = newContents(c.t, hosts, c.table)
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *control) current() (contents, chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.table, c.changed
}

// nodes returns the nodes of all streams so far.
func (c *control) nodes() []*corev3.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*corev3.Node(nil), c.firsts...)
}

// sum returns the checksum of the current table.
func (c *control) sum() digest.Sum {
	table, _ := c.current()
	return table.shards.Sum()
}

// A subscription is what a stream has sent.
type subscription struct {
	c       *control
	node    *corev3.Node
	sent    map[string]string
	corrupt bool
	nonce   int
}

func (s *subscription) meta(name string) string {
	return s.node.GetMetadata().GetFields()[name].GetStringValue()
}

// next returns the table that follows, as the bytes of a NameTable.
func (s *subscription) next(table contents, first bool) []byte {
	change := &api.NameTable_Change{Revision: []byte{byte(s.nonce)}}
	var complete digest.Set
	if first {
		digests, err := base64.StdEncoding.DecodeString(s.meta("NAMETAP_HOSTS"))
		if err != nil {
			s.c.t.Error(err)
		}
		ours := table.shards.Digests()
		complete = digest.All()
		if theirs, ok := digest.ParseDigests(digests); ok {
			complete = ours.Differing(&theirs)
		}
	}
	var entries []byte
	for host, address := range table.hosts {
		wanted := first && complete.Has(digest.ShardOf(host)) || !first && s.sent[host] != address
		if wanted && !s.corrupt {
			entries = append(entries, table.entries[host]...)
		}
	}
	for host := range s.sent {
		if _, ok := table.hosts[host]; !ok {
			change.Removed = append(change.Removed, host)
		}
	}
	if s.c.old || s.meta("NAMETAP_MERGE") != "hosts" {
		return entries
	}
	change.Complete = complete[:]
	change.Sum = table.shards.Sum().Bytes()
	b, err := proto.Marshal(&api.NameTable{Change: change})
	if err != nil {
		s.c.t.Error(err)
	}
	return append(entries, b...)
}

// serve serves a stream. send sends a response, and returns after its answer, with the reason of a NACK.
func (c *control) serve(node *corev3.Node, send func(table []byte, nonce string) (string, error)) error {
	c.mu.Lock()
	c.firsts = append(c.firsts, node)
	c.mu.Unlock()
	s := &subscription{c: c, node: node}
	whole := c.old || s.meta("NAMETAP_MERGE") != "hosts"
	for first := true; ; first = false {
		table, changed := c.current()
		c.mu.Lock()
		if s.corrupt = !first && c.corrupt == s.meta("NAME"); s.corrupt {
			c.corrupt = ""
		}
		c.mu.Unlock()
		s.nonce++
		reason, err := send(s.next(table, first || whole), string(rune('a'+s.nonce%26)))
		if err != nil {
			return err
		}
		if reason != "" {
			c.mu.Lock()
			c.reasons = append(c.reasons, reason)
			c.mu.Unlock()
		}
		s.sent = table.hosts
		select {
		case <-changed:
		case <-time.After(time.Minute):
			return nil
		}
	}
}

// DeltaAggregatedResources serves the incremental variant.
func (c *control) DeltaAggregatedResources(stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	return c.serve(first.GetNode(), func(table []byte, nonce string) (string, error) {
		err := stream.Send(&discoveryv3.DeltaDiscoveryResponse{
			Nonce: nonce, TypeUrl: wire.TypeURL, Resources: []*discoveryv3.Resource{{Resource: &anypb.Any{TypeUrl: wire.TypeURL, Value: table}}},
		})
		if err != nil {
			return "", err
		}
		r, err := stream.Recv()
		if err == nil && r.GetResponseNonce() != nonce {
			c.t.Errorf("an answer with nonce %q, want %q", r.GetResponseNonce(), nonce)
		}
		return r.GetErrorDetail().GetMessage(), err
	})
}

// StreamAggregatedResources serves the state-of-the-world variant.
func (c *control) StreamAggregatedResources(stream discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	return c.serve(first.GetNode(), func(table []byte, nonce string) (string, error) {
		err := stream.Send(&discoveryv3.DiscoveryResponse{
			VersionInfo: "v" + nonce, Nonce: nonce, TypeUrl: wire.TypeURL, Resources: []*anypb.Any{{TypeUrl: wire.TypeURL, Value: table}},
		})
		if err != nil {
			return "", err
		}
		r, err := stream.Recv()
		if err == nil && (r.GetResponseNonce() != nonce || r.GetErrorDetail() == nil && r.GetVersionInfo() != "v"+nonce) {
			c.t.Errorf("an answer with nonce %q and version %q, want the nonce and version of %q", r.GetResponseNonce(), r.GetVersionInfo(), nonce)
		}
		return r.GetErrorDetail().GetMessage(), err
	})
}
