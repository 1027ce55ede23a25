package discovery

import (
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/nametap/nametap/internal/testkit/wait"
)

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
			return r.metric(t, "pushes_total", variantSotw) == float64(i+1)
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

// TestClientThatAsksAndDoesNotRead checks that clients that ask for their table again and again, or acknowledge
// pushes that they have not read, and never read one, do not delay others.
func TestClientThatAsksAndDoesNotRead(t *testing.T) { // D33
	t.Parallel()
	const hosts = 20000
	dir := t.TempDir()
	names := make([]string, hosts)
	for i := range names {
		names[i] = fmt.Sprintf("host-%d.of-a-zone-with-a-long-name.example.com", i)
	}
	many := entry("all", "hosts: ["+strings.Join(names, ", ")+"], addresses: [192.0.2.1, 192.0.2.2]")
	write(t, dir, "a.yaml", many)
	r := start(t, Config{ConfigDir: dir})
	good := openMerging(t, variantDelta, r, nil)
	good.merge()
	for range 2 * runtime.GOMAXPROCS(0) {
		str, err := r.dial(t).StreamAggregatedResources(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for i := range 10 {
			request := &discoveryv3.DiscoveryRequest{Node: node(t, "shop"), TypeUrl: typeURL}
			if i%2 == 1 {
				request.ResponseNonce = strconv.Itoa(i/2 + 1)
			}
			if err := str.Send(request); err != nil {
				t.Fatal(err)
			}
		}
	}
	wait.Until(t, "the clients are pushed to", func() bool {
		return r.metric(t, "pushes_total", variantSotw) >= float64(2*runtime.GOMAXPROCS(0))
	})
	for i := range 3 {
		write(t, dir, "b.yaml", svcYAML("shop", "web", fmt.Sprint("10.0.0.", i+1)))
		good.want("web", "")
	}
}
