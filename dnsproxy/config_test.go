package dnsproxy_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

func TestConfigIsChecked(t *testing.T) { // R7
	t.Parallel()
	for want, cfg := range map[string]dnsproxy.Config{
		"TTL 1ms: want 1s to 596523h14m7s": {TTL: time.Millisecond},
		"TTL -1s":                          {TTL: -time.Second},
		"TTL 876000h":                      {TTL: 100 * 365 * 24 * time.Hour},
		"EDNS UDP size 511: want 512 to 65534 bytes":  {EDNSUDPSize: 511},
		"EDNS UDP size 65535":                         {EDNSUDPSize: 65535},
		"limit of -1 TCP connections: want 1 or more": {MaxTCPConns: -1},
		"limit of -1 queries":                         {Forward: forward.Config{MaxInflight: -1}},
		"upstream timeout -1s":                        {Forward: forward.Config{Timeout: -time.Second}},
		`before-sync "drop"`:                          {BeforeSync: "drop"},
	} {
		if _, err := dnsproxy.New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", cfg, err, want)
		}
	}
}

// What is of use in resolv.conf is used, and what is not is logged.
func TestResolvConf(t *testing.T) { // F5
	t.Parallel()
	logger, log := newLog()
	path := resolvConf(t, "nameserver dns.example", "nameserver 10.0.0.2", "search a..b *.x c.example", "nonsense")
	p := newProxy(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: path}, Logger: logger})
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	if got := fmt.Sprint(p.Upstreams()); got != "[10.0.0.2]" {
		t.Errorf("nameservers %s", got)
	}
	if e := explain(t, p, "web.c.example A"); e.Rule != table.RuleAutopath {
		t.Errorf("web.c.example is answered by %s", e.Rule)
	}
	ignored := []string{`\"nonsense\"`, `nameserver \"dns.example\"`, `search \"a..b\"`, `search \"*.x\"`}
	for _, value := range ignored {
		if log.Count("a value is left out", value) != 1 {
			t.Errorf("no warning names %s", value)
		}
	}
	if n := log.Count("a value is left out"); n != len(ignored) {
		t.Errorf("%d warnings:\n%s", n, log)
	}
}

func TestNoResolvConf(t *testing.T) { // F5, F7
	t.Parallel()
	for _, path := range []string{t.TempDir() + "/missing", t.TempDir()} {
		logger, log := newLog()
		p := start(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: path}, Logger: logger})
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
		p.converse(t, []dialogue{{"web A", webAddress}, {"www.example A", "SERVFAIL"}})
		if !strings.Contains(log.String(), path) {
			t.Errorf("the log does not name %s:\n%s", path, log)
		}
	}
}

func TestMetrics(t *testing.T) { // R4
	synctest.Test(t, func(t *testing.T) {
		fake := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
			return new(dns.Msg).SetRcode(query, 15) // not assigned by any RFC
		})
		p := start(t, dnsproxy.Config{Forward: forward.Config{Upstreams: append(servers(fake), deadServer(t))}})
		p.load(t, hosts{"api.example.com": external("192.0.2.1")})
		p.ask(t, "api.example.com", dns.TypeA)
		p.ask(t, "api.example.com", dns.TypeAAAA)
		p.exchange(t, "tcp", question("api.example.com", dns.TypeA))
		p.ask(t, "other.example.com", dns.TypeNAPTR)
		fake.Handle(fakedns.Answer())
		p.ask(t, "other.example.com", 65280)
		p.exchange(t, "tcp", new(dns.Msg))
		probe := question("id.server", dns.TypeTXT)
		probe.Question[0].Qclass = dns.ClassCHAOS
		p.exchange(t, "udp", probe)
		want := `
		# HELP istio_agent_dns_requests_total DNS requests received.
		# TYPE istio_agent_dns_requests_total counter
		istio_agent_dns_requests_total 6
		# HELP istio_agent_dns_upstream_failures_total DNS requests to nameservers that got no reply.
		# TYPE istio_agent_dns_upstream_failures_total counter
		istio_agent_dns_upstream_failures_total 1
		# HELP istio_agent_dns_upstream_requests_total DNS requests sent to nameservers, retries included.
		# TYPE istio_agent_dns_upstream_requests_total counter
		istio_agent_dns_upstream_requests_total 3
		# HELP nametap_dns_queries_total DNS queries answered, by rcode and source (table, cache, stale, cached_failure, upstream, self).
		# TYPE nametap_dns_queries_total counter
		nametap_dns_queries_total{rcode="NOERROR",source="cache"} 0
		nametap_dns_queries_total{rcode="NOERROR",source="table"} 3
		nametap_dns_queries_total{rcode="NXDOMAIN",source="self"} 0
nametap_dns_queries_total{rcode="NXDOMAIN",source="upstream"} 1
		nametap_dns_queries_total{rcode="other",source="self"} 1
		nametap_dns_queries_total{rcode="other",source="upstream"} 1
	`
		if err := testutil.GatherAndCompare(p.metrics, strings.NewReader(want), requestsMetric,
			"istio_agent_dns_upstream_failures_total", "istio_agent_dns_upstream_requests_total",
			"nametap_dns_queries_total"); err != nil {
			t.Error(err)
		}
	})
}
