package discovery

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// The codec's bytes decode to the message, for any message.
func TestCodec(t *testing.T) {
	table := &anypb.Any{TypeUrl: typeURL, Value: []byte("any bytes will do")}
	empty := &anypb.Any{TypeUrl: typeURL}
	for _, m := range []proto.Message{
		&discoveryv3.DiscoveryResponse{},
		&discoveryv3.DiscoveryResponse{VersionInfo: "v", TypeUrl: typeURL, Nonce: "1", Resources: []*anypb.Any{table, empty}},
		&discoveryv3.DiscoveryResponse{Nonce: "1", ControlPlane: nil, Canary: true},
		&discoveryv3.DeltaDiscoveryResponse{},
		&discoveryv3.DeltaDiscoveryResponse{SystemVersionInfo: "v", TypeUrl: typeURL, Nonce: "2", RemovedResources: []string{"a", "b"},
			Resources: []*discoveryv3.Resource{{Name: "shop", Version: "1", Resource: table}, {Resource: empty}}},
		&discoveryv3.DeltaDiscoveryResponse{RemovedResourceNames: []*discoveryv3.ResourceName{{Name: "x"}}},
		&discoveryv3.DiscoveryRequest{VersionInfo: "another message"},
	} {
		data, err := newCodec().Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		got := m.ProtoReflect().New().Interface()
		if err := proto.Unmarshal(data.Materialize(), got); err != nil || !proto.Equal(got, m) {
			t.Errorf("got %v, %v, want %v", got, err, m)
		}
	}
}

// D31, D33: clients that do not read share the bytes of one table, so memory does not
// grow with their number.
func TestSlowClientsShareTheTable(t *testing.T) {
	const hosts, slow, bound = 20000, 60, 40 << 20
	dir := t.TempDir()
	names := make([]string, hosts)
	for i := range names {
		names[i] = fmt.Sprintf("host-%d.of-a-zone-with-a-long-name.example.com", i)
	}
	write(t, dir, "a.yaml", entry("all", "hosts: ["+strings.Join(names, ", ")+"], addresses: [192.0.2.1, 192.0.2.2]"))
	r := start(t, Config{ConfigDir: dir})
	before := heap()
	for i := range slow {
		str, err := r.dial(t).StreamAggregatedResources(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := str.Send(&discoveryv3.DiscoveryRequest{Node: node(t, "shop"), TypeUrl: typeURL}); err != nil {
			t.Fatal(err)
		}
		wait.Until(t, "a push", func() bool {
			return testutil.ToFloat64(r.metrics.pushes.WithLabelValues(variantSotw)) == float64(i+1)
		})
	}
	if more := heap() - before; more > bound {
		t.Errorf("%d clients that do not read cost %d MiB, want at most %d", slow, more>>20, bound>>20)
	} else {
		t.Logf("%d clients that do not read cost %d MiB", slow, more>>20)
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
