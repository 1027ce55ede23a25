package dnsproxy_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// anywhere answers A for every name, with one address.
func anywhere(address string) fakedns.Handler {
	return func(query *dns.Msg, network string) *dns.Msg {
		return fakedns.Answer(query.Question[0].Name+" 60 IN A "+address)(query, network)
	}
}

func TestRoutes(t *testing.T) { // F12
	synctest.Test(t, func(t *testing.T) {
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
			{"web A", webAddress}, // the table's own
		})
		wantAsked(t, 2, world)
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
	})
}

func TestLocalOnly(t *testing.T) { // F12
	synctest.Test(t, func(t *testing.T) {
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
			{"db.example.com MX", "NODATA db.example.com."}, // known, and not asked for elsewhere
			{"www.example A", "www.example. A 192.0.2.1"},
		})
		req := withEDNS(question("nOne.svc.cluster.local", dns.TypeA), 1232)
		resp := p.exchange(t, "udp", req)
		soa, ok := append(resp.Ns, &dns.A{})[0].(*dns.SOA)
		if !ok || soa.Hdr.Name != "svc.cluster.local." || soa.Hdr.Ttl != 7 || soa.Minttl != 7 || !resp.Authoritative || resp.IsEdns0() == nil {
			t.Errorf("want NXDOMAIN with the SOA of the suffix:\n%v", resp)
		}
		wantAsked(t, 1, world)
		if e := explain(t, p, "none.svc.cluster.local A"); fmt.Sprint(e.Rows) != "[F12]" || e.Source != "self" {
			t.Errorf("explained by %v from %s: %s", e.Rows, e.Source, e.Why)
		}
	})
}

// expandConf is a resolv.conf as Kubernetes writes it.
func expandConf(tb testing.TB) string {
	tb.Helper()
	return resolvConf(tb, "search shop.svc.cluster.local svc.cluster.local cluster.local corp.example", "options ndots:5")
}

func TestResolvConfIsWatched(t *testing.T) { // F5
	synctest.Test(t, func(t *testing.T) {
		path := resolvConf(t, "nameserver 192.0.2.53", "search a.example")
		logger, log := newLog()
		p := newProxy(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: path}, Logger: logger})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- p.Follow(ctx) }()
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
		replace := func(text, servers string) {
			t.Helper()
			next := filepath.Join(t.TempDir(), "next")
			writeFile(t, next, text)
			if err := os.Rename(next, path); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second) //nolint:forbidigo // synctest advances the time
			if got := fmt.Sprint(p.Upstreams()); got != servers {
				t.Errorf("after a second the nameservers are %s, want %s", got, servers)
			}
		}
		replace("nameserver 192.0.2.54\nnameserver 192.0.2.55\nsearch b.example\n", "[192.0.2.54 192.0.2.55]")
		if e := explain(t, p, "web.b.example A"); e.Rule != table.RuleAutopath {
			t.Errorf("web.b.example is answered by %s", e.Rule)
		}
		if e := explain(t, p, "web.a.example A"); e.Rule != table.RuleNone {
			t.Errorf("web.a.example is still answered by %s", e.Rule)
		}
		replace("nothing that is of use\n", "[192.0.2.54 192.0.2.55]")
		time.Sleep(time.Minute) //nolint:forbidigo // as above
		if n := p.count(t, "nametap_resolv_conf_errors_total"); n != 1 || !strings.Contains(log.String(), path) {
			t.Errorf("%v errors are counted with a broken file:\n%s", n, log)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// writeFile writes a file in place.
func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A nameserver that is this agent would be asked by itself.
func TestSelfIsNoNameserver(t *testing.T) { // F6, F7
	synctest.Test(t, func(t *testing.T) {
		logger, log := newLog()
		udp, err := net.ListenPacket("udp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer udp.Close()
		own := netip.MustParseAddrPort(udp.LocalAddr().String())
		p := start(t, dnsproxy.Config{
			Addr: own.String(), Inherited: inherit(t, true, file(t, udp)), Forward: forward.Config{Upstreams: []upstream.Spec{{Addr: own}}}, Logger: logger,
		})
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
		if got := p.Upstreams(); len(got) > 0 {
			t.Errorf("nameservers: %v", got)
		}
		p.converse(t, []dialogue{{"www.example A", "SERVFAIL"}, {"web A", webAddress}})
		if !strings.Contains(log.String(), own.String()) || !strings.Contains(log.String(), "there is no nameserver") {
			t.Errorf("the log does not name %s, and that it is the only one:\n%s", own, log)
		}
		if up, self := p.UpstreamStatus(), p.SelfUpstreams(); len(up) > 0 || len(self) != 1 || self[0].Addr != own {
			t.Errorf("nameservers: %v, left out: %v", up, self)
		}
	})
}

// forwardTo is a forwarder as simple as there are. It passes on what change makes of a query.
func forwardTo(address func() string, change func(query *dns.Msg)) fakedns.Handler {
	return func(query *dns.Msg, _ string) *dns.Msg {
		id, asked := query.Id, query.Question
		query.Id, query.Question = dns.Id(), slices.Clone(asked)
		change(query)
		conn, err := net.Dial("udp", address())
		if err != nil {
			return nil
		}
		defer conn.Close()
		// Another query may have found the loop meanwhile, and then this one has no reply.
		_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
		if err := (&dns.Conn{Conn: conn}).WriteMsg(query); err != nil {
			return nil
		}
		reply, err := (&dns.Conn{Conn: conn}).ReadMsg()
		if err != nil {
			return nil
		}
		reply.Id, reply.Question = id, asked
		return reply
	}
}

// A nameserver that sends queries back is found, also if it changes them in each round, and then it is not asked any more,
// but the next one.
func TestLoopsAreFound(t *testing.T) { // F6
	t.Parallel()
	for name, change := range map[string]func(query *dns.Msg){
		"unchanged": func(*dns.Msg) {},
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
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var us atomic.Value // our own address, once it is known
			loop := nameserver(t, forwardTo(func() string { return us.Load().(string) }, change))
			logger, log := newLog()
			upstreams := servers(loop, nameserver(t, anywhere("192.0.2.1")))
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: upstreams}, Logger: logger})
			us.Store(p.addr("udp"))
			n := 0
			until(t, "the loop is found", func() bool {
				n++
				p.ask(t, fmt.Sprintf("w%d.example", n), dns.TypeA)
				return slices.ContainsFunc(p.UpstreamStatus(), func(s upstream.Status) bool {
					return s.Spec.Addr == loop.Addr && s.State == upstream.Looping
				})
			})
			until(t, "the log names the nameserver", func() bool { return strings.Contains(log.String(), loop.Addr.String()) })
			p.converse(t, []dialogue{{"other.example A", "other.example. A 192.0.2.1"}})
			if slices.ContainsFunc(loop.Queries(), func(q fakedns.Query) bool { return strings.EqualFold(q.Name, "other.example.") }) {
				t.Error("a server that loops was asked")
			}
		})
	}
}

// Many clients that ask one question at a time are no loop, however slow the answer is.
func TestManyClientsAreNoLoop(t *testing.T) { // F6
	t.Parallel()
	var probes atomic.Int64
	release := make(chan struct{})
	holding, _ := held(anywhere("192.0.2.1"), release)
	slow := nameserver(t, except(upstream.LoopZone, func(query *dns.Msg, network string) *dns.Msg {
		probes.Add(1)
		return fakedns.Answer()(query, network)
	}, holding))
	const clients = 20
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(slow)}})
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
	until(t, "a probe", func() bool { return probes.Load() > 0 })
	close(release)
	asking.Wait()
	if state := p.UpstreamStatus()[0].State; state != upstream.Up {
		t.Errorf("the nameserver is %v", state)
	}
}
