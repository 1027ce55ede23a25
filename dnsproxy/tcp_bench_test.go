package dnsproxy_test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// BenchmarkTCP measures queries over one TCP connection whose client reads promptly, by the length
// of the answers and by how many queries the client sends before it reads: mesh names, and one
// message that is relayed to a nameserver.
func BenchmarkTCP(b *testing.B) {
	p := start(b, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(nameserver(b, fakedns.Answer("www.example. 300 IN A 192.0.2.1")))}})
	p.load(b, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
		"big.shop.svc.cluster.local": service("big", "shop", addrs(1, 3500)...), // 56 kB
	})
	relayed := question("www.example", dns.TypeA)
	relayed.RecursionDesired = false
	for _, c := range []struct {
		name    string
		req     *dns.Msg
		batches []int
	}{
		{"short", question("web", dns.TypeA), []int{1, 50}},
		{"long", question("big", dns.TypeA), []int{1, 50}},
		{"relayed", relayed, []int{1, 50}},
	} {
		for _, batch := range c.batches {
			b.Run(fmt.Sprintf("%s/%d", c.name, batch), func(b *testing.B) { benchmarkTCP(b, p, c.req, batch) })
		}
	}
}

// benchmarkTCP measures queries that are sent batch by batch.
func benchmarkTCP(b *testing.B, p *proxy, req *dns.Msg, batch int) {
	b.Helper()
	packet, err := req.Pack()
	if err != nil {
		b.Fatal(err)
	}
	conn := p.dial(b, "tcp")
	defer conn.Close()
	reader := bufio.NewReaderSize(conn, dns.MaxMsgSize)
	var queries []byte
	for range batch {
		queries = append(binary.BigEndian.AppendUint16(queries, uint16(len(packet))), packet...)
	}
	b.ReportAllocs()
	for sent := 0; b.Loop(); sent++ {
		if sent%batch > 0 {
			continue
		}
		go func() { _, _ = conn.Write(queries) }() // a client that writes everything before it reads would block both sides
		var length [2]byte
		for range batch {
			if _, err = io.ReadFull(reader, length[:]); err == nil {
				_, err = reader.Discard(int(binary.BigEndian.Uint16(length[:])))
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	}
}
