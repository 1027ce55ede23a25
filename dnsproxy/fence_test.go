package dnsproxy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
)

// A hostile table makes a query expensive: hosts returns one with n of what grows, and question is asked.
type hostile struct {
	name     string
	hosts    func(n int) map[string]*api.NameTable_NameInfo
	question string
	qtype    uint16
	over     transport
}

// A nameInfo is an entry of a table.
type nameInfo = api.NameTable_NameInfo

// The fence is around the goroutine that reads a socket: what the questions below cost it depends on the
// answer and not on how much of one kind others put into the table.
func hostiles() []hostile {
	addresses := func(n int, format string) []string {
		all := make([]string, n)
		for i := range all {
			all[i] = fmt.Sprintf(format, i/250, i%250+1)
		}
		return all
	}
	kubernetes := func(ips ...string) *nameInfo { return &nameInfo{Ips: ips, Registry: "Kubernetes"} }
	headless := func(ips ...string) *nameInfo {
		return &nameInfo{Ips: ips, Registry: "Kubernetes", Headless: true, Ports: []*api.NameTable_Port{{Name: "http", Number: 80}}}
	}
	several := func(n int, format string, info func(i int) *nameInfo) map[string]*nameInfo {
		all := map[string]*nameInfo{}
		for i := range n {
			all[fmt.Sprintf(format, i)] = info(i)
		}
		return all
	}
	const address, pointer = "10.0.0.1", "1.0.0.10.in-addr.arpa."
	one := func(int) *nameInfo { return kubernetes(address) }
	pods := func(n int) map[string]*nameInfo {
		all := several(n, "p-%d.db.shop.svc.cluster.local", one)
		all["db.shop.svc.cluster.local"] = headless(address)
		return all
	}
	single := func(name string, info func(ips ...string) *nameInfo) func(n int) map[string]*nameInfo {
		return func(n int) map[string]*nameInfo {
			return map[string]*nameInfo{name: info(addresses(n, "10.0.%d.%d")...)}
		}
	}
	shared := func(n int) map[string]*nameInfo {
		return several(50, "db-%d.shop.svc.cluster.local", func(int) *nameInfo { return headless(addresses(n/10, "10.0.%d.%d")...) })
	}
	manyPorts := func(n int) map[string]*nameInfo {
		info := headless(addresses(20, "10.0.%d.%d")...)
		info.Ports = nil
		for i := range n {
			info.Ports = append(info.Ports, &api.NameTable_Port{Name: fmt.Sprintf("p%d", i), Number: uint32(i%60_000 + 1)})
		}
		return map[string]*nameInfo{"db.shop.svc.cluster.local": info}
	}
	onePod := func(n int) map[string]*nameInfo {
		ips := addresses(n, "10.0.%d.%d")
		return map[string]*nameInfo{"db.shop.svc.cluster.local": headless(ips...), "p-0.db.shop.svc.cluster.local": kubernetes(ips...)}
	}
	near := func(ips ...string) *nameInfo {
		info := kubernetes(ips...)
		info.Near = uint32(len(ips) / 2)
		return info
	}
	// Pods with the same addresses, whose ports are on the addresses that are looked at last.
	podsAndAddresses := func(n int) map[string]*nameInfo {
		low, high := addresses(16, "10.0.%d.%d"), addresses(100, "10.1.%d.%d")
		all := append(low, high...)
		hosts := several(n/10, "p-%d.db.shop.svc.cluster.local", func(int) *nameInfo { return kubernetes(all...) })
		db := headless(all...)
		db.Ports = nil
		for i := range 12 {
			db.Ports = append(db.Ports, &api.NameTable_Port{Name: fmt.Sprintf("p%d", i), Number: uint32(1000 + i), Ips: high})
		}
		hosts["db.shop.svc.cluster.local"] = db
		return hosts
	}
	// Pods with as many addresses as are compared, each with as many ports as a Service may have.
	portsAndPods := func(n int) map[string]*nameInfo {
		hosts, all := map[string]*nameInfo{}, []string{}
		for i := range n / 50 {
			ips := addresses(16, fmt.Sprintf("10.%d", i)+".%d.%d")
			hosts[fmt.Sprintf("p-%d.db.shop.svc.cluster.local", i)] = kubernetes(ips...)
			all = append(all, ips[0])
		}
		db := headless(all...)
		db.Ports = nil
		for i := range 100 {
			db.Ports = append(db.Ports, &api.NameTable_Port{Name: fmt.Sprintf("p%d", i), Number: uint32(1000 + i), Ips: all[i*len(all)/100:]})
		}
		hosts["db.shop.svc.cluster.local"] = db
		return hosts
	}
	// Pods whose last address belongs to an endpoint. Of their other addresses, which are compared
	// before, the last one has the port, too: no pod counts at its own endpoint.
	lastAddresses := func(n int) map[string]*nameInfo {
		const shared = "fdff::1"
		before := append(addresses(16, "10.0.%d.%d"), addresses(14, "fd00::%x:%x")...)
		before = slices.Clip(append(before, shared))
		hosts, ports := map[string]*nameInfo{}, append(addresses(n, "fd80::%x:%x"), shared)
		for i := range n {
			pod := kubernetes(append(before, ports[i])...)
			pod.Near = uint32(len(before))
			hosts[fmt.Sprintf("p-%d.db.shop.svc.cluster.local", i)] = pod
		}
		db := headless(append(before, ports...)...)
		db.Ports[0].Ips = ports
		hosts["db.shop.svc.cluster.local"] = db
		return hosts
	}
	// A pod whose last address alone has the ports.
	portsOfPod := func(n int) map[string]*nameInfo {
		const last = "fdff::1"
		pod := kubernetes(append(append(addresses(16, "10.0.%d.%d"), addresses(15, "fd00::%x:%x")...), last)...)
		db := headless(append(addresses(n/5, "fd80::%x:%x"), last)...)
		for i := range 99 {
			db.Ports = append(db.Ports, &api.NameTable_Port{Name: fmt.Sprintf("p%d", i), Number: uint32(1000 + i)})
		}
		return map[string]*nameInfo{"db.shop.svc.cluster.local": db, "p-0.db.shop.svc.cluster.local": pod}
	}
	deep := strings.Repeat("a.", 120) + "example.com."
	return []hostile{
		{name: "PTR of an address of headless Services", hosts: func(n int) map[string]*nameInfo {
			return several(n, "db-%d.shop.svc.cluster.local", func(int) *nameInfo { return headless(address) })
		}, question: pointer, qtype: dns.TypePTR},
		{name: "PTR of an address of hosts", hosts: func(n int) map[string]*nameInfo {
			return several(n, "host-%d.example.com", func(int) *nameInfo { return &nameInfo{Ips: []string{address}, Registry: "External"} })
		}, question: pointer, qtype: dns.TypePTR},
		{name: "PTR of an address of wildcards", hosts: func(n int) map[string]*nameInfo {
			return several(n, "*.host-%d.example.com", func(int) *nameInfo { return &nameInfo{Ips: []string{address}, Registry: "External"} })
		}, question: pointer, qtype: dns.TypePTR},
		{name: "PTR of an address of pods", hosts: pods, question: pointer, qtype: dns.TypePTR, over: overTCP},
		{name: "PTR of a Service with endpoints", hosts: single("db.shop.svc.cluster.local", headless), question: pointer, qtype: dns.TypePTR},
		{name: "A of a host with addresses", hosts: single("web.shop.svc.cluster.local", kubernetes), question: "web.shop.svc.cluster.local.", qtype: dns.TypeA},
		{name: "A of a host with addresses over TCP", hosts: single("web.shop.svc.cluster.local", kubernetes), question: "web.shop.svc.cluster.local.", qtype: dns.TypeA, over: overTCP},
		{name: "A of a host with near addresses", hosts: single("web.shop.svc.cluster.local", near), question: "web.shop.svc.cluster.local.", qtype: dns.TypeA},
		{name: "A of an endpoint", hosts: single("db.shop.svc.cluster.local", headless), question: "10-0-0-1.db.shop.svc.cluster.local.", qtype: dns.TypeA},
		{name: "SRV of endpoints", hosts: single("db.shop.svc.cluster.local", headless), question: "_http._tcp.db.shop.svc.cluster.local.", qtype: dns.TypeSRV},
		{name: "SRV of endpoints over TCP", hosts: single("db.shop.svc.cluster.local", headless), question: "_http._tcp.db.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP},
		{name: "SRV of endpoints of 50 Services over TCP", hosts: shared, question: "_http._tcp.db-7.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP},
		{name: "SRV of ports over TCP", hosts: manyPorts, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP},
		{name: "SRV of a pod with all addresses over TCP", hosts: onePod, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP},
		{name: "SRV of pods with the same addresses", hosts: podsAndAddresses, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV},
		{name: "SRV of pods with another address that has the port", hosts: lastAddresses, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV},
		{name: "SRV of a pod with ports", hosts: portsOfPod, question: "p-0.db.shop.svc.cluster.local.", qtype: dns.TypeSRV},
		{name: "SRV of ports and pods over TCP", hosts: portsAndPods, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP},
		{name: "SRV of pods at one address over TCP", hosts: pods, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP},
		{name: "A below wildcards, with 122 labels", hosts: func(n int) map[string]*nameInfo {
			return several(n, "*."+strings.Repeat("a.", 20)+"b-%d.com", one)
		}, question: deep, qtype: dns.TypeA},
		{name: "A of an absent local-only name", hosts: func(n int) map[string]*nameInfo {
			return several(n, "web-%d.shop.svc.cluster.local", one)
		}, question: "absent.shop.svc.cluster.local.", qtype: dns.TypeA},
		{name: "A of an alias", hosts: func(n int) map[string]*nameInfo {
			return several(n, "alias-%d.shop.svc.cluster.local", func(i int) *nameInfo {
				return &nameInfo{Ips: []string{address}, Registry: "Kubernetes", Alias: fmt.Sprintf("alias-%d.shop.svc.cluster.local", i+1)}
			})
		}, question: "alias-0.shop.svc.cluster.local.", qtype: dns.TypeA},
	}
}

// BenchmarkFence compares what a query costs the goroutine that reads a socket with 1,000 and with 10,000 of what others
// can put into the table. The cost must follow from the answer, the length of which is shown, and not from the table.
func BenchmarkFence(b *testing.B) { // A14
	for _, h := range hostiles() {
		for _, n := range []int{1_000, 10_000} {
			b.Run(fmt.Sprintf("%s/%d", h.name, n), func(b *testing.B) {
				w := newWorld(b, Config{TTL: time.Second, EDNSUDPSize: 1232, Domain: "cluster.local", LocalOnly: []string{"cluster.local"}}, nil)
				w.loadServer(b, h.hosts(n))
				req := new(dns.Msg).SetQuestion(h.question, h.qtype)
				req.SetEdns0(1232, false)
				packet, err := req.Pack()
				if err != nil {
					b.Fatal(err)
				}
				buf, response := make([]byte, 0, dns.MaxMsgSize), []byte(nil)
				for b.Loop() {
					w.task.begin(packet, &arrival{protocol: h.over, client: noClient})
					response, _ = w.server.handler.answerFast(buf, w.task)
				}
				b.ReportMetric(float64(len(response)), "B/answer")
			})
		}
	}
}
