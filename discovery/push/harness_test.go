package push

import (
	"fmt"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/hosts"
)

// A fakeClient is a session without a stream. It holds what it was sent last.
type fakeClient struct {
	tb testing.TB
	*session
	last *discoveryv3.DeltaDiscoveryResponse
}

// join opens a session of a client in a namespace; merge is what it merges.
func join(tb testing.TB, s *Service, namespace, merge string) *fakeClient {
	tb.Helper()
	return joining{variant: variantDelta, metadata: map[string]any{"NAMESPACE": namespace, metaMerge: merge}}.join(tb, s)
}

// A joining is what a client says when it joins.
type joining struct {
	variant  string
	version  string         // of the table that it has
	metadata map[string]any // with its namespace
}

// join opens a session.
func (j joining) join(tb testing.TB, s *Service) *fakeClient {
	tb.Helper()
	metadata := j.metadata
	metadata["INSTANCE_IPS"] = "10.0.0.1,fd00::1"
	meta, err := structpb.NewStruct(metadata)
	if err != nil {
		tb.Fatal(err)
	}
	c := &fakeClient{tb: tb}
	c.session = &session{service: s, variant: j.variant, send: c.receive, connected: s.tables.elapsed()}
	c.timeout = time.AfterFunc(time.Hour, func() {})
	s.streams.add(c.session)
	node := &corev3.Node{Id: fmt.Sprintf("sidecar~10.0.0.1~web-0.%s~x", metadata["NAMESPACE"]), Metadata: meta}
	if err := c.handle(&Request{node: node, typeURL: TypeURL, version: j.version, delta: c.delta()}); err != nil {
		tb.Fatal(err)
	}
	return c
}

// end ends the session.
func (c *fakeClient) end() {
	c.service.streams.remove(c.session)
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
	c.last.Nonce = whole.GetNonce()
	for _, body := range whole.GetResources() {
		c.last.Resources = append(c.last.Resources, &discoveryv3.Resource{Resource: body})
	}
	return err
}

// ack acknowledges the last push.
func (c *fakeClient) ack() {
	c.tb.Helper()
	if err := c.handle(&Request{typeURL: TypeURL, nonce: c.last.GetNonce()}); err != nil {
		c.tb.Fatal(err)
	}
}

// nack rejects the last push.
func (c *fakeClient) nack() {
	c.tb.Helper()
	if err := c.handle(&Request{typeURL: TypeURL, nonce: c.last.GetNonce(), rejected: true, reason: "no"}); err != nil {
		c.tb.Fatal(err)
	}
}

// updateAll applies changes, and pushes what has changed to all clients before it returns.
func (s *Service) updateAll(tb testing.TB, changes ...hosts.Change) {
	tb.Helper()
	_, woken := s.tables.update(changes, nil, func(hosts.Update, hosts.Counts) {})
	for _, c := range woken {
		if err := c.push(); err != nil {
			tb.Fatal(err)
		}
	}
}

// shown returns what is shown of the client.
func (c *fakeClient) shown() Agent {
	c.tb.Helper()
	a, open := c.state(c.info.Load())
	if !open {
		c.tb.Fatal("the stream has ended")
	}
	return a
}

// change returns the change in the last push, and its length.
func (c *fakeClient) change() (change *api.NameTable_Change, bytes int) {
	c.tb.Helper()
	table, encoded := new(api.NameTable), c.last.GetResources()[0].GetResource().GetValue()
	if err := proto.Unmarshal(encoded, table); err != nil {
		c.tb.Fatal(err)
	}
	return table.GetChange(), len(encoded)
}
