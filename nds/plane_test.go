package nds_test

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

// A plane is a control plane that sends a resource for each shard, as nametap-discovery does.
type plane struct {
	t      *testing.T
	server *fakexds.Server

	mu      sync.Mutex
	entries map[string][]byte // by host; in wire form, with tag and length
	version int
	// damaged is true if the resources in the next response differ from their hashes.
	damaged bool
	// first are the first requests of streams.
	first []firstRequest
}

// A firstRequest is what the first request of a stream announces, and the resources that were sent in answer.
type firstRequest struct {
	announced map[string]string
	sent      []string
}

func startPlane(t *testing.T, hosts ...string) *plane {
	t.Helper()
	p := &plane{t: t, entries: map[string][]byte{}}
	for _, host := range hosts {
		p.set(host, "192.0.2.1")
	}
	p.server = serve(t, fakexds.Options{First: p.greet})
	return p
}

// greet answers the first request of a stream with what the client does not have.
func (p *plane) greet(r fakexds.Request) (*discoveryv3.DeltaDiscoveryResponse, *discoveryv3.DiscoveryResponse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Equal(r.Node().GetClientFeatures(), []string{"nametap.named-tables"}) {
		p.t.Errorf("the client has the features %q", r.Node().GetClientFeatures())
	}
	f := firstRequest{announced: r.Delta.GetInitialResourceVersions()}
	resources := p.resourcesLocked()
	var removed []string
	for name, version := range f.announced {
		if m := resources[name]; m == nil {
			removed = append(removed, name)
		} else if m.GetVersion() == version {
			delete(resources, name)
		}
	}
	f.sent = slices.Sorted(maps.Keys(resources))
	p.first = append(p.first, f)
	return p.responseLocked(resources, removed), nil
}

// set puts a host into the table without a push.
func (p *plane) set(key string, ips ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.entries[strings.ToLower(key)] = entryOf(p.t, key, &api.NameTable_NameInfo{Ips: ips, Registry: "External"})
}

// entryOf returns an entry in wire form.
func entryOf(t *testing.T, host string, info *api.NameTable_NameInfo) []byte {
	t.Helper()
	return plain(t, &api.NameTable{Table: map[string]*api.NameTable_NameInfo{host: info}})
}

func (p *plane) remove(host string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.entries, host)
}

// shardName returns the name of the resource that has a host.
func shardName(host string) string { return strconv.Itoa(digest.ShardOf(host)) }

// push sends the resources with these hosts as they are now, and returns the version of the push.
func (p *plane) push(hosts ...string) string {
	p.mu.Lock()
	all := p.resourcesLocked()
	some := map[string]*discoveryv3.Resource{}
	var removed []string
	for _, host := range hosts {
		if name := shardName(host); all[name] != nil {
			some[name] = all[name]
		} else {
			removed = append(removed, name)
		}
	}
	response := p.responseLocked(some, removed)
	p.mu.Unlock() // the server calls greet
	return p.server.PushResponses(response, nil)
}

// damageNext makes the resources in the next response differ in a bit from their hashes.
func (p *plane) damageNext() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.damaged = true
}

// resourcesLocked returns the resources by name.
func (p *plane) resourcesLocked() map[string]*discoveryv3.Resource {
	values := map[string][]byte{}
	for _, host := range slices.Sorted(maps.Keys(p.entries)) {
		values[shardName(host)] = append(values[shardName(host)], p.entries[host]...)
	}
	resources := map[string]*discoveryv3.Resource{}
	for name, value := range values {
		resources[name] = named(name, versionOf(value), value)
	}
	return resources
}

// versionOf returns the version of a NameTable of nametap-discovery.
func versionOf(value []byte) string {
	sum := sha256.Sum256(value)
	return "sha256:" + base64.RawStdEncoding.EncodeToString(sum[:8])
}

// named returns a resource with this NameTable.
func named(name, version string, value []byte) *discoveryv3.Resource {
	return &discoveryv3.Resource{Name: name, Version: version, Resource: &anypb.Any{TypeUrl: nds.TypeURL, Value: value}}
}

// responseLocked returns a response with these resources.
func (p *plane) responseLocked(resources map[string]*discoveryv3.Resource, removed []string) *discoveryv3.DeltaDiscoveryResponse {
	p.version++
	r := &discoveryv3.DeltaDiscoveryResponse{SystemVersionInfo: "v" + strconv.Itoa(p.version), TypeUrl: nds.TypeURL, RemovedResources: removed}
	for _, name := range slices.Sorted(maps.Keys(resources)) {
		m := proto.CloneOf(resources[name])
		if p.damaged {
			value := m.GetResource().GetValue()
			value[len(value)-1] ^= 1
		}
		r.Resources = append(r.Resources, m)
	}
	p.damaged = false
	return r
}

// digest returns the checksum of the table.
func (p *plane) digest() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	resources := p.resourcesLocked()
	sum := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(resources)) {
		fmt.Fprintf(sum, "%s %s\n", name, resources[name].GetVersion())
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

// wantStreams waits until there were n streams, and returns the first request of the last one.
func (p *plane) wantStreams(h *harness, n int) firstRequest {
	p.t.Helper()
	if _, err := p.server.WaitStream(h.ctx, n); err != nil {
		p.t.Fatal(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.first) != n {
		p.t.Fatalf("%d streams, want %d", len(p.first), n)
	}
	return p.first[n-1]
}

// wantTable checks that the client has the table of the control plane.
func (p *plane) wantTable(h *harness) {
	p.t.Helper()
	h.wantStatus(func(s nds.Status) bool { return s.Mode == nds.ModeNamed && s.Digest == p.digest() && !s.Stale })
	p.mu.Lock()
	defer p.mu.Unlock()
	h.wantHosts(slices.Collect(maps.Values(p.entries))...)
}

// wantHosts checks that the table in use has these entries.
func (h *harness) wantHosts(entries ...[]byte) {
	h.t.Helper()
	h.wantEntries(h.table.whole(), slices.Concat(entries...))
}

// A fakeTable is a table in use that keeps the entries.
type fakeTable struct {
	mu      sync.Mutex
	shards  [digest.Count][]byte
	applied int // calls of apply
	changed int // shards in the last call
}

func (f *fakeTable) apply(shards map[int][]byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.applied++
	f.changed = len(shards)
	for at, entries := range shards {
		for rest := entries; len(rest) > 0; {
			_, n := protowire.ConsumeBytes(rest[1:])
			if n < 0 {
				return fmt.Errorf("shard %d has %q", at, rest)
			}
			if key, err := digest.KeyOf(rest[:1+n]); err != nil || digest.ShardOf(key) != at {
				return fmt.Errorf("shard %d has %q", at, rest[:1+n])
			}
			rest = rest[1+n:]
		}
		f.shards[at] = entries
	}
	return nil
}

// whole returns all entries.
func (f *fakeTable) whole() []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Concat(f.shards[:]...)
}

// calls returns how often shards were applied, and how many the last time.
func (f *fakeTable) calls() (applied, changed int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.applied, f.changed
}
