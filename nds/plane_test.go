package nds_test

import (
	"encoding/base64"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

// A plane is a control plane that sends changes of hosts.
type plane struct {
	t      *testing.T
	server *fakexds.Server

	mu      sync.Mutex
	entries map[string][]byte // by host; in wire form, with tag and length
	version int
	// damage, if not nil, changes the next NameTable that is sent.
	damage func([]byte)
	// first are the first requests of streams, with the hosts that were sent in answer.
	first []firstRequest
}

// A firstRequest is what the first request of a stream says.
type firstRequest struct {
	merge, revision string
	digests         []byte
	sent            []string
}

func startPlane(t *testing.T, opts fakexds.Options) *plane {
	t.Helper()
	p := &plane{t: t, entries: map[string][]byte{}}
	opts.First = p.greet
	p.server = serve(t, opts)
	return p
}

// greet answers the first request of a stream with what the client does not have.
func (p *plane) greet(r fakexds.Request) (*discoveryv3.DeltaDiscoveryResponse, *discoveryv3.DiscoveryResponse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fields := r.Node().GetMetadata().GetFields()
	f := firstRequest{merge: fields["NAMETAP_MERGE"].GetStringValue()}
	text := func(key string) []byte {
		value, err := base64.StdEncoding.DecodeString(fields[key].GetStringValue())
		if err != nil {
			p.t.Errorf("%s: %v", key, err)
		}
		return value
	}
	f.revision, f.digests = string(text("NAMETAP_REVISION")), text("NAMETAP_HOSTS")
	complete := digest.All()
	if theirs, ok := digest.ParseDigests(f.digests); ok {
		sums := p.sumsLocked()
		ours := sums.Digests()
		complete = ours.Differing(&theirs)
	}
	for host := range p.entries {
		if complete.Has(digest.ShardOf(host)) {
			f.sent = append(f.sent, host)
		}
	}
	slices.Sort(f.sent)
	p.first = append(p.first, f)
	return p.responsesLocked(f.sent, nil, complete)
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
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{host: info}})
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func (p *plane) remove(host string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.entries, host)
}

// push sends these hosts as they are now, and returns the version of the push.
func (p *plane) push(hosts ...string) string {
	// The server must not be called with the lock held: it calls greet.
	return p.server.PushResponses(p.changeOf(hosts))
}

// changeOf returns a change with these hosts as they are now.
func (p *plane) changeOf(hosts []string) (*discoveryv3.DeltaDiscoveryResponse, *discoveryv3.DiscoveryResponse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var present, removed []string
	for _, host := range hosts {
		if _, ok := p.entries[host]; ok {
			present = append(present, host)
		} else {
			removed = append(removed, host)
		}
	}
	return p.responsesLocked(present, removed, digest.Set{})
}

// damageNext makes the next push differ in a bit from what its checksum says: in the last byte of the
// first entry.
func (p *plane) damageNext() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.damage = func(value []byte) {
		_, n := protowire.ConsumeBytes(value[1:])
		value[n] ^= 1
	}
}

func (p *plane) sumsLocked() digest.Sums {
	var b digest.Sums
	for host, raw := range p.entries {
		at := digest.ShardOf(host)
		b[at] = b[at].Add(digest.Of(raw))
	}
	return b
}

// responsesLocked returns a change with hosts, for both variants.
func (p *plane) responsesLocked(hosts, removed []string, complete digest.Set) (*discoveryv3.DeltaDiscoveryResponse, *discoveryv3.DiscoveryResponse) {
	p.version++
	version := "v" + strconv.Itoa(p.version)
	sums := p.sumsLocked()
	change := &api.NameTable_Change{Removed: removed, Sum: sums.Sum().Bytes(), Revision: []byte("after " + version)}
	if complete != (digest.Set{}) {
		change.Complete = complete[:]
	}
	var value []byte
	for _, host := range hosts {
		value = append(value, p.entries[host]...)
	}
	if p.damage != nil {
		p.damage(value)
		p.damage = nil
	}
	return p.compose(value, change, version)
}

// compose returns a response with a change for both variants.
func (p *plane) compose(entries []byte, change *api.NameTable_Change, version string) (*discoveryv3.DeltaDiscoveryResponse, *discoveryv3.DiscoveryResponse) {
	message, err := proto.Marshal(change)
	if err != nil {
		p.t.Error(err)
	}
	value := protowire.AppendBytes(protowire.AppendTag(entries, 1001, protowire.BytesType), message)
	body := &anypb.Any{TypeUrl: nds.TypeURL, Value: value}
	return &discoveryv3.DeltaDiscoveryResponse{SystemVersionInfo: version, TypeUrl: nds.TypeURL, Resources: []*discoveryv3.Resource{{Resource: body}}},
		&discoveryv3.DiscoveryResponse{VersionInfo: version, TypeUrl: nds.TypeURL, Resources: []*anypb.Any{body}}
}

// digest returns the checksum of the table.
func (p *plane) digest() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.sumsLocked()
	return b.Sum().String()
}

// requests returns the first requests of all streams so far.
func (p *plane) requests() []firstRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.first)
}

// A fakeTable is a table in use that keeps the entries.
type fakeTable struct {
	mu      sync.Mutex
	shards  [digest.Count][]byte
	applied int
	err     error // of the next call
}

func (f *fakeTable) apply(shards map[int][]byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.err; err != nil {
		f.err = nil
		return err
	}
	f.applied++
	for at, entries := range shards {
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

// calls returns how often shards were applied.
func (f *fakeTable) calls() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.applied
}

// entries returns the entries by host.
func (f *fakeTable) entries(t *testing.T) map[string][]byte {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	all := map[string][]byte{}
	for at, shard := range f.shards {
		for len(shard) > 0 {
			_, n := protowire.ConsumeBytes(shard[1:])
			raw := shard[:1+n]
			shard = shard[1+n:]
			var table api.NameTable
			if err := proto.Unmarshal(raw, &table); err != nil {
				t.Fatal(err)
			}
			for host := range table.GetTable() {
				if _, twice := all[host]; twice || digest.ShardOf(host) != at {
					t.Errorf("host %q is in shard %d, twice: %v", host, at, twice)
				}
				all[host] = raw
			}
		}
	}
	return all
}

// wantTable checks that the table in use equals the control plane's.
func (f *fakeTable) wantTable(t *testing.T, p *plane) {
	t.Helper()
	got := f.entries(t)
	p.mu.Lock()
	defer p.mu.Unlock()
	if diff := cmp.Diff(p.entries, got); diff != "" {
		t.Errorf("the table in use differs (-want +got):\n%s", diff)
	}
}

// startHosts runs a client of p with a table of hosts.
func startHosts(t *testing.T, p *plane, config func(*nds.Config)) (*harness, *fakeTable) {
	t.Helper()
	h := start(t, options{server: p.server, config: config, many: true})
	return h, h.table
}
