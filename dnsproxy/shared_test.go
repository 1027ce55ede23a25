package dnsproxy_test

import (
	"fmt"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
)

// TestManyHostsOfAnAddress checks that an address that very many hosts share has 64 names, over UDP
// cut with TC and over TCP whole.
func TestManyHostsOfAnAddress(t *testing.T) { // N8, A14
	t.Parallel()
	h := hosts{}
	for i := range 2000 {
		h[fmt.Sprintf("host-%d.example.com", i)] = external("10.0.0.1")
		h[fmt.Sprintf("db-%d.shop.svc.cluster.local", i)] = headless(fmt.Sprintf("db-%d", i), "shop", "10.0.0.2")
	}
	p, _ := startMesh(t, h)
	for _, name := range []string{"1.0.0.10.in-addr.arpa", "2.0.0.10.in-addr.arpa"} {
		req := question(name, dns.TypePTR)
		if resp := p.exchange(t, "udp", req); !resp.Truncated {
			t.Errorf("%s: %d names over UDP without TC", name, len(resp.Answer))
		}
		resp := p.exchange(t, "tcp", req)
		seen := map[string]bool{}
		for _, rr := range resp.Answer {
			seen[rr.(*dns.PTR).Ptr] = true
		}
		if len(seen) != 64 || len(resp.Answer) != 64 || resp.Truncated {
			t.Errorf("%s: %d names", name, len(resp.Answer))
		}
	}
}

// TestManyPods checks that an SRV answer over TCP has all pods of a headless Service, whose host names and addresses
// of both families fit in a message, for each port.
func TestManyPods(t *testing.T) { // A9, A14, D22
	t.Parallel()
	for ports, pods := range map[int]int{1: 1000, 12: 80} {
		h := hosts{}
		var ips []string
		for i := range pods {
			both := []string{fmt.Sprintf("10.0.%d.%d", i/250, i%250+1), fmt.Sprintf("fd00::%x", i+1)}
			ips = append(ips, both...)
			h[fmt.Sprintf("db-%d.db.shop.svc.cluster.local", i)] = &api.NameTable_NameInfo{Ips: both, Registry: "Kubernetes"}
		}
		db := headless("db", "shop", ips...)
		for i := range ports {
			db.Ports = append(db.Ports, &api.NameTable_Port{Name: fmt.Sprintf("p%d", i), Number: uint32(1000 + i)})
		}
		h["db.shop.svc.cluster.local"] = db
		p, _ := startMesh(t, h)
		for range 5 { // the first target is a random one
			resp := p.exchange(t, "tcp", question("db.shop.svc.cluster.local", dns.TypeSRV))
			seen := map[string]bool{}
			for _, rr := range resp.Answer {
				seen[fmt.Sprint(rr.(*dns.SRV).Target, rr.(*dns.SRV).Port)] = true
			}
			if len(seen) != pods*ports || resp.Truncated {
				t.Errorf("%d SRV records of %d pods with %d ports", len(seen), pods, ports)
			}
		}
	}
}

// TestLargest checks that a response of nearly 65,535 bytes is whole over TCP, and that of a longer one there is a sample.
func TestLargest(t *testing.T) { // A9
	t.Parallel()
	const most = (dns.MaxMsgSize - 1 - 12 - 9) / 16 // after the header and the question
	p, _ := startMesh(t, hosts{"x.e": external(addrs(1, most)...), "y.e": external(addrs(1, most+1)...)})
	for _, name := range []string{"x.e", "y.e"} {
		seen := map[string]bool{}
		resp := p.exchange(t, "tcp", question(name, dns.TypeA))
		for _, rr := range resp.Answer {
			seen[rr.String()] = true
		}
		if len(seen) != most || len(resp.Answer) != most || resp.Truncated {
			t.Errorf("%s: %d records, %d of them different, TC is %t; want %d", name, len(resp.Answer), len(seen), resp.Truncated, most)
		}
	}
}
