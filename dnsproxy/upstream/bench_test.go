package upstream_test

import (
	"context"
	"fmt"
	"syscall"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/upstream"
)

// processorTime returns the CPU time of the process, in nanoseconds, including the
// nameserver's.
func processorTime() int64 {
	var usage syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &usage) // cannot fail
	return usage.Utime.Nano() + usage.Stime.Nano()
}

// measure calls exchange from some goroutines.
func measure(b *testing.B, goroutines int, exchange func() error) {
	b.Helper()
	b.ReportAllocs()
	b.SetParallelism(goroutines)
	b.ResetTimer()
	start := processorTime()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := exchange(); err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.ReportMetric(float64(processorTime()-start)/float64(b.N), "cpu-ns/op")
}

// BenchmarkExchange compares an exchange with a client that opens a socket for it,
// over loopback, with one and with 64 in flight for each processor.
func BenchmarkExchange(b *testing.B) {
	s := serve(b, answers(0))
	for _, goroutines := range []int{1, 64} {
		for name, how := range map[string]upstream.Mode{"udp": upstream.UDPThenTCP, "tcp": upstream.TCPOnly} {
			b.Run(fmt.Sprintf("nametap-%s-%d", name, goroutines), func(b *testing.B) {
				g := client(b, upstream.Config{}).Group([]upstream.Spec{s.spec()}, upstream.Options{})
				packet := query()
				measure(b, goroutines, func() error {
					_, _, err := g.Exchange(context.Background(), packet, how)
					return err
				})
			})
			b.Run(fmt.Sprintf("miekg-%s-%d", name, goroutines), func(b *testing.B) {
				c := dns.Client{Net: name}
				request := new(dns.Msg).SetQuestion("www.example.", dns.TypeA).SetEdns0(1232, false)
				measure(b, goroutines, func() error {
					_, _, err := c.Exchange(request, s.addr.String())
					return err
				})
			})
		}
	}
}
