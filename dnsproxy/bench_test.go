package dnsproxy_test

import (
	"fmt"
	"runtime"
	"strconv"
	"testing"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/table"
)

// mesh returns a table of n hosts: nine of ten are Services, the others ServiceEntries.
func mesh(n int) hosts {
	h := make(hosts, n)
	for i := range n {
		ip := fmt.Sprintf("10.%d.%d.%d", i>>16&255, i>>8&255, i&255)
		if i%10 == 0 {
			h[fmt.Sprintf("api-%d.example.com", i)] = external(ip)
			continue
		}
		name, namespace := fmt.Sprintf("web-%d", i), fmt.Sprintf("shop-%d", i%100)
		h[name+"."+namespace+".svc.cluster.local"] = service(name, namespace, ip)
	}
	return h
}

// BenchmarkLoadOneChanged measures a push that differs in one host from the previous one:
// finding the change, and building the shard.
func BenchmarkLoadOneChanged(b *testing.B) {
	for _, n := range []int{10_000, 100_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			h := mesh(n)
			var pushes [2]map[int][]byte
			var size int
			for i := range pushes {
				h["web-1.shop-1.svc.cluster.local"] = service("web-1", "shop-1", fmt.Sprintf("192.0.2.%d", i))
				table := h.wire(b)
				pushes[i], size = split(b, table), len(table)
			}
			p := newProxy(b, dnsproxy.Config{})
			if err := p.Load(pushes[1]); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if err := p.Load(pushes[i%2]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkTableMemory reports the memory of a host in a table, including its short names
// and three search domains.
func BenchmarkTableMemory(b *testing.B) {
	const n = 100_000
	push := split(b, mesh(n).wire(b))
	var before, after runtime.MemStats
	for b.Loop() {
		runtime.GC()
		runtime.ReadMemStats(&before)
		table, err := table.New("shop-1", "cluster.local", push)
		if err != nil {
			b.Fatal(err)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		runtime.KeepAlive(table)
	}
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "B/host")
}
