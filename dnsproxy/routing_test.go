package dnsproxy_test

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// anywhere answers A for every name, with one address.
func anywhere(address string) fakedns.Handler {
	return func(query *dns.Msg, network string) *dns.Msg {
		return fakedns.Answer(query.Question[0].Name+" 60 IN A "+address)(query, network)
	}
}

func TestRoutes(t *testing.T) { // F12
	t.Parallel()
	world, corp, lab := nameserver(t, anywhere("192.0.2.1")), nameserver(t, anywhere("192.0.2.2")), nameserver(t, anywhere("192.0.2.3"))
	p := startForwarder(t, dnsproxy.Config{
		Forward: forward.Config{Upstreams: servers(world),
			Routes: []forward.Route{
				{Suffix: "Corp.example.", Servers: servers(corp)},
				{Suffix: "lab.corp.example", Servers: servers(lab)},
			}},
	})
	p.converse(t, []dialogue{
		{"www.example A", "www.example. A 192.0.2.1"},
		{"xcorp.example A", "xcorp.example. A 192.0.2.1"},
		{"corp.example A", "corp.example. A 192.0.2.2"},
		{"A.cORP.example A", "A.cORP.example. A 192.0.2.2"},
		{"lab.corp.example A", "lab.corp.example. A 192.0.2.3"},
		{"x.lab.corp.example A", "x.lab.corp.example. A 192.0.2.3"},
		{"web A", "web. A 10.0.0.1"}, // the table's own
	})
	if names := forwardedNames(world); len(names) != 2 {
		t.Errorf("the world was asked for %v", names)
	}
	for _, cfg := range []dnsproxy.Config{
		{Forward: forward.Config{Routes: []forward.Route{{Suffix: "corp..example", Servers: servers(corp)}}}},
		{Forward: forward.Config{Routes: []forward.Route{{Suffix: "corp.example"}}}},
		{Bypass: []string{"*.corp.example"}},
		{LocalOnly: []string{""}},
	} {
		if _, err := dnsproxy.New(cfg); err == nil || !strings.Contains(err.Error(), "want a") {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

func TestBypass(t *testing.T) { // F12
	t.Parallel()
	world := nameserver(t, anywhere("192.0.2.1"))
	p := start(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(world)}, Bypass: []string{"shop.svc.cluster.local"}})
	bypassed := []dialogue{{"web.shop.svc.cluster.local A", "web.shop.svc.cluster.local. A 192.0.2.1"}}
	p.converse(t, bypassed) // also before there is a table
	p.load(t, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
		"web.mall.svc.cluster.local": service("web", "mall", "10.0.0.2"),
	})
	p.converse(t, append(bypassed, dialogue{"web.mall A", "web.mall. A 10.0.0.2"}))
	if e := explain(t, p, "web.shop.svc.cluster.local A"); fmt.Sprint(e.Rows) != "[F12]" {
		t.Errorf("explained by %v: %s", e.Rows, e.Why)
	}
}

func TestLocalOnly(t *testing.T) { // F12
	t.Parallel()
	world := nameserver(t, anywhere("192.0.2.1"))
	p := start(t, dnsproxy.Config{
		Forward: forward.Config{Upstreams: servers(world)}, LocalOnly: []string{"svc.cluster.local", "db.example.com"}, TTL: 7 * time.Second,
	})
	p.load(t, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"),
		"db.example.com":             external("10.0.0.2"),
	})
	p.converse(t, []dialogue{
		{"web.shop.svc.cluster.local A", "web.shop.svc.cluster.local. A 10.0.0.1"},
		{"none.shop.svc.cluster.local A", "NXDOMAIN"},
		{"none.shop.svc.cluster.local TXT", "NXDOMAIN"},
		{"db.example.com MX", "NODATA db.example.com."}, // known, and not asked for elsewhere
		{"x.db.example.com A", "NXDOMAIN"},
		{"www.example A", "www.example. A 192.0.2.1"},
	})
	req := withEDNS(question("nOne.svc.cluster.local", dns.TypeA), 1232)
	resp := p.exchange(t, "udp", req)
	soa, ok := append(resp.Ns, &dns.A{})[0].(*dns.SOA)
	if !ok || soa.Hdr.Name != "svc.cluster.local." || soa.Hdr.Ttl != 7 || soa.Minttl != 7 || !resp.Authoritative || resp.IsEdns0() == nil {
		t.Errorf("want NXDOMAIN with the SOA of the suffix:\n%v", resp)
	}
	if asked := world.Queries(); len(asked) != 1 {
		t.Errorf("asked elsewhere: %v", asked)
	}
	if e := explain(t, p, "none.svc.cluster.local A"); fmt.Sprint(e.Rows) != "[F12]" || e.Source != "self" {
		t.Errorf("explained by %v from %s: %s", e.Rows, e.Source, e.Why)
	}
}

// expandConf is a resolv.conf as Kubernetes writes it.
func expandConf(tb testing.TB) string {
	tb.Helper()
	return resolvConf(tb, "search shop.svc.cluster.local svc.cluster.local cluster.local corp.example", "options ndots:5")
}

func TestSearchListOfMeshNamesOnly(t *testing.T) { // F13
	t.Parallel()
	fake := nameserver(t, fakedns.Answer("www.example.org. 60 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: expandConf(t), Upstreams: servers(fake)}})
	p.converse(t, []dialogue{
		{"web.corp.example A", "web.corp.example. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.1"},
		{"www.example.org.shop.svc.cluster.local A", "NXDOMAIN"},
	})
}

func TestResolvConfIsWatched(t *testing.T) { // F5
	t.Parallel()
	path := resolvConf(t, "nameserver 192.0.2.53", "search a.example")
	logger, log := newLog()
	p := start(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: path}, Logger: logger})
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	upstreams := func() string { return fmt.Sprint(p.Upstreams()) }
	replace := func(text string) {
		t.Helper()
		next := filepath.Join(t.TempDir(), "next")
		if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, path); err != nil {
			t.Fatal(err)
		}
	}
	replace("nameserver 192.0.2.54\nnameserver 192.0.2.55\nsearch b.example\n")
	wait.Until(t, "the new nameservers", func() bool { return upstreams() == "[192.0.2.54 192.0.2.55]" })
	p.converse(t, []dialogue{{"web.b.example A", "web.b.example. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.1"}})
	if e := explain(t, p, "web.a.example A"); e.Rule != table.RuleNone {
		t.Errorf("web.a.example is still answered by %s", e.Rule)
	}
	replace("nothing that is of use\n")
	p.await(t, "nametap_resolv_conf_errors_total", 1)
	if got := upstreams(); got != "[192.0.2.54 192.0.2.55]" || !strings.Contains(log.String(), path) {
		t.Errorf("with a broken file: %s\n%s", got, log)
	}
}

// Other nameservers may have other answers.
func TestNewNameserversNewAnswers(t *testing.T) { // F5
	t.Parallel()
	on53(t, "127.0.53.1", anywhere("192.0.2.1"))
	on53(t, "127.0.53.2", anywhere("192.0.2.2"))
	path := resolvConf(t, "nameserver 127.0.53.1")
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: path}})
	p.converse(t, []dialogue{{"www.example A", "www.example. A 192.0.2.1"}})
	if err := os.WriteFile(path, []byte("nameserver 127.0.53.2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the new nameserver's answer", func() bool {
		return outcome(p.ask(t, "www.example", dns.TypeA)) == "www.example. A 192.0.2.2"
	})
}

// A nameserver that is this agent would be asked by itself.
func TestSelfIsNoNameserver(t *testing.T) { // F6, F7
	t.Parallel()
	logger, log := newLog()
	free := nameserver(t, fakedns.Silence)
	free.Close()
	p := start(t, dnsproxy.Config{Addr: free.Addr.String(), Forward: forward.Config{Upstreams: servers(free)}, Logger: logger})
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	if got := p.Upstreams(); len(got) > 0 {
		t.Errorf("nameservers: %v", got)
	}
	p.converse(t, []dialogue{{"www.example A", "SERVFAIL"}, {"web A", "web. A 10.0.0.1"}})
	if !strings.Contains(log.String(), free.Addr.String()) || !strings.Contains(log.String(), "there is no nameserver") {
		t.Errorf("the log does not name %s, and that it is the only one:\n%s", free.Addr, log)
	}
	if up, self := p.UpstreamStatus(), p.SelfUpstreams(); len(up) > 0 || len(self) != 1 || self[0].Addr != free.Addr {
		t.Errorf("nameservers: %v, left out: %v", up, self)
	}
}

// forwardTo is a forwarder as simple as there are.
func forwardTo(address func() string) fakedns.Handler {
	return func(query *dns.Msg, _ string) *dns.Msg {
		id := query.Id
		query.Id = dns.Id()
		client := dns.Client{Timeout: 5 * time.Second}
		reply, _, err := client.Exchange(query, address())
		if err != nil {
			return nil
		}
		reply.Id = id
		return reply
	}
}

func TestLoopsAreFound(t *testing.T) { // F6
	// Not in parallel: it counts the goroutines of the process.
	good := nameserver(t, anywhere("192.0.2.1"))
	for _, others := range [][]*fakedns.Server{nil, {good}} {
		var us atomic.Value // our own address, once it is known
		loop := nameserver(t, forwardTo(func() string { return us.Load().(string) }))
		logger, log := newLog()
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(append([]*fakedns.Server{loop}, others...)...)}, Logger: logger})
		us.Store(p.addr("udp"))
		before := runtime.NumGoroutine()
		began := time.Now()
		go p.ask(t, "www.example", dns.TypeA)
		looping := func() bool {
			for _, s := range p.UpstreamStatus() {
				if s.Spec.Addr == loop.Addr {
					return s.State == upstream.Looping
				}
			}
			return false
		}
		most := 0
		wait.Until(t, "the loop is found", func() bool {
			most = max(most, runtime.NumGoroutine())
			return looping()
		})
		t.Logf("found after %s, with at most %d goroutines more", time.Since(began), most-before)
		if most-before > 100 {
			t.Errorf("%d goroutines before, %d in between", before, most)
		}
		wait.Until(t, "the log names the nameserver", func() bool { return strings.Contains(log.String(), loop.Addr.String()) })
		want := "SERVFAIL"
		if len(others) > 0 {
			want = "other.example. A 192.0.2.1"
		}
		loop.Reset()
		p.converse(t, []dialogue{{"other.example A", want}})
		for _, q := range loop.Queries() {
			if q.Name == "other.example." {
				t.Error("a server that loops was asked")
			}
		}
		if e := ede(p.exchange(t, "udp", withEDNS(question("third.example", dns.TypeA), 1232))); others == nil &&
			(e == nil || !strings.Contains(e.ExtraText, loop.Addr.String())) {
			t.Errorf("want the loop named: %v", e)
		}
	}
}

// Options that a forwarder adds to queries, different in each round, do not hide the loop.
func TestLoopThatChangesQueries(t *testing.T) { // F6
	t.Parallel()
	changes := map[string]func(query *dns.Msg){
		"client subnet": func(query *dns.Msg) {
			subnet := &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: net.IPv4(10, byte(rand.Uint32()), byte(rand.Uint32()), 0)}
			query.Extra = []dns.RR{&dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT, Class: 1232}, Option: []dns.EDNS0{subnet}}}
		},
		"0x20": func(query *dns.Msg) {
			name := []byte(query.Question[0].Name)
			for i := range name {
				if letter := name[i] | 0x20; 'a' <= letter && letter <= 'z' {
					name[i] = letter &^ byte(rand.Uint32()&1<<5)
				}
			}
			query.Question[0].Name = string(name)
			query.RecursionDesired = false // not for the cache
		},
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var us atomic.Value
			relay := forwardTo(func() string { return us.Load().(string) })
			loop := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
				asked := query.Question[0]
				change(query)
				reply := relay(query, network)
				if reply != nil {
					reply.Question = []dns.Question{asked}
				}
				return reply
			})
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(loop)}})
			us.Store(p.addr("udp"))
			p.converse(t, []dialogue{{"www.example A", "SERVFAIL"}})
			wait.Until(t, "the loop is found", func() bool {
				return p.UpstreamStatus()[0].State == upstream.Looping
			})
			if n := len(loop.Queries()); n > 80 {
				t.Errorf("%d round trips", n)
			}
		})
	}
}

// Many clients that ask one question at a time are no loop, however slow the answer is.
func TestManyClientsAreNoLoop(t *testing.T) { // F6
	t.Parallel()
	var probes atomic.Int64
	released := make(chan struct{})
	release := sync.OnceFunc(func() { close(released) })
	answer := anywhere("192.0.2.1")
	slow := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		if strings.HasSuffix(query.Question[0].Name, upstream.LoopZone) {
			probes.Add(1)
			return new(dns.Msg).SetRcode(query, dns.RcodeNameError)
		}
		<-released
		return answer(query, network)
	})
	t.Cleanup(release)
	const clients = 100
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(slow), Timeout: wait.Limit}})
	var asking sync.WaitGroup
	for n := range clients {
		req := withEDNS(question("www.example", dns.TypeA), 1232)
		subnet := &dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 24, Address: net.IPv4(10, 0, byte(n), 0)}
		req.IsEdns0().Option = append(req.IsEdns0().Option, subnet)
		asking.Go(func() {
			if got := outcome(p.exchange(t, "tcp", req)); got != "www.example. A 192.0.2.1" {
				t.Errorf("client %d: %s", n, got)
			}
		})
	}
	p.await(t, "nametap_dns_inflight", clients)
	wait.Until(t, "a probe", func() bool { return probes.Load() > 0 })
	release()
	asking.Wait()
	if n := probes.Load(); n > 5 {
		t.Errorf("%d probes", n)
	}
	if state := p.UpstreamStatus()[0].State; state != upstream.Up {
		t.Errorf("the nameserver is %v", state)
	}
}
