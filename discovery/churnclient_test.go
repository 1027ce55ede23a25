package discovery

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
)

// The values of NAMETAP_MERGE.
const (
	mergesNothing = "false"
	mergesHosts   = "hosts"
)

// A churnKind is what distinguishes the clients of TestChurn.
type churnKind struct{ variant, merge, namespace, app string }

// A churnClient is a client of any kind, which applies, delays, rejects and loses pushes.
type churnClient struct {
	t    *testing.T
	kind churnKind

	// tables has the entries of each resource, by the host in lower case. A client that merges hosts has one.
	tables   map[string]map[string]string
	versions map[string]string // of the resources, in the incremental variant
	revision []byte
	misled   bool // it has sent digests of hosts that it does not have

	pushes chan proto.Message // of the stream; closed when that has ended
	send   func(nonce string, rejection *status.Status) error
	end    context.CancelFunc
}

// connect opens a stream to a server. The client says which tables it has or, with digests, that it has other
// ones.
func (c *churnClient) connect(r running, digests []byte) {
	c.t.Helper()
	meta := []string{metaMerge, c.kind.merge}
	if c.kind.merge == mergesHosts && c.revision != nil {
		if digests == nil {
			shards := c.sums()
			digests = shards.Digests().Bytes()
			meta = append(meta, "NAMETAP_REVISION", base64.StdEncoding.EncodeToString(c.revision))
		}
		meta = append(meta, "NAMETAP_HOSTS", base64.StdEncoding.EncodeToString(digests))
	}
	n := node(c.t, c.kind.namespace, meta...)
	if c.kind.app != "" {
		n.Metadata.Fields["LABELS"] = structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{"app": structpb.NewStringValue(c.kind.app)}})
	}
	var ctx context.Context
	ctx, c.end = context.WithCancel(c.t.Context())
	c.pushes = make(chan proto.Message, 100)
	var receive func() (proto.Message, error)
	if c.kind.variant == variantDelta {
		stream, err := r.dial(c.t).DeltaAggregatedResources(ctx)
		if err != nil {
			c.t.Fatal(err)
		}
		receive = func() (proto.Message, error) { return stream.Recv() }
		c.send = func(nonce string, rejection *status.Status) error {
			return stream.Send(&discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResponseNonce: nonce, ErrorDetail: rejection})
		}
		err = stream.Send(&discoveryv3.DeltaDiscoveryRequest{Node: n, TypeUrl: typeURL, InitialResourceVersions: c.versions})
		if err != nil {
			c.t.Fatal(err)
		}
	} else {
		stream, err := r.dial(c.t).StreamAggregatedResources(ctx)
		if err != nil {
			c.t.Fatal(err)
		}
		receive = func() (proto.Message, error) { return stream.Recv() }
		c.send = func(nonce string, rejection *status.Status) error {
			return stream.Send(&discoveryv3.DiscoveryRequest{TypeUrl: typeURL, ResponseNonce: nonce, ErrorDetail: rejection})
		}
		if err := stream.Send(&discoveryv3.DiscoveryRequest{Node: n, TypeUrl: typeURL}); err != nil {
			c.t.Fatal(err)
		}
	}
	go func(pushes chan<- proto.Message) {
		defer close(pushes)
		for {
			m, err := receive()
			if err != nil {
				return
			}
			pushes <- m
		}
	}(c.pushes)
}

// sums returns the checksum of each shard.
func (c *churnClient) sums() (b digest.Sums) {
	for host, entry := range c.tables[""] {
		at := digest.ShardOf(host)
		b[at] = b[at].Add(digest.Of([]byte(entry)))
	}
	return b
}

// take answers a push, if there is one, and applies it unless it is to be rejected. It reports whether there was
// one; ok is false if the stream must end, or has ended.
func (c *churnClient) take(reject bool) (taken, ok bool) {
	c.t.Helper()
	var m proto.Message
	select {
	case m, ok = <-c.pushes:
		if !ok {
			return false, false
		}
	default:
		return false, true
	}
	var rejection *status.Status
	nonce := ""
	switch m := m.(type) {
	case *discoveryv3.DeltaDiscoveryResponse:
		nonce = m.GetNonce()
	case *discoveryv3.DiscoveryResponse:
		nonce = m.GetNonce()
	}
	ok = true
	if reject {
		rejection = &status.Status{Message: "the test rejects it"}
	} else if err := c.apply(m); err != nil {
		rejection, ok = &status.Status{Message: err.Error()}, false
		if !c.misled {
			c.t.Errorf("%+v: %v", c.kind, err)
		}
	}
	c.misled = false
	return true, c.send(nonce, rejection) == nil && ok
}

// apply applies a push.
func (c *churnClient) apply(m proto.Message) error {
	switch m := m.(type) {
	case *discoveryv3.DeltaDiscoveryResponse:
		if c.kind.merge == mergesHosts {
			if len(m.GetResources()) != 1 || len(m.GetRemovedResources()) > 0 {
				return fmt.Errorf("%d resources, and %v removed", len(m.GetResources()), m.GetRemovedResources())
			}
			return c.merge(m.GetResources()[0].GetResource().GetValue())
		}
		for _, r := range m.GetResources() {
			c.tables[r.GetName()], _ = c.parse(r.GetResource().GetValue())
			c.versions[r.GetName()] = r.GetVersion()
		}
		for _, name := range m.GetRemovedResources() {
			delete(c.tables, name)
			delete(c.versions, name)
		}
	case *discoveryv3.DiscoveryResponse:
		if c.kind.merge == mergesHosts {
			if len(m.GetResources()) != 1 {
				return fmt.Errorf("%d resources", len(m.GetResources()))
			}
			return c.merge(m.GetResources()[0].GetValue())
		}
		c.tables = map[string]map[string]string{}
		for _, r := range m.GetResources() {
			name, table := "", r.GetValue()
			if r.GetTypeUrl() != typeURL {
				var wrapper discoveryv3.Resource
				if err := proto.Unmarshal(table, &wrapper); err != nil {
					return err
				}
				name, table = wrapper.GetName(), wrapper.GetResource().GetValue()
			}
			c.tables[name], _ = c.parse(table)
		}
	}
	return nil
}

// parse returns the entries of a table, by the host in lower case, and the bytes of its change.
func (c *churnClient) parse(table []byte) (entries map[string]string, change []byte) {
	entries = map[string]string{}
	for len(table) > 0 {
		number, _, n := protowire.ConsumeField(table)
		_, _, tag := protowire.ConsumeTag(table)
		field := table[:n]
		table = table[n:]
		body, _ := protowire.ConsumeBytes(field[tag:])
		if number != 1 {
			change = body
			continue
		}
		_, _, tag = protowire.ConsumeTag(body)
		key, _ := protowire.ConsumeString(body[tag:])
		if key = strings.ToLower(key); entries[key] != "" {
			c.t.Errorf("%+v: host %s twice", c.kind, key)
		}
		entries[key] = string(field)
	}
	return entries, change
}

// merge applies a change of the table, unless the checksum is wrong.
func (c *churnClient) merge(table []byte) error {
	entries, encoded := c.parse(table)
	var change api.NameTable_Change
	if err := proto.Unmarshal(encoded, &change); err != nil {
		return err
	}
	complete, _ := digest.ParseSet(change.GetComplete())
	before := c.tables[""]
	after := map[string]string{}
	for host, entry := range before {
		if !complete.Has(digest.ShardOf(host)) {
			after[host] = entry
		}
	}
	maps.Copy(after, entries)
	removed := change.GetRemoved()
	if len(slices.Compact(slices.Clone(removed))) != len(removed) {
		c.t.Errorf("%+v: hosts are removed twice: %v", c.kind, removed)
	}
	for _, host := range removed {
		if entries[host] != "" {
			c.t.Errorf("%+v: host %s is both sent and removed", c.kind, host)
		}
		delete(after, host)
	}
	c.tables[""] = after
	shards := c.sums()
	if got, want := shards.Sum(), hex.EncodeToString(change.GetSum()); got.String() != want {
		c.tables[""] = before
		return fmt.Errorf("the checksum is %s, want %s, after a change of %d entries, %d removed, %v complete", got, want, len(entries), len(removed), complete)
	}
	c.revision = change.GetRevision()
	return nil
}

// all returns all entries as text.
func (c *churnClient) all() string {
	var all []string
	for _, table := range c.tables {
		for host, entry := range table {
			all = append(all, host+" "+entry)
		}
	}
	slices.Sort(all)
	return strings.Join(all, "\n")
}
