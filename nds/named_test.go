package nds_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

// C11: nametap-discovery's table, and changes of it: each costs the shard of the host.
func TestNamedTable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := startPlane(t, "a.example", "b.example", "c.example")
		h := start(t, options{server: p.server, many: true})
		h.wantACK("v1")
		p.wantTable(h)
		if first := p.wantStreams(h, 1); len(first.announced) != 0 {
			t.Errorf("the client announces %v", first.announced)
		}
		p.set("a.example", "192.0.2.7")
		h.wantACK(p.push("a.example"))
		p.set("New.example", "192.0.2.8") // as its author wrote it
		h.wantACK(p.push("new.example"))
		p.remove("b.example")
		h.wantACK(p.push("b.example"))
		p.wantTable(h)
		if applied, changed := h.table.calls(); applied != 4 || changed != 1 {
			t.Errorf("applied %d times, and %d shards the last time", applied, changed)
		}
		h.wantACK(p.push("c.example")) // as it is already
		h.wantACK(p.push())
		if applied, _ := h.table.calls(); applied != 4 {
			t.Errorf("applied %d times", applied)
		}
	})
}

// C11: a client that comes back announces what it has, and is sent what differs.
func TestNamedTableResumes(t *testing.T) {
	t.Parallel()
	for _, restart := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			p := startPlane(t, "a.example", "b.example", "c.example", "d.example")
			config := stateDir(t.TempDir())
			h := start(t, options{server: p.server, many: true, config: config})
			h.wantACK("v1")
			again := func(stream int, sent ...string) {
				t.Helper()
				if restart {
					h.stop()
					h = start(t, options{server: p.server, many: true, config: config})
				} else {
					p.server.CutStreams(nil)
				}
				first := p.wantStreams(h, stream)
				if len(first.announced) != 4 || !slices.Equal(first.sent, sent) {
					t.Errorf("restart %v: the client announces %v, and is sent %q", restart, first.announced, first.sent)
				}
				p.wantTable(h)
			}
			again(2)
			p.set("c.example", "192.0.2.9")
			again(3, shardName("c.example"))
			p.remove("d.example")
			again(4)
		})
	}
}

// C12: a bit that changes on the way from the control plane is found before the host is in use. The client names the
// resource, ends the stream, and asks for all resources.
func TestWrongHash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := startPlane(t, "a.example", "c.example")
		h := start(t, options{server: p.server, many: true})
		h.wantACK("v1")
		p.set("c.example", "192.0.2.9")
		p.damageNext()
		reason := h.wantAnswer(p.push("c.example")).Rejection().GetMessage()
		for _, part := range []string{`resource "` + shardName("c.example") + `"`, "hash sha256:", "version is sha256:"} {
			if !strings.Contains(reason, part) {
				t.Errorf("the reason is %q, want %q", reason, part)
			}
		}
		if first := p.wantStreams(h, 2); len(first.announced) != 0 || len(first.sent) != 2 {
			t.Errorf("the client comes back with %+v", first)
		}
		p.wantTable(h)
		p.server.CutStreams(nil)
		if first := p.wantStreams(h, 3); len(first.announced) != 2 {
			t.Errorf("then the client announces %+v", first)
		}
		h.wantStatus(func(s nds.Status) bool { return s.Rejected == 1 })
	})
}

// described returns istiod's resource of a host.
func described(t *testing.T, host, ip string) *discoveryv3.Resource {
	t.Helper()
	return named(host, "", plain(t, &api.NameTable{NameInfo: &api.NameTable_NameInfo{Ips: []string{ip}}}))
}

// C2, C11: the table is the union of the named resources, and one without a name is the whole table. istiod has a
// resource for each host, and one that ends a response with all resources.
func TestUnion(t *testing.T) {
	t.Parallel()
	table := func(hosts ...string) (value []byte) {
		for _, host := range hosts {
			value = append(value, entryOf(t, host, &api.NameTable_NameInfo{Ips: []string{"192.0.2.1"}})...)
		}
		return value
	}
	all := named("istio.io/nds/full-snapshot", "", nil)
	steps := []struct {
		what      string
		resources []*discoveryv3.Resource
		removed   []string
		want      []byte
	}{
		{"several", []*discoveryv3.Resource{named("x", "1", table("a", "b")), named("y", "1", table("c"))}, nil, table("a", "b", "c")},
		{"one of them", []*discoveryv3.Resource{named("x", "2", table("b", "d"))}, nil, table("b", "c", "d")},
		{"removed", nil, []string{"x", "unknown"}, table("c")},
		{"heartbeat", []*discoveryv3.Resource{{Name: "y", Version: "1"}, {Name: "unknown"}}, nil, table("c")},
		{"a host twice", []*discoveryv3.Resource{named("z", "1", table("c"))}, nil, table("c", "c")},
		{"no hosts", []*discoveryv3.Resource{named("z", "2", nil)}, nil, table("c")},
		{"whole", []*discoveryv3.Resource{named("", "", table("a", "b"))}, nil, table("a", "b")},
		{"heartbeat of an unknown", []*discoveryv3.Resource{{Name: "y"}}, nil, table("a", "b")},
		{"nothing", nil, nil, table("a", "b")},
		{"whole again", []*discoveryv3.Resource{named("", "", table("b", "c"))}, nil, table("b", "c")},
		{"named", []*discoveryv3.Resource{named("x", "1", table("d"))}, nil, table("d")},
		{"hosts of istiod", []*discoveryv3.Resource{described(t, "e", "192.0.2.1"), described(t, "f", "192.0.2.1"), all}, nil, table("e", "f")},
		{"one host", []*discoveryv3.Resource{described(t, "g", "192.0.2.1")}, []string{"e"}, table("f", "g")},
		{"no hosts of istiod", []*discoveryv3.Resource{all}, nil, nil},
		{"whole after named", []*discoveryv3.Resource{named("", "", table("a"))}, nil, table("a")},
		{"whole removed", nil, []string{""}, nil},
	}
	synctest.Test(t, func(t *testing.T) {
		h := start(t, options{many: true})
		for _, step := range steps {
			h.wantACK(h.server.PushResponses(&discoveryv3.DeltaDiscoveryResponse{
				SystemVersionInfo: step.what, TypeUrl: nds.TypeURL, Resources: step.resources, RemovedResources: step.removed,
			}, nil))
			if got := h.table.whole(); !slices.Equal(entriesIn(t, got), entriesIn(t, step.want)) {
				t.Errorf("%s: the table is %q", step.what, got)
			}
		}
	})
}

// C2, C11: the first response of a stream has what the request did not announce: resources without a version, and one
// without a name.
func TestFirstResponse(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, b := entryOf(t, "a", &api.NameTable_NameInfo{}), entryOf(t, "b", &api.NameTable_NameInfo{})
		h := start(t, options{many: true})
		push := func(version string, resources ...*discoveryv3.Resource) {
			t.Helper()
			h.wantACK(h.server.PushResponses(&discoveryv3.DeltaDiscoveryResponse{
				SystemVersionInfo: version, TypeUrl: nds.TypeURL, Resources: resources,
			}, nil))
		}
		push("v1", named("x", "1", a), named("y", "", b))
		h.wantHosts(a, b)
		h.server.PushResponses(&discoveryv3.DeltaDiscoveryResponse{SystemVersionInfo: "v2", TypeUrl: nds.TypeURL}, nil)
		h.server.CutStreams(nil)
		if _, err := h.server.Wait(h.ctx, func(r fakexds.Request) bool { return r.Stream == 2 && r.Nonce() != "" }); err != nil {
			t.Fatal(err)
		}
		h.wantHosts(a)
	})
}

// C2, C11: in state-of-the-world, the table is the union of all resources of a response, unless it has heartbeats only.
func TestUnionStateOfTheWorld(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, b := entryOf(t, "a", &api.NameTable_NameInfo{}), entryOf(t, "b", &api.NameTable_NameInfo{})
		wrapped := func(m *discoveryv3.Resource) *anypb.Any {
			body, err := anypb.New(m)
			if err != nil {
				t.Fatal(err)
			}
			return body
		}
		bare := func(value []byte) *anypb.Any { return &anypb.Any{TypeUrl: nds.TypeURL, Value: value} }
		h := start(t, options{plane: sotw(), many: true})
		for _, step := range []struct {
			what      string
			resources []*anypb.Any
			want      [][]byte
		}{
			{"several", []*anypb.Any{bare(a), bare(b)}, [][]byte{a, b}},
			{"one", []*anypb.Any{bare(b)}, [][]byte{b}},
			{"wrapped", []*anypb.Any{wrapped(named("", "1", a)), wrapped(named("", "1", b))}, [][]byte{a, b}},
			{"heartbeats", []*anypb.Any{wrapped(&discoveryv3.Resource{})}, [][]byte{a, b}},
			{"named", []*anypb.Any{wrapped(named("x", "1", a)), wrapped(named("y", "1", b))}, [][]byte{a, b}},
			{"heartbeat", []*anypb.Any{wrapped(&discoveryv3.Resource{Name: "x"})}, [][]byte{a, b}},
			{"one named", []*anypb.Any{wrapped(named("y", "2", b))}, [][]byte{b}},
			{"heartbeat and another", []*anypb.Any{wrapped(&discoveryv3.Resource{Name: "y"}), wrapped(named("x", "1", a))}, [][]byte{a, b}},
			{"none", nil, nil},
		} {
			h.wantACK(h.server.PushResponses(nil, &discoveryv3.DiscoveryResponse{VersionInfo: step.what, TypeUrl: nds.TypeURL, Resources: step.resources}))
			if got := h.table.whole(); !slices.Equal(entriesIn(t, got), entriesIn(t, slices.Concat(step.want...))) {
				t.Errorf("%s: the table is %q", step.what, got)
			}
		}
	})
}

// C8: a push with which the table would have more bytes than the memory of the agent permits is rejected.
func TestMaxTable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := startPlane(t, "a.example")
		length := len(p.entries["a.example"])
		h := start(t, options{server: p.server, many: true, config: func(cfg *nds.Config) { cfg.MaxTable = length }})
		h.wantACK("v1")
		p.set("b.example", "192.0.2.1")
		reason := h.wantAnswer(p.push("b.example")).Rejection().GetMessage()
		if !strings.Contains(reason, "would have 72 bytes, and may have 36") {
			t.Errorf("the reason is %q", reason)
		}
		p.remove("a.example")
		h.wantACK(p.push("a.example", "b.example"))
		p.wantTable(h)
	})
}

// C9: pushes do not take more than a tenth of a processor, however fast they come. The answer to a push comes after the
// rest, so that the next push has all that has changed until then.
func TestRestAfterPush(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const long = 20 * time.Millisecond
		var end time.Time
		took := long
		h := start(t, options{many: true, apply: func(map[int][]byte) error {
			<-time.After(took) // a table of many hosts
			end = time.Now()
			return nil
		}})
		h.server.Push(hosts("a.example"))
		h.wantACK("v1")
		if rest := time.Since(end); rest != 9*long {
			t.Errorf("the push is answered after %v, want %v", rest, 9*long)
		}
		took = time.Second
		h.server.Push(hosts("b.example"))
		h.wantACK("v2")
		if rest := time.Since(end); rest != 500*time.Millisecond {
			t.Errorf("a long push is answered after %v", rest)
		}
	})
}
