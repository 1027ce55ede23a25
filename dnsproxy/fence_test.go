package dnsproxy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/dnsproxy/table"
)

// A hostile table makes a query expensive: hosts returns one with n of what grows, and question is asked.
type hostile struct {
	name     string
	hosts    func(n int) map[string]*api.NameTable_NameInfo
	question string
	qtype    uint16
	over     transport
	// each is true if the answer grows, too: the cost of each byte of it is compared.
	each bool
	// first is true if the first query after each push counts.
	first bool
	// passed is true if the query is passed to a worker, which forwards it.
	passed bool
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
		}, question: pointer, qtype: dns.TypePTR, passed: true},
		{name: "PTR of an address of pods", hosts: pods, question: pointer, qtype: dns.TypePTR, over: overTCP},
		{name: "PTR of a Service with endpoints", hosts: single("db.shop.svc.cluster.local", headless), question: pointer, qtype: dns.TypePTR},
		{name: "A of a host with addresses", hosts: single("web.shop.svc.cluster.local", kubernetes), question: "web.shop.svc.cluster.local.", qtype: dns.TypeA},
		{name: "A of a host with addresses over TCP", hosts: single("web.shop.svc.cluster.local", kubernetes), question: "web.shop.svc.cluster.local.", qtype: dns.TypeA, over: overTCP, each: true},
		{name: "A of a host with near addresses", hosts: single("web.shop.svc.cluster.local", near), question: "web.shop.svc.cluster.local.", qtype: dns.TypeA},
		{name: "A of an endpoint", hosts: single("db.shop.svc.cluster.local", headless), question: "10-0-0-1.db.shop.svc.cluster.local.", qtype: dns.TypeA},
		{name: "SRV of endpoints", hosts: single("db.shop.svc.cluster.local", headless), question: "_http._tcp.db.shop.svc.cluster.local.", qtype: dns.TypeSRV},
		{name: "SRV of endpoints over TCP", hosts: single("db.shop.svc.cluster.local", headless), question: "_http._tcp.db.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP, each: true},
		{name: "SRV of endpoints of 50 Services over TCP", hosts: shared, question: "_http._tcp.db-7.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP, each: true},
		{name: "SRV of ports over TCP", hosts: manyPorts, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP, each: true},
		{name: "SRV of a pod with all addresses over TCP", hosts: onePod, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP},
		{name: "SRV of pods with the same addresses", hosts: podsAndAddresses, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV},
		{name: "SRV of pods with another address that has the port", hosts: lastAddresses, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV},
		{name: "SRV of a pod with ports", hosts: portsOfPod, question: "p-0.db.shop.svc.cluster.local.", qtype: dns.TypeSRV},
		{name: "SRV of ports and pods over TCP", hosts: portsAndPods, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP, each: true},
		{name: "SRV of pods at one address over TCP", hosts: pods, question: "db.shop.svc.cluster.local.", qtype: dns.TypeSRV, over: overTCP, each: true},
		{name: "A below wildcards, with 122 labels", hosts: func(n int) map[string]*nameInfo {
			return several(n, "*."+strings.Repeat("a.", 20)+"b-%d.com", one)
		}, question: deep, qtype: dns.TypeA, passed: true},
		{name: "A of an absent local-only name", hosts: func(n int) map[string]*nameInfo {
			return several(n, "web-%d.shop.svc.cluster.local", one)
		}, question: "absent.shop.svc.cluster.local.", qtype: dns.TypeA, first: true},
		{name: "A of an alias", hosts: func(n int) map[string]*nameInfo {
			return several(n, "alias-%d.shop.svc.cluster.local", func(i int) *nameInfo {
				return &nameInfo{Ips: []string{address}, Registry: "Kubernetes", Alias: fmt.Sprintf("alias-%d.shop.svc.cluster.local", i+1)}
			})
		}, question: "alias-0.shop.svc.cluster.local.", qtype: dns.TypeA},
	}
}

// TestFence checks that a query on the goroutine that reads a socket costs about the same with 1,000 and with
// 10,000 of what others can put into the table: less than three times as much, where growth with the table would
// make it ten times. A query that costs no more than ten mesh names passes, too. None costs more than
// maxMeshNames mesh names over UDP, which all clients share.
func TestFence(t *testing.T) { // A14
	// Not parallel: it compares processor times.
	mesh := cost(t, hostile{
		hosts: func(int) map[string]*nameInfo {
			return map[string]*nameInfo{"web.shop.svc.cluster.local": {Ips: []string{"10.0.0.1"}, Registry: "Kubernetes"}}
		}, question: "web.shop.svc.cluster.local.", qtype: dns.TypeA,
	}, 1)
	for _, h := range hostiles() {
		t.Run(h.name, func(t *testing.T) {
			small, large := price{time: time.Hour}, price{time: time.Hour}
			growth := 0.0
			for range fenceRounds {
				small, large = cheaper(small, cost(t, h, 1_000)), cheaper(large, cost(t, h, 10_000))
				growth = float64(large.time) / float64(small.time)
				if h.each {
					growth *= float64(small.bytes) / float64(large.bytes)
				}
				if h.over == overUDP && large.time > maxMeshNames*mesh.time {
					continue
				}
				few := 10 * mesh.time
				if h.first {
					few = 500 * mesh.time // the processor has nothing of the new table in its cache
				}
				if growth <= 3 || large.time <= few {
					t.Logf("1,000: %8v, %5d bytes   10,000: %8v, %5d bytes   %.1f mesh names", small.time, small.bytes, large.time, large.bytes, float64(large.time)/float64(mesh.time))
					return
				}
			}
			t.Errorf("10,000 cost %.1f times as much as 1,000, and %.1f mesh names: %v, %v", growth, float64(large.time)/float64(mesh.time), large.time, small.time)
		})
	}
}

// fenceRounds is how often prices are taken: other programs make some of them too high.
const fenceRounds = 5

// maxMeshNames is how many mesh names a query over UDP may cost. Beyond it, a few hundred of them a second would stop
// the reader.
const maxMeshNames = 1500

// cheaper returns the lower price.
func cheaper(a, b price) price {
	if a.time < b.time {
		return a
	}
	return b
}

// A price is what an answer costs.
type price struct {
	time  time.Duration // the shortest of several
	bytes int
}

// cost returns the cost of the answer to a question with n of what grows.
func cost(t *testing.T, h hostile, n int) price {
	t.Helper()
	w := newWorld(t, Config{TTL: time.Second, EDNSUDPSize: 1232, Domain: "cluster.local", LocalOnly: []string{"cluster.local"}}, nil)
	w.loadServer(t, h.hosts(n))
	req := new(dns.Msg).SetQuestion(h.question, h.qtype)
	req.SetEdns0(1232, false)
	packet, err := req.Pack()
	if err != nil {
		t.Fatal(err)
	}
	const batches = 20
	queries := 10
	if h.first {
		queries = 1
	}
	buf, scratch := make([]byte, 0, dns.MaxMsgSize), new(table.Scratch)
	best := price{time: time.Hour}
	for i := range batches {
		if h.first {
			w.loadServer(t, h.hosts(n+i))
		}
		start := time.Now()
		for range queries {
			w.task.begin(packet, &arrival{protocol: h.over, client: noClient})
			response, verdict := w.server.handler.answerFast(buf, w.task, scratch)
			if verdict != answered && !h.passed {
				t.Fatalf("%s, %d: not answered by the goroutine that reads", h.name, n)
			}
			best.bytes = len(response)
		}
		best.time = min(best.time, time.Since(start)/time.Duration(queries))
	}
	return best
}
