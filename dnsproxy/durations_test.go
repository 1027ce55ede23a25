package dnsproxy_test

import (
	"bytes"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
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

// R4: the time of each answer that waits is measured, and of one of 1,024 others.
func TestRequestDurations(t *testing.T) {
	t.Run("waits", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := newProxy(t, dnsproxy.Config{BeforeSync: dnsproxy.BeforeSyncHold})
			p.serve(t, "udp", question("web", dns.TypeA))
			if d := p.durations(t)["local"]; d != (duration{1, 2, true}) {
				t.Errorf("%+v of an answer after 2 s", d)
			}
		})
	})
	synctest.Test(t, func(t *testing.T) {
		const of = 1024
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(nameserver(t, anywhere("192.0.2.1")))}})
		conn := p.dial(t, "tcp")
		defer conn.Close()
		p.ask(t, "www.example", dns.TypeA)
		for _, name := range []string{"www.example", "web.shop.svc.cluster.local"} {
			if _, err := conn.Write(bytes.Repeat(framed(t, name, 1), of)); err != nil {
				t.Fatal(err)
			}
			for range of {
				read(t, conn)
			}
		}
		probe := question("id.server", dns.TypeTXT)
		probe.Question[0].Qclass = dns.ClassCHAOS
		p.exchange(t, "udp", probe)
		all := p.durations(t)
		for source, want := range map[string]uint64{"upstream": 1, "local": 2} { // the cache and the table
			if n := all[source].count; n != want {
				t.Errorf("%d of the answers from %s are measured", n, source)
			}
		}
		if len(all) != 2 {
			t.Errorf("sources %v", all)
		}
	})
}

// R4, A9: answers with the TC bit are counted, whatever has cut them.
func TestTruncatedCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
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
	})
}
