package dnsproxy_test

import (
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A duration is what nametap_dns_request_duration_seconds says of a source.
type duration struct {
	count  uint64
	sum    float64
	native bool // there is a native histogram, too
}

// durations returns the times until answers, by source.
func (p *proxy) durations(tb testing.TB) map[string]duration {
	tb.Helper()
	families, err := p.metrics.Gather()
	if err != nil {
		tb.Fatal(err)
	}
	all := map[string]duration{}
	for _, family := range families {
		if family.GetName() != "nametap_dns_request_duration_seconds" {
			continue
		}
		for _, m := range family.GetMetric() {
			h := m.GetHistogram()
			all[m.GetLabel()[0].GetValue()] = duration{h.GetSampleCount(), h.GetSampleSum(), len(h.GetPositiveSpan()) > 0}
		}
	}
	return all
}

// R4: the time of each answer that waits is measured, over both transports, and of one of 1,024 others.
func TestRequestDurations(t *testing.T) {
	t.Parallel()
	const delay, waiting, rounds, of = 20 * time.Millisecond, 4, 3, 1024
	fake := nameserver(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1"))
	fake.Handle(fakedns.Answer("www.example. 60 IN A 192.0.2.1"), fakedns.Delay(delay))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	names := [waiting]string{"www.example", "a.example", "b.example", "c.example"}
	for i, name := range names {
		p.exchange(t, []string{"udp", "tcp"}[i%2], question(name, dns.TypeA))
	}
	probe := question("id.server", dns.TypeTXT)
	probe.Question[0].Qclass = dns.ClassCHAOS
	p.exchange(t, "udp", probe)
	for _, network := range []string{"udp", "tcp"} {
		conn := p.dial(t, network)
		defer conn.Close()
		for _, name := range []string{"web.shop.svc.cluster.local", "www.example"} {
			packet, err := question(name, dns.TypeA).Pack()
			if err != nil {
				t.Fatal(err)
			}
			for range rounds * of {
				write(t, conn, packet)
				read(t, conn)
			}
		}
	}
	var all map[string]duration
	wait.Until(t, "answers are measured", func() bool {
		all = p.durations(t)
		return all["upstream"].count >= waiting
	})
	if up := all["upstream"]; up.count != waiting || up.sum < waiting*delay.Seconds() || up.sum > wait.Limit.Seconds() || !up.native {
		t.Errorf("%+v of %d answers of a nameserver, each after %v", up, waiting, delay)
	}
	for _, source := range []string{"table", "cache"} {
		// A worker may have read some of the packets.
		if d := all[source]; d.count < 2*rounds-1 || d.count > 2*rounds+2 || d.sum <= 0 || d.sum > float64(d.count)*delay.Seconds() {
			t.Errorf("%+v of %d answers from the %s", d, 2*rounds*of, source)
		}
	}
	if len(all) != 3 {
		t.Errorf("sources %v", all)
	}
}

// R4, A9: answers with the TC bit are counted, whatever has cut them.
func TestTruncatedCount(t *testing.T) {
	t.Parallel()
	var records []string
	for _, addr := range addrs(3, 60) {
		records = append(records, "long.example. 60 IN A "+addr)
	}
	fake := nameserver(t, fakedns.Answer(records...))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	p.load(t, hosts{"long.shop.svc.cluster.local": service("long", "shop", addrs(2, 60)...)})
	for i, c := range []struct {
		name, network string
		truncated     float64
	}{
		{"long.shop.svc.cluster.local", "udp", 1}, // from the table
		{"long.example", "udp", 2},                // from the nameserver
		{"long.example", "udp", 3},                // from the cache
		{"long.shop.svc.cluster.local", "tcp", 3},
		{"long.example", "tcp", 3},
	} {
		resp := p.exchange(t, c.network, question(c.name, dns.TypeA))
		if resp.Truncated != (c.network == "udp") {
			t.Fatalf("%d: %v", i, resp)
		}
		p.await(t, "nametap_dns_truncated_total", c.truncated)
	}
}
