package reply_test

import (
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/reply"
)

func BenchmarkParse(b *testing.B) {
	for _, name := range []string{"address", "alias", "full"} {
		b.Run(name, func(b *testing.B) {
			msg := replies(b)[name]
			msg.SetEdns0(1232, false)
			wire := pack(b, msg)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := reply.Parse(wire); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkAppend(b *testing.B) {
	for _, name := range []string{"address", "alias", "full"} {
		b.Run(name, func(b *testing.B) {
			r := parse(b, pack(b, replies(b)[name]))
			q := request(b, "www.example.", dns.TypeA)
			dst := make([]byte, 0, 1232)
			b.ReportAllocs()
			for b.Loop() {
				dst = r.Append(dst[:0], q, reply.Age{Cached: true, Seconds: 3})
			}
		})
	}
}
