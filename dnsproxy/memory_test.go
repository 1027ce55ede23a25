package dnsproxy_test

import (
	"net"
	"runtime"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// Long queries in flight are bounded in bytes: further ones are refused at once, mesh names
// are still answered, and when the first ones have ended others are forwarded.
func TestLongQueriesInFlight(t *testing.T) { // F20, F10
	silent := nameserver(t, fakedns.Silence)
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(silent)}})
	req := withEDNS(question("www.example", dns.TypeA), 1232)
	req.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_LOCAL{Code: dns.EDNS0LOCALSTART, Data: make([]byte, 50_000)}}
	const connections, queries = 300, 20
	conns := make([]net.Conn, connections)
	for i := range conns {
		conns[i] = p.dial(t, "tcp")
		defer conns[i].Close()
	}
	var most uint64
	for n := range queries {
		for i, conn := range conns {
			req.Id = uint16(n*connections + i)
			packet, err := req.Pack()
			if err != nil {
				t.Fatal(err)
			}
			write(t, conn, packet)
		}
		var memory runtime.MemStats
		runtime.ReadMemStats(&memory)
		most = max(most, memory.HeapInuse+memory.StackInuse)
		p.converse(t, []dialogue{{"web A", "web. A 10.0.0.1"}})
	}
	t.Logf("%d MiB at the most", most>>20)
	if most > 256<<20 {
		t.Errorf("%d MiB in use", most>>20)
	}
	for _, conn := range conns {
		for range queries {
			if resp := parse(t, read(t, conn)); resp.Rcode != dns.RcodeServerFailure {
				t.Errorf("%v", resp)
			}
		}
	}
	if p.count(t, "nametap_dns_overflows_total") == 0 {
		t.Error("no query was refused")
	}
	silent.Handle(anywhere("192.0.2.1"))
	if got := outcome(p.exchange(t, "tcp", req)); got != "www.example. A 192.0.2.1" {
		t.Errorf("afterwards: %s", got)
	}
}
