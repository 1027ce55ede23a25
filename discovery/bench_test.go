package discovery

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	streamv3 "github.com/envoyproxy/go-control-plane/pkg/server/stream/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// BenchmarkEdit measures one edit with 10,000 hosts and one view: parsing the file,
// building, encoding and comparing.
func BenchmarkEdit(b *testing.B) {
	var text strings.Builder
	for i := range 10_000 {
		text.WriteString(svcYAML(fmt.Sprintf("ns%d", i%100), fmt.Sprintf("web%d", i), fmt.Sprintf("10.0.%d.%d", i/250, i%250+1)))
	}
	data := []byte(text.String())
	key := viewKey{View: hosts.View{Namespace: "ns1", Families: bothFamilies}, merge: true}
	b.Run("parse", func(b *testing.B) {
		for b.Loop() {
			parseFile("f.yaml", data)
		}
	})
	objects := objectsOf(parseFile("f.yaml", data).objects)
	all := hosts.New(defaultClusterDomain, 1, hosts.NewVIPs())
	b.Run("compare", func(b *testing.B) {
		for b.Loop() {
			all.Diff(0, objects)
		}
	})
	all.Update(all.Diff(0, objects))
	v := newView(all, key)
	b.Run("build", func(b *testing.B) {
		b.ReportAllocs()
		i := 0
		for b.Loop() {
			i++
			o := objects[0]
			o.Service = &object.Service{ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})}}
			v.update(all.Update(hosts.Change{Updated: []object.Object{o}}).Hosts)
		}
	})
	b.Run("encode", func(b *testing.B) {
		for b.Loop() {
			v.encode(all, map[string]bool{"ns1": true})
		}
	})
}

// BenchmarkRebuild measures what follows after one of 100,000 hosts, in 100 namespaces, has changed:
// with views that no client waits for, and with clients of different namespaces that wait for a push. A
// client that merges several tables gets that of one namespace.
func BenchmarkRebuild(b *testing.B) {
	const all, namespaces = 100_000, 100
	services := make([]object.Object, all)
	for i := range services {
		services[i] = object.Object{
			Key:     object.Key{Kind: object.KindService, Namespace: fmt.Sprintf("ns%d", i%namespaces), Name: fmt.Sprintf("web%d", i)},
			Service: &object.Service{ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})}},
		}
	}
	for _, bc := range []struct {
		name    string
		clients int
		waiting bool
	}{{"alone", 0, false}, {"1 view", 1, false}, {"50 views", 50, false}, {"1 client", 1, true}, {"100 clients", 100, true}} {
		b.Run(bc.name, func(b *testing.B) {
			s, err := New(Config{ConfigDir: b.TempDir(), Registerer: prometheus.NewRegistry()})
			if err != nil {
				b.Fatal(err)
			}
			s.addr = &net.TCPAddr{}
			publish := func(objects ...object.Object) {
				if err := s.publishChanges(fromDir, input{}, hosts.Change{Updated: objects}); err != nil {
					b.Fatal(err)
				}
			}
			publish(services...)
			clients := make([]*benchClient, bc.clients)
			for i := range clients {
				clients[i] = newBenchClient(b, s.cache, fmt.Sprintf("ns%d", i))
				clients[i].ask()
				if clients[i].read(); bc.waiting {
					clients[i].ask()
				}
			}
			changed := services[0]
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				changed.Service = &object.Service{ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)})}}
				publish(changed)
				if bc.waiting {
					b.StopTimer()
					for _, c := range clients {
						c.read()
						c.ask()
					}
					b.StartTimer()
				}
			}
		})
	}
}

// A benchClient is a client of a cache, without a stream.
type benchClient struct {
	b         *testing.B
	cache     *cache
	request   *cachev3.DeltaRequest
	versions  map[string]string
	responses chan cachev3.DeltaResponse
}

func newBenchClient(b *testing.B, c *cache, namespace string) *benchClient {
	b.Helper()
	meta, err := structpb.NewStruct(map[string]any{"NAMESPACE": namespace, "INSTANCE_IPS": "10.0.0.1", "NAMETAP_MERGE": "true"})
	if err != nil {
		b.Fatal(err)
	}
	request := &cachev3.DeltaRequest{TypeUrl: typeURL, Node: &corev3.Node{Id: "sidecar~10.0.0.1~web-0." + namespace + "~x", Metadata: meta}}
	return &benchClient{b, c, request, nil, make(chan cachev3.DeltaResponse, 1)}
}

// ask opens a watch.
func (c *benchClient) ask() {
	c.b.Helper()
	if _, err := c.cache.CreateDeltaWatch(c.request, streamv3.NewDeltaSubscription(nil, nil, c.versions, true), c.responses); err != nil {
		c.b.Fatal(err)
	}
}

// read takes the answer, which must be there.
func (c *benchClient) read() {
	c.b.Helper()
	select {
	case response := <-c.responses:
		c.versions, c.request.ResponseNonce = response.GetNextVersionMap(), "nonce"
	default:
		c.b.Fatal("no response")
	}
}
