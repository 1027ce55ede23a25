package forward_test

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// A discard is a client that drops its result.
type discard struct{}

func (discard) Receive(*forward.Result) {}

// BenchmarkInFlight prints what a query in flight takes of the heap, to a nameserver that lives and does not
// know the name.
func BenchmarkInFlight(b *testing.B) {
	const queries = 10_000
	fake := fakedns.Start(b, func(query *dns.Msg, network string) *dns.Msg {
		if strings.HasSuffix(query.Question[0].Name, ".zone.example.") {
			return nil
		}
		return fakedns.Rcode(dns.RcodeRefused)(query, network)
	})
	questions := make([]*forward.Query, queries)
	for i := range questions {
		q := new(wire.Query)
		packet, err := new(dns.Msg).SetQuestion(fmt.Sprintf("n%d.zone.example.", i), dns.TypeA).Pack()
		if err != nil || !q.Parse(packet) {
			b.Fatal(err)
		}
		questions[i] = &forward.Query{Name: q.Name, Cacheable: true, Key: forward.Key(q), Message: packet}
	}
	var total, took uint64
	for b.Loop() {
		f, err := forward.New(forward.Config{
			Upstreams: []upstream.Spec{{Addr: fake.Addr}}, Timeout: time.Hour,
			ResolvConf: filepath.Join(b.TempDir(), "absent"), Logger: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(b.Context())
		ended := make(chan error, 1)
		go func() { ended <- f.Run(ctx) }()
		fake.Reset()
		before, start := heap(), time.Now()
		for _, q := range questions {
			f.Lookup(q)
			f.Begin(q, discard{})
		}
		took += uint64(time.Since(start))
		fake.Reset() // its records are on the heap, too
		total += heap() - before
		cancel()
		if err := <-ended; err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(total)/float64(b.N*queries), "B/query")
	b.ReportMetric(float64(took)/float64(b.N*queries), "ns/query")
}

// heap returns the bytes that are live on the heap.
func heap() uint64 {
	for range 3 { // pools survive a collection
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
