package push

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// A fakeClient is a session without a stream. It holds what it was sent last.
type fakeClient struct {
	tb testing.TB
	*session
	last *discoveryv3.DeltaDiscoveryResponse
}

// join opens a session of a client in a namespace; mode is how it takes tables.
func join(tb testing.TB, s *Service, namespace, mode string) *fakeClient {
	tb.Helper()
	return joining{variant: variantDelta, mode: mode, metadata: map[string]any{"NAMESPACE": namespace}}.join(tb, s)
}

// A joining is what a client says when it joins.
type joining struct {
	variant, mode string
	versions      map[string]string // of the resources that it has
	metadata      map[string]any    // with its namespace
}

// join opens a session.
func (j joining) join(tb testing.TB, s *Service) *fakeClient {
	tb.Helper()
	j.metadata["INSTANCE_IPS"] = "10.0.0.1,fd00::1"
	node := nodeOf(tb, fmt.Sprintf("sidecar~10.0.0.1~web-0.%s~x", j.metadata["NAMESPACE"]), j.metadata)
	if j.mode == modeNamed {
		node.ClientFeatures = []string{"another", "nametap.named-tables"}
	}
	c := &fakeClient{tb: tb}
	c.session = &session{service: s, variant: j.variant, send: c.receive, connected: s.tables.elapsed()}
	c.timeout = time.AfterFunc(time.Hour, func() {})
	s.streams.Store(c.session, nil)
	if c.delta() {
		c.request(&discoveryv3.DeltaDiscoveryRequest{Node: node, TypeUrl: TypeURL, InitialResourceVersions: j.versions})
	} else {
		c.request(&discoveryv3.DiscoveryRequest{Node: node, TypeUrl: TypeURL})
	}
	return c
}

// nodeOf returns a node with metadata.
func nodeOf(tb testing.TB, id string, meta map[string]any) *corev3.Node {
	tb.Helper()
	fields, err := structpb.NewStruct(meta)
	if err != nil {
		tb.Fatal(err)
	}
	return &corev3.Node{Id: id, Metadata: fields}
}

// decoded returns a request as the codec decodes it.
func decoded(tb testing.TB, m proto.Message) *Request {
	tb.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		tb.Fatal(err)
	}
	_, delta := m.(*discoveryv3.DeltaDiscoveryRequest)
	r := newRequest(delta)
	if err := Codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, r); err != nil {
		tb.Fatal(err)
	}
	return r
}

// end ends the session.
func (c *fakeClient) end() {
	c.service.streams.Delete(c.session)
	c.session.end()
}

func (c *fakeClient) receive(response any) error {
	data, err := Codec().Marshal(response)
	if err != nil {
		return err
	}
	c.last = new(discoveryv3.DeltaDiscoveryResponse)
	if c.delta() {
		return proto.Unmarshal(data.Materialize(), c.last)
	}
	var whole discoveryv3.DiscoveryResponse
	err = proto.Unmarshal(data.Materialize(), &whole)
	c.last.Nonce, c.last.SystemVersionInfo = whole.GetNonce(), whole.GetVersionInfo()
	for _, body := range whole.GetResources() {
		c.last.Resources = append(c.last.Resources, &discoveryv3.Resource{Resource: body})
	}
	return err
}

// request sends a request.
func (c *fakeClient) request(m proto.Message) {
	c.tb.Helper()
	if err := c.handle(decoded(c.tb, m)); err != nil {
		c.tb.Fatal(err)
	}
}

// answer acknowledges the last push or, with a reason, rejects it.
func (c *fakeClient) answer(reason string) {
	c.tb.Helper()
	var rejection *rpcstatus.Status
	if reason != "" {
		rejection = &rpcstatus.Status{Message: reason}
	}
	if c.delta() {
		c.request(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: TypeURL, ResponseNonce: c.last.GetNonce(), ErrorDetail: rejection})
	} else {
		c.request(&discoveryv3.DiscoveryRequest{TypeUrl: TypeURL, ResponseNonce: c.last.GetNonce(), ErrorDetail: rejection})
	}
}

func (c *fakeClient) ack() { c.tb.Helper(); c.answer("") }

func (c *fakeClient) nack() { c.tb.Helper(); c.answer("no") }

// updateAll applies changes, and pushes what has changed to all clients before it returns.
func (s *Service) updateAll(tb testing.TB, changes ...hosts.Change) {
	tb.Helper()
	_, woken := s.tables.update(changes, func(hosts.Update, hosts.Counts) {})
	for _, c := range woken {
		if err := c.push(); err != nil {
			tb.Fatal(err)
		}
	}
}

// shown returns what is shown of the client.
func (c *fakeClient) shown() Agent {
	c.tb.Helper()
	a, open := c.state()
	if !open {
		c.tb.Fatal("the stream has ended")
	}
	return a
}

// A resource is a resource that a client has.
type resource struct {
	version string
	entries map[string]string // encoded, by the host in lower case
}

// resources returns the resources in the last push, by name. It checks the versions of named ones.
func (c *fakeClient) resources() map[string]resource {
	c.tb.Helper()
	all := map[string]resource{}
	for _, r := range c.last.GetResources() {
		content := r.GetResource().GetValue()
		sum := sha256.Sum256(content)
		if want := "nt:" + base64.RawStdEncoding.EncodeToString(sum[:8]); r.GetName() != "" && r.GetVersion() != want {
			c.tb.Errorf("the resource %q has the version %q, want %q", r.GetName(), r.GetVersion(), want)
		}
		if url := r.GetResource().GetTypeUrl(); url != TypeURL {
			c.tb.Errorf("a resource of type %q", url)
		}
		all[r.GetName()] = resource{r.GetVersion(), entriesIn(c.tb, content)}
	}
	return all
}

// hosts returns the entries in the last push.
func (c *fakeClient) hosts() map[string]string {
	c.tb.Helper()
	all := map[string]string{}
	for _, r := range c.resources() {
		maps.Copy(all, r.entries)
	}
	return all
}

// entriesIn returns the encoded entries of a table, by the host in lower case.
func entriesIn(tb testing.TB, encoded []byte) map[string]string {
	tb.Helper()
	var table api.NameTable
	if err := proto.Unmarshal(encoded, &table); err != nil {
		tb.Fatal(err)
	}
	out := map[string]string{}
	for host, info := range table.GetTable() {
		one := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{host: info}}
		entry, err := proto.MarshalOptions{Deterministic: true}.Marshal(one)
		if err != nil {
			tb.Fatal(err)
		}
		out[strings.ToLower(host)] = string(entry)
	}
	return out
}

// mesh returns Services of a number of namespaces.
func mesh(all, namespaces int) []object.Object {
	services := make([]object.Object, all)
	for i := range services {
		ip := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		services[i] = service(fmt.Sprintf("ns%d", i%namespaces), fmt.Sprintf("web%d", i), ip.String())
	}
	return services
}

// joinAll joins a client in each of many namespaces. They have the table.
func joinAll(tb testing.TB, s *Service, namespaces int) []*fakeClient {
	tb.Helper()
	clients := make([]*fakeClient, namespaces)
	for i := range clients {
		clients[i] = join(tb, s, fmt.Sprintf("ns%d", i), modeNamed)
		clients[i].ack()
		clients[i].send = func(any) error { return nil }
	}
	return clients
}
