package dnsproxy_test

import (
	"fmt"
	"runtime"
	"testing"

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
