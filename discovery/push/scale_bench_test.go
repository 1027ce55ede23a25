package push

import (
	"fmt"
	"net/netip"
	"testing"

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
