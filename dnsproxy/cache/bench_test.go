package cache_test

import (
	"fmt"
	"runtime"
	"strconv"
	"testing"

	"github.com/nametap/nametap/dnsproxy/cache"
)

// BenchmarkBytes prints what an entry takes of the heap, and what Stats says.
func BenchmarkBytes(b *testing.B) {
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	for _, length := range []int{4, 304} {
		b.Run(strconv.Itoa(length), func(b *testing.B) {
			c, clock, before := cache.New(cache.Config{MaxBytes: 64 << 20, Stale: day}), newClock(), heap()
			const entries = 20_000
			for b.Loop() {
				c.Flush(nil)
				for i := range entries {
					label := fmt.Sprintf("host-%d", i)
					c.Put(key(label), replied(c, padded(b, label, length)), clock.Time)
				}
			}
			b.ReportMetric(float64(heap()-before)/entries, "heap-B/entry")
			b.ReportMetric(float64(c.Stats().Bytes)/entries, "counted-B/entry")
		})
	}
}
