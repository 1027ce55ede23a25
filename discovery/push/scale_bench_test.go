package push

import (
	"fmt"
	"net/netip"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// mesh returns Services of a number of namespaces.
func mesh(all, namespaces int) []object.Object {
	services := make([]object.Object, all)
	for i := range services {
		ip := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		services[i] = service(fmt.Sprintf("ns%d", i%namespaces), fmt.Sprintf("web%d", i), ip.String())
	}
	return services
}

// joinAll joins a client in each of many namespaces. They have the table.
func joinAll(tb testing.TB, s *Service, namespaces int) []*fakeClient {
	tb.Helper()
	clients := make([]*fakeClient, namespaces)
	for i := range clients {
		clients[i] = join(tb, s, fmt.Sprintf("ns%d", i), modeNamed)
		clients[i].ack()
		clients[i].send = func(any) error { return nil }
	}
	return clients
}

// BenchmarkNamespaces measures a change of a public host with a client in each of many namespaces, which
// have a host of their own each, or none.
func BenchmarkNamespaces(b *testing.B) {
	for _, n := range []int{1000, 2000, 4000} {
		for _, private := range []bool{false, true} {
			b.Run(fmt.Sprintf("%d private=%v", n, private), func(b *testing.B) {
				services := mesh(n, n)
				for i := range services {
					if o := services[i]; private {
						o.Key.Name = "private"
						o.Service = &object.Service{ClusterIPs: o.Service.ClusterIPs, ExportTo: object.ExportTo{Restricted: true, Namespaces: []string{o.Key.Namespace}}}
						services = append(services, o)
					}
				}
				s := newService()
				s.updateAll(b, hosts.Change{Updated: services})
				clients := joinAll(b, s, n)
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					changed := services[0]
					changed.Service = &object.Service{ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)})}}
					s.updateAll(b, hosts.Change{Updated: []object.Object{changed}})
					for _, c := range clients {
						if err := c.handle(&Request{typeURL: TypeURL, nonce: c.nonce}); err != nil {
							b.Fatal(err)
						}
					}
				}
			})
		}
	}
}

// BenchmarkSidecar measures a change of a Sidecar of one namespace of 500, with 20,000 hosts,
// beside a change of a Service.
func BenchmarkSidecar(b *testing.B) {
	const all, namespaces = 20_000, 500
	for _, sidecar := range []bool{false, true} {
		b.Run(fmt.Sprintf("sidecar=%v", sidecar), func(b *testing.B) {
			services := mesh(all, namespaces)
			s := newService()
			s.updateAll(b, hosts.Change{Updated: services})
			clients := joinAll(b, s, namespaces)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				changed := services[0]
				if changed.Service = (&object.Service{ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)})}}); sidecar {
					changed = object.Object{
						Key:     object.Key{Kind: object.KindSidecar, Namespace: "ns7", Name: "s"},
						Sidecar: &object.Sidecar{Egress: []object.EgressListener{{Hosts: []object.EgressHost{{Namespace: fmt.Sprintf("ns%d", i%namespaces), Host: "*"}}}}},
					}
				}
				s.updateAll(b, hosts.Change{Updated: []object.Object{changed}})
				for _, c := range clients {
					if err := c.handle(&Request{typeURL: TypeURL, nonce: c.nonce}); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}

// BenchmarkFirstClient measures the first client of a namespace, with 50,000 hosts.
func BenchmarkFirstClient(b *testing.B) {
	s := newService()
	s.updateAll(b, hosts.Change{Updated: mesh(50_000, 100)})
	join(b, s, "ns0", modeNamed)
	for i := 0; b.Loop(); i++ {
		c := &session{service: s, variant: variantDelta}
		c.client = subscriber{view: hosts.View{Namespace: fmt.Sprint("x", i), Families: hosts.Families{V4: true, V6: true}}, named: true}
		if err := s.tables.join(c); err != nil {
			b.Fatal(err)
		}
		s.tables.leave(c)
	}
}

// BenchmarkReconnect measures the first request of a client that has all shards.
func BenchmarkReconnect(b *testing.B) {
	s := newService()
	s.updateAll(b, hosts.Change{Updated: mesh(10_000, 100)})
	c := join(b, s, "ns0", modeNamed)
	versions := map[string]string{}
	for name, r := range c.resources() {
		versions[name] = r.version
	}
	node := nodeOf(b, "sidecar~10.0.0.1~web-0.ns0~x", map[string]any{"NAMESPACE": "ns0"})
	node.ClientFeatures = []string{featureNamed}
	data, err := proto.Marshal(&discoveryv3.DeltaDiscoveryRequest{Node: node, TypeUrl: TypeURL, InitialResourceVersions: versions})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		r := newRequest(true)
		if err := Codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, r); err != nil {
			b.Fatal(err)
		}
		c := &session{service: s, variant: variantDelta, send: func(any) error { return nil }, timeout: c.timeout}
		if err := c.handle(r); err != nil {
			b.Fatal(err)
		}
		c.end()
	}
}
