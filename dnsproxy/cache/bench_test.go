package cache_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/nametap/nametap/dnsproxy/cache"
)

// manyKeys returns 10,000 keys, and the indices of the keys that a series of queries has.
func manyKeys() (keys []cache.Key, queries []uint16) {
	const n = 10_000
	for i := range n {
		keys = append(keys, key(fmt.Sprintf("a-service-%d", i)))
	}
	zipf := rand.NewZipf(rand.New(rand.NewPCG(1, 1)), 1.1, 1, n-1)
	for range 1 << 16 {
		queries = append(queries, uint16(zipf.Uint64()))
	}
	return keys, queries
}

func BenchmarkGet(b *testing.B) {
	keys, queries := manyKeys()
	c, clock := cache.New(cache.Config{MaxBytes: 64 << 20, Stale: day}), newClock()
	r := answer(b, "a", 300)
	for _, k := range keys {
		c.Put(k, replied(c, r), clock.Time)
	}
	b.Run("hit", func(b *testing.B) {
		b.ReportAllocs()
		i := 0
		for b.Loop() {
			if c.Get(keys[queries[i&0xFFFF]], clock.Time).State != cache.Fresh {
				b.Fatal("no hit")
			}
			i++
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.RunParallel(func(pb *testing.PB) {
			for i := rand.IntN(1 << 16); pb.Next(); i++ {
				c.Get(keys[queries[i&0xFFFF]], clock.Time)
			}
		})
	})
}

func BenchmarkPut(b *testing.B) {
	keys, _ := manyKeys()
	r := answer(b, "a", 300)
	for name, size := range map[string]int64{"replace": 64 << 20, "evict": 1 << 20} {
		b.Run(name, func(b *testing.B) {
			c, clock := cache.New(cache.Config{MaxBytes: size, Stale: day}), newClock()
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				c.Put(keys[i%len(keys)], replied(c, r), clock.Time)
				i++
			}
		})
	}
}

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
		b.Run(fmt.Sprint(length), func(b *testing.B) {
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
