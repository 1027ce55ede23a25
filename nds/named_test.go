package nds_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/nds"
)

// entryOf returns an entry in wire form.
func entryOf(t *testing.T, host string, info *api.NameTable_NameInfo) []byte {
	t.Helper()
	return plain(t, &api.NameTable{Table: map[string]*api.NameTable_NameInfo{host: info}})
}

// named returns a resource with this NameTable.
func named(name string, value []byte) *discoveryv3.Resource {
	return &discoveryv3.Resource{Name: name, Version: "1", Resource: &anypb.Any{TypeUrl: nds.TypeURL, Value: value}}
}

// C8: a push with which the table would have more bytes than the memory of the agent permits is rejected.
func TestMaxTable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, b := entryOf(t, "a.example", &api.NameTable_NameInfo{}), entryOf(t, "b.example", &api.NameTable_NameInfo{})
		h := start(t, options{many: true, config: func(cfg *nds.Config) { cfg.MaxTable = len(a) }})
		push := func(version string, removed []string, resources ...*discoveryv3.Resource) string {
			return h.server.PushResponses(&discoveryv3.DeltaDiscoveryResponse{
				SystemVersionInfo: version, TypeUrl: nds.TypeURL, Resources: resources, RemovedResources: removed,
			}, nil)
		}
		h.wantACK(push("v1", nil, named("x", a)))
		reason := h.wantAnswer(push("v2", nil, named("y", b))).Rejection().GetMessage()
		if want := fmt.Sprintf("would have %d bytes, and may have %d", 2*len(a), len(a)); !strings.Contains(reason, want) {
			t.Errorf("the reason is %q", reason)
		}
		h.wantACK(push("v3", []string{"x"}, named("y", b)))
		h.wantHosts(b)
	})
}

// C8: the bound counts what many resources take besides their entries.
func TestMaxTableOfManyResources(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := start(t, options{many: true, config: func(cfg *nds.Config) { cfg.MaxTable = 1 << 10 }})
		push := func(from, to int) string {
			var resources []*discoveryv3.Resource
			for i := from; i < to; i++ {
				resources = append(resources, named(strconv.Itoa(i), nil))
			}
			return h.server.PushResponses(&discoveryv3.DeltaDiscoveryResponse{
				SystemVersionInfo: strconv.Itoa(to), TypeUrl: nds.TypeURL, Resources: resources,
			}, nil)
		}
		h.wantACK(push(0, 516))
		reason := h.wantAnswer(push(516, 517)).Rejection().GetMessage()
		if want := "would have 1280 bytes, and may have 1024"; !strings.Contains(reason, want) {
			t.Errorf("the reason is %q", reason)
		}
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

// C11: when a stream ends, the responses that have arrived and are not in use yet are not applied.
func TestEndsWithBacklog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began, applied := make(chan struct{}), 0
		h := start(t, options{many: true, apply: func(map[int][]byte) error {
			if applied++; applied == 1 {
				close(began)
				<-time.After(time.Second)
			}
			return nil
		}})
		h.server.Push(hosts("a.example"))
		<-began
		for i := range 9 {
			h.server.Push(hosts(fmt.Sprintf("%d.example", i)))
		}
		synctest.Wait()
		h.stop()
		if applied != 1 {
			t.Errorf("%d pushes were applied, want 1", applied)
		}
	})
}
