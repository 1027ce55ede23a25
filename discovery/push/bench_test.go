package push

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// BenchmarkRebuild measures what follows after one of 100,000 hosts, in 100 namespaces, has changed:
// with views whose clients do not answer, and with clients of different namespaces that wait for a push
// in shards or whole.
func BenchmarkRebuild(b *testing.B) {
	const all, namespaces = 100_000, 100
	services := make([]object.Object, all)
	for i := range services {
		ip := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		services[i] = service(fmt.Sprintf("ns%d", i%namespaces), fmt.Sprintf("web%d", i), ip.String())
	}
	for _, bc := range []struct {
		name    string
		clients int
		mode    string
		waiting bool
	}{
		{"alone", 0, modeWhole, false}, {"50 views", 50, modeNamed, false}, {"1 client of the whole table", 1, modeWhole, true},
		{"1 client of shards", 1, modeNamed, true}, {"100 clients of shards", 100, modeNamed, true},
	} {
		b.Run(bc.name, func(b *testing.B) {
			s := newService()
			s.updateAll(b, hosts.Change{Updated: services})
			clients := make([]*fakeClient, bc.clients)
			for i := range clients {
				clients[i] = join(b, s, fmt.Sprintf("ns%d", i), bc.mode)
				if bc.waiting {
					clients[i].ack()
					clients[i].send = func(any) error { return nil }
				}
			}
			changed := services[0]
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				changed.Service = &object.Service{ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)})}}
				s.updateAll(b, hosts.Change{Updated: []object.Object{changed}})
				if bc.waiting {
					b.StopTimer()
					for _, c := range clients {
						if err := c.handle(&Request{typeURL: TypeURL, nonce: c.nonce}); err != nil {
							b.Fatal(err)
						}
					}
					b.StartTimer()
				}
			}
		})
	}
}
