package nds_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/push"
	"github.com/nametap/nametap/nds"
)

var rounds = flag.Int("servers.rounds", 1, "how many times TestServers makes its 500 changes with each control plane")

// A controlPlane is a control plane of one kind.
type controlPlane interface {
	discoveryv3.AggregatedDiscoveryServiceServer
	// set makes these its resources, and sends clients what they do not have.
	set(all tables)
	// close ends its goroutines.
	close()
}

// A kind is a kind of control plane.
type kind struct {
	name string
	sotw bool // it has no incremental variant
	// layout returns the resources that the hosts make.
	layout func(w *world) tables
	// start returns a control plane that has no resources yet.
	start func() controlPlane
}

// A world is a client, a control plane, and the table that the client should have.
type world struct {
	t      *testing.T
	random *rand.Rand
	kind   kind
	kinds  []kind // the kinds that control planes have in turn
	wire   *wire
	plane  controlPlane
	hosts  table
	places map[string][]string // the resources with a host, where the kind has a choice
	dir    string
	older  []byte // a snapshot that the client wrote earlier
	client *nds.Client
	table  *fakeTable // the client's
	stop   func()
	trace  []string // what was done
}

// TestServers makes 500 random changes with each kind of control plane, and disturbs the connections in between. After
// each step, the client has the table of the control plane.
func TestServers(t *testing.T) { // C1, C2, C3, C5, C7, C8, C9, C11, C12
	t.Parallel()
	all := kinds()
	for seed := range uint64(*rounds) {
		test := func(name string, kinds ...kind) {
			t.Run(fmt.Sprintf("%s/%d", name, seed), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) { newWorld(t, kinds, seed).run(500) })
			})
		}
		for _, kind := range all {
			test(kind.name, kind)
		}
		test("in turn", slices.DeleteFunc(slices.Clone(all), func(k kind) bool { return k.sotw })...)
	}
}

func newWorld(t *testing.T, kinds []kind, seed uint64) *world {
	t.Helper()
	w := &world{
		t: t, random: rand.New(rand.NewPCG(seed, 0)), kinds: kinds, wire: startWire(t, kinds[0].sotw), hosts: table{}, places: map[string][]string{}, dir: t.TempDir(),
	}
	t.Cleanup(func() { w.plane.close() })
	w.newPlane()
	w.newClient()
	return w
}

// newPlane starts a control plane in place of the one before, which may be of another kind.
func (w *world) newPlane() {
	if w.plane != nil {
		w.plane.close()
	}
	w.kind = w.kinds[w.random.IntN(len(w.kinds))]
	w.note("%s", w.kind.name)
	w.plane = w.kind.start()
	w.plane.set(w.kind.layout(w))
	w.wire.mu.Lock()
	defer w.wire.mu.Unlock()
	w.wire.service = w.plane
}

// loseSnapshot removes the snapshot of a client that was stopped, or puts an older one in its place.
func (w *world) loseSnapshot() {
	path := filepath.Join(w.dir, "nametable.snapshot")
	content, err := os.ReadFile(path)
	if next := w.older; next != nil && w.random.IntN(2) == 0 {
		err = errors.Join(err, os.WriteFile(path, next, 0o600))
	} else {
		err = errors.Join(err, os.Remove(path))
	}
	if w.older = content; err != nil {
		w.t.Fatal(err)
	}
}

// newClient starts a client.
func (w *world) newClient() {
	applied := &fakeTable{}
	cfg := testConfig("127.0.0.1:15010")
	cfg.Dial, cfg.StateDir, cfg.Node.AutoAllocate = w.wire.dial, w.dir, true
	client, err := nds.New(cfg, func(shards map[int][]byte) error {
		for at, entries := range shards {
			if len(w.kinds) == 1 && w.kinds[0].name == "discovery" && len(entries) > 0 && bytes.Equal(entries, applied.shards[at]) {
				w.t.Errorf("shard %d is applied again", at)
			}
		}
		return applied.apply(shards)
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.client, w.table = client, applied
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	w.stop = func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
		w.stop = func() {}
	}
	w.t.Cleanup(func() { w.stop() })
}

// run takes a number of steps.
func (w *world) run(steps int) {
	w.settle()
	for range steps {
		w.trace = nil
		w.change()
		for w.random.IntN(6) == 0 {
			w.disturb()
		}
		w.settle()
		if s, ok := w.plane.(*scripted); ok && w.random.IntN(2) == 0 {
			w.misbehave(s)
			w.settle()
		}
		if w.t.Failed() {
			w.t.Fatalf("after %q", w.trace)
		}
	}
}

func (w *world) note(format string, args ...any) {
	w.trace = append(w.trace, fmt.Sprintf(format, args...))
}

// pick returns a random element of list, or "" if there is none.
func (w *world) pick(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[w.random.IntN(len(list))]
}

// names are the names of resources that a third party may choose.
var names = []string{"shop", "a/b", "0", "511", "*.example.com", "istio.io/nds", "*", "full-snapshot", " ", "ümlaut", strings.Repeat("long", 100)}

// change changes the table that should be.
func (w *world) change() {
	host := fmt.Sprintf("%s.%d.Example.com", w.pick([]string{"api", "www", "*", "WEB-0.web", "_sip._tcp", "x"}), w.random.IntN(40))
	before := sortedKeys(w.hosts)
	switch n := w.random.IntN(20); {
	case n == 0:
		clear(w.hosts)
		w.note("empty")
	case n == 1:
		for i := range 30 {
			w.put(fmt.Sprintf("bulk-%d.example.com", i))
		}
		w.note("30 hosts")
	case n < 9:
		w.put(host)
		w.note("put %s", host)
	case n < 13:
		delete(w.hosts, w.pick(before))
		w.note("remove")
	case n < 17 && len(before) > 0:
		host = w.pick(before)
		w.places[host] = w.somewhere()
		w.note("move %s", host)
	case len(before) > 0:
		w.put(w.pick(before))
		w.note("change")
	}
}

// somewhere returns the names of one or two resources.
func (w *world) somewhere() []string {
	places := []string{w.pick(names), w.pick(names)}
	if w.random.IntN(5) > 0 {
		places = places[:1]
	}
	return places
}

// put adds a host, or changes it.
func (w *world) put(host string) {
	if w.places[host] == nil {
		w.places[host] = w.somewhere()
	}
	w.hosts[host] = &api.NameTable_NameInfo{Registry: "External"}
	for range 1 + w.random.IntN(3) {
		w.hosts[host].Ips = append(w.hosts[host].Ips, fmt.Sprintf("192.0.2.%d", w.random.IntN(250)))
	}
}

// disturb does something to the connection, the client or the control plane.
func (w *world) disturb() {
	w.wire.mu.Lock()
	w.wire.gzip, w.wire.drip = w.random.IntN(2) == 0, max(0, w.random.IntN(40)-20)
	w.wire.mu.Unlock()
	switch w.random.IntN(9) {
	case 0:
		w.note("cut")
		w.settle()
		w.wire.cut()
		w.settle()
		if s, ok := w.plane.(*scripted); ok && !w.kind.sotw { // nothing has changed meanwhile
			s.mu.Lock()
			defer s.mu.Unlock()
			want := map[string]string{}
			for name, r := range s.resources {
				if name != "" && r.GetVersion() != "" {
					want[name] = r.GetVersion()
				}
			}
			if !maps.Equal(want, s.announced) {
				w.t.Errorf("the client announces %v, want %v", s.announced, want)
			}
		}
	case 1:
		w.note("GOAWAY")
		w.wire.goAway()
		if w.random.IntN(2) == 0 {
			w.plane.set(w.kind.layout(w))
			w.settle()
		}
		w.wire.cut()
	case 2:
		w.note("RST_STREAM")
		w.settle()
		w.wire.reset()
	case 3:
		w.note("server restarts")
		w.wire.stop()
		<-time.After(time.Duration(w.random.IntN(60)) * time.Second)
		w.newPlane()
		w.wire.listen()
	case 4:
		w.note("client restarts")
		w.settle()
		w.stop()
		if w.random.IntN(2) == 0 {
			w.note("without its snapshot")
			w.loseSnapshot()
		}
		w.newClient()
		w.wire.stop()
		w.wire.listen()
	case 5:
		w.note("cut amidst a push")
		w.plane.set(w.kind.layout(w))
		w.wire.cut()
	case 6:
		w.note("a minute")
		w.settle() // so that the client has a stream
		<-time.After(time.Minute)
		w.settle()
	case 7:
		for range 3 {
			w.change()
			w.plane.set(w.kind.layout(w))
		}
		w.note("pushed at once")
	case 8:
		s, ok := w.plane.(*scripted)
		if !ok || s.unversioned {
			return
		}
		w.note("bad greeting")
		w.settle()
		s.mu.Lock()
		s.greeting = &discoveryv3.Resource{Name: "bad", Resource: &anypb.Any{TypeUrl: "bad"}}
		s.mu.Unlock()
		w.wire.cut()
	}
}

// misbehave sends something that the control plane would not send by itself, or that is wrong.
func (w *world) misbehave(s *scripted) {
	response := &discoveryv3.DeltaDiscoveryResponse{TypeUrl: typeURL}
	var all, some []*discoveryv3.Resource // as they are
	for _, name := range sortedKeys(s.resources) {
		all = append(all, s.resources[name])
		if s.all || w.random.IntN(3) == 0 {
			some = append(some, s.resources[name])
		}
	}
	response.Resources = some
	switch n := w.random.IntN(7); {
	case n == 0 && w.kind.sotw:
	case n == 0:
		w.note("nothing")
		response.Resources = nil
	case n == 1:
		w.note("unchanged")
	case n == 2 && !s.all:
		w.note("removes what is not there")
		response.RemovedResources = []string{"no such", "*"}
		if _, ok := s.resources["*"]; ok {
			response.RemovedResources = nil
		}
	case n == 3 && len(some) > 0 && some[0].GetName() != "":
		w.note("heartbeats")
		response.Resources = nil
		for _, r := range some[:1+w.random.IntN(len(some))] {
			response.Resources = append(response.Resources, &discoveryv3.Resource{Name: r.GetName(), Version: r.GetVersion(), Ttl: durationpb.New(time.Second)})
		}
	case n == 4 && s.marker != nil:
		w.note("snapshot")
		response.Resources = append(all, s.marker)
	case n == 5 && !s.all:
		w.note("whole, and named again")
		response.Resources = []*discoveryv3.Resource{{Resource: bodyOf(w.hosts.bytes())}}
		s.push(response)
		if response.Resources = all; len(all) == 0 {
			response.RemovedResources = []string{""}
		}
	default:
		w.spoil(response)
		before := w.client.Status().Rejected
		s.push(response)
		w.settle()
		if after := w.client.Status().Rejected; after != before+1 {
			w.t.Errorf("%d pushes are rejected, and %d before", after, before)
		}
		return
	}
	s.push(response)
}

// spoil makes a response one that is rejected: with a change of the table and a resource that is wrong.
func (w *world) spoil(response *discoveryv3.DeltaDiscoveryResponse) {
	good := table{"spoilt.example.com": {Ips: []string{"192.0.2.1"}}}.bytes()
	bad := &discoveryv3.Resource{Name: "bad", Resource: bodyOf(good)}
	const other = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	switch w.random.IntN(7) {
	case 0:
		w.note("malformed")
		bad.Resource.Value = good[:len(good)-1-w.random.IntN(10)]
	case 1:
		w.note("malformed entry")
		bad.Resource.Value = protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), []byte{0xff})
	case 2:
		w.note("other type")
		bad.Resource.TypeUrl = other
	case 3:
		w.note("wrong hash")
		bad.Version = hashOf([]byte("other"))
	case 4:
		w.note("twice")
		bad.Name = "good"
	case 5:
		w.note("response of another type")
		response.TypeUrl = other
	case 6:
		w.note("an entry without its host")
		bad.Name, bad.Resource.Value = "", protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), nil)
	}
	response.Resources = append([]*discoveryv3.Resource{{Name: "good", Version: "1", Resource: bodyOf(good)}}, response.GetResources()...)
	at := w.random.IntN(len(response.GetResources()) + 1)
	response.Resources = slices.Insert(response.GetResources(), at, bad)
}

// settle makes the table that of the control plane, and waits until the client has it.
func (w *world) settle() {
	w.t.Helper()
	w.plane.set(w.kind.layout(w))
	var want, got []string
	for range 1000 {
		<-time.After(2 * time.Second) // a stream that is about to end has ended then
		synctest.Wait()
		want, got = nil, nil
		for _, hosts := range w.kind.layout(w) {
			want = append(want, hosts.addresses()...)
		}
		for _, entry := range entriesIn(w.t, w.table.whole()) {
			var one api.NameTable
			if err := proto.Unmarshal([]byte(entry), &one); err != nil {
				w.t.Fatal(err)
			}
			got = append(got, table(one.GetTable()).addresses()...)
		}
		slices.Sort(want)
		slices.Sort(got)
		scripted, ok := w.plane.(*scripted)
		quiet := !ok || scripted.quiet()
		if s := w.client.Status(); quiet && slices.Equal(want, got) && s.Connected && !s.Stale {
			w.compareDigests(s)
			return
		}
		if ok && quiet { // what was rejected with another resource is sent again
			scripted.set(w.kind.layout(w))
		}
	}
	w.t.Fatalf("after %q, the client does not have the table (-want +got):\n%s", w.trace, cmp.Diff(want, got))
}

// compareDigests checks that the client and nametap-discovery show the same checksum once the client has answered.
func (w *world) compareDigests(s nds.Status) {
	d, ok := w.plane.(*discovery)
	if !ok || w.kind.sotw {
		return
	}
	for a := range d.Agents("") {
		if a.Digest != s.Digest && a.State == push.StateCurrent {
			w.t.Errorf("the client shows the digest %q, and nametap-discovery %q", s.Digest, a.Digest)
		}
	}
}

// addresses returns a text for each host.
func (t table) addresses() (texts []string) {
	for host, info := range t {
		ips := slices.Compact(slices.Sorted(slices.Values(info.GetIps())))
		texts = append(texts, fmt.Sprint(strings.ToLower(host), ips))
	}
	return texts
}

// The kinds of control planes.
func kinds() []kind {
	whole := func(w *world) tables { return tables{"": maps.Clone(w.hosts)} }
	byPlace := func(places func(w *world, host string) []string) func(w *world) tables {
		return func(w *world) tables {
			all := tables{}
			for host, info := range w.hosts {
				for _, name := range places(w, host) {
					if all[name] == nil {
						all[name] = table{}
					}
					all[name][host] = info
				}
			}
			return all
		}
	}
	chosen := byPlace(func(w *world, host string) []string { return w.places[host] })
	script := func(f form) func() controlPlane {
		return func() controlPlane { return &scripted{form: f, sessions: map[*session]struct{}{}} }
	}
	plain := func(name string, hosts table) *discoveryv3.Resource {
		return &discoveryv3.Resource{Name: name, Resource: bodyOf(hosts.bytes())}
	}
	versioned := func(name string, hosts table) *discoveryv3.Resource {
		r := plain(name, hosts)
		r.Version = hashOf(r.GetResource().GetValue())
		return r
	}
	// Of a third party, the same bytes have another version after a restart.
	thirdParty := func(f form) func() controlPlane {
		starts := 0
		return func() controlPlane {
			starts++
			prefix := fmt.Sprint(starts, "-")
			f.resource = func(name string, hosts table) *discoveryv3.Resource {
				r := versioned(name, hosts)
				r.Version = strings.Replace(r.GetVersion(), "nt:", prefix, 1)
				return r
			}
			return script(f)()
		}
	}
	ofHost := func(host string, hosts table) *discoveryv3.Resource {
		value, err := proto.Marshal(&api.NameTable{NameInfo: hosts[host]})
		if err != nil {
			panic(err) // a mistake in the test
		}
		return &discoveryv3.Resource{Name: host, Resource: bodyOf(value)}
	}
	marker := &discoveryv3.Resource{Name: snapshotName, Resource: &anypb.Any{TypeUrl: typeURL}}
	ttl := time.Minute
	return []kind{
		{name: "istiod", layout: whole, start: script(form{resource: plain, all: true})},
		{name: "istiod-sotw", sotw: true, layout: whole, start: script(form{resource: plain, all: true})},
		{
			name:   "istiod-hosts",
			layout: byPlace(func(_ *world, host string) []string { return []string{host} }),
			start:  script(form{resource: ofHost, unversioned: true, marker: marker}),
		},
		{
			name:   "shards",
			layout: byPlace(func(_ *world, host string) []string { return []string{strconv.Itoa(digest.ShardOf(host))} }),
			start:  script(form{resource: versioned}),
		},
		{name: "discovery", layout: whole, start: newDiscovery},
		{name: "discovery-sotw", sotw: true, layout: whole, start: newDiscovery},
		{name: "third-party", layout: chosen, start: thirdParty(form{})},
		{name: "third-party-unversioned", layout: chosen, start: script(form{resource: plain, unversioned: true})},
		{name: "linear", layout: chosen, start: newLinear},
		{name: "linear-whole", layout: whole, start: newLinear},
		{name: "snapshots", layout: chosen, start: func() controlPlane { return newSnapshots(nil) }},
		{name: "snapshots-sotw", sotw: true, layout: chosen, start: func() controlPlane { return newSnapshots(&ttl) }},
		{name: "third-party-sotw", sotw: true, layout: chosen, start: thirdParty(form{all: true})},
	}
}

const (
	typeURL      = nds.TypeURL
	snapshotName = "istio.io/nds/full-snapshot"
)

// A table has the hosts of a NameTable.
type table map[string]*api.NameTable_NameInfo

// tables are the resources of a control plane, by name.
type tables map[string]table

// bytes returns the NameTable in wire form.
func (t table) bytes() []byte {
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(&api.NameTable{Table: t})
	if err != nil {
		panic(err) // a mistake in the test
	}
	return value
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// bodyOf returns a NameTable as the body of a resource.
func bodyOf(value []byte) *anypb.Any { return &anypb.Any{TypeUrl: typeURL, Value: value} }

// hashOf is the version of nametap-discovery's resources.
func hashOf(value []byte) string {
	sum := sha256.Sum256(value)
	return "nt:" + base64.RawStdEncoding.EncodeToString(sum[:8])
}

// worldOf returns a response in state-of-the-world form: a resource with a name, or without a body, is wrapped.
func worldOf(r *discoveryv3.DeltaDiscoveryResponse) *discoveryv3.DiscoveryResponse {
	world := &discoveryv3.DiscoveryResponse{VersionInfo: r.GetSystemVersionInfo(), TypeUrl: r.GetTypeUrl(), Nonce: r.GetNonce()}
	for _, resource := range r.GetResources() {
		body := resource.GetResource()
		if resource.GetName() != "" || body == nil {
			wrapped, err := anypb.New(resource)
			if err != nil {
				panic(err) // a mistake in the test
			}
			body = wrapped
		}
		world.Resources = append(world.Resources, body)
	}
	return world
}
