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
	hosts   map[string]string // addresses; replaced at each change
	changed chan struct{}     // closed at the next change
	old     bool              // it does not know changes; set before the first stream
	corrupt string            // name of an agent whose next change lacks its entry
	firsts  []*corev3.Node    // of all streams
	reasons []string          // of NACKs
}

// startControl starts a control plane.
func startControl(t *testing.T, hosts map[string]string) *control {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &control{t: t, addr: listener.Addr().String(), hosts: hosts, changed: make(chan struct{})}
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
	c.hosts = maps.Clone(c.hosts)
	for host, address := range addresses {
		if c.hosts[host] = address; address == "" {
			delete(c.hosts, host)
		}
	}
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *control) current() (map[string]string, chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hosts, c.changed
}

// nodes returns the nodes of all streams so far.
func (c *control) nodes() []*corev3.Node {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*corev3.Node(nil), c.firsts...)
}

// entry returns an entry as it is encoded in a table.
func (c *control) entry(host, address string) []byte {
	b, err := proto.Marshal(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{host: {Ips: []string{address}}}})
	if err != nil {
		c.t.Error(err)
	}
	return b
}

// buckets returns the checksums of a table.
func (c *control) buckets(hosts map[string]string) (all digest.Buckets) {
	for host, address := range hosts {
		b := digest.BucketOf(host)
		all[b] = all[b].Add(digest.Of(c.entry(host, address)))
	}
	return all
}

// sum returns the checksum of the current table.
func (c *control) sum() digest.Sum {
	hosts, _ := c.current()
	all := c.buckets(hosts)
	return all.Sum()
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
func (s *subscription) next(hosts map[string]string, first bool) []byte {
	change := &api.NameTable_Change{Revision: []byte{byte(s.nonce)}}
	var complete digest.Set
	if first {
		digests, err := base64.StdEncoding.DecodeString(s.meta("NAMETAP_HOSTS"))
		if err != nil {
			s.c.t.Error(err)
		}
		buckets := s.c.buckets(hosts)
		ours := buckets.Digests()
		complete = digest.All()
		if theirs, ok := digest.ParseDigests(digests); ok {
			complete = ours.Differing(&theirs)
		}
	}
	var entries []byte
	for host, address := range hosts {
		wanted := first && complete.Has(digest.BucketOf(host)) || !first && s.sent[host] != address
		if wanted && !s.corrupt {
			entries = append(entries, s.c.entry(host, address)...)
		}
	}
	for host := range s.sent {
		if _, ok := hosts[host]; !ok {
			change.Removed = append(change.Removed, host)
		}
	}
	if s.c.old || s.meta("NAMETAP_MERGE") != "hosts" {
		return entries
	}
	change.Complete = complete[:]
	buckets := s.c.buckets(hosts)
	change.Sum = buckets.Sum().Bytes()
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
		hosts, changed := c.current()
		c.mu.Lock()
		if s.corrupt = !first && c.corrupt == s.meta("NAME"); s.corrupt {
			c.corrupt = ""
		}
		c.mu.Unlock()
		s.nonce++
		reason, err := send(s.next(hosts, first || whole), string(rune('a'+s.nonce%26)))
		if err != nil {
			return err
		}
		if reason != "" {
			c.mu.Lock()
			c.reasons = append(c.reasons, reason)
			c.mu.Unlock()
		}
		s.sent = hosts
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
			c.t.Errorf("an answer with nonce %q and version %q, want those of %q", r.GetResponseNonce(), r.GetVersionInfo(), nonce)
		}
		return r.GetErrorDetail().GetMessage(), err
	})
}
