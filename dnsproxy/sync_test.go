package dnsproxy_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

const requestsMetric = "istio_agent_dns_requests_total"

func TestBeforeSyncHeld(t *testing.T) { // C6
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			mode      dnsproxy.BeforeSync
			held, not []string
		}{
			{"", []string{"web.shop.svc.Cluster.local", "x.cluster.local", "no.shop.svc.cluster.local"},
				[]string{"www.example", "web", "web.shop", "1.0.0.10.in-addr.arpa", "xcluster.local"}},
			{dnsproxy.BeforeSyncHold, []string{"web.shop.svc.cluster.local", "www.example", "web"}, nil},
		} {
			fake := nameserver(t, fakedns.Answer())
			p := start(t, dnsproxy.Config{BeforeSync: c.mode, Forward: forward.Config{Upstreams: servers(fake)}})
			for _, name := range c.not {
				p.converse(t, []dialogue{{name + " A", forwarded}})
			}
			answers := make(chan string)
			for i, name := range c.held {
				conn := p.dial(t, []string{"udp", "tcp"}[i%2])
				packet, err := question(name, dns.TypeA).Pack()
				if err != nil {
					t.Fatal(err)
				}
				write(t, conn, packet)
				go func() {
					defer conn.Close()
					answers <- outcome(parse(t, read(t, conn)))
				}()
			}
			p.await(t, requestsMetric, float64(len(c.not)+len(c.held)))
			wantAsked(t, len(c.not), fake)
			select {
			case <-p.Synced():
				t.Error("synced without a table")
			default:
			}
			p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
			<-p.Synced()
			own := 0
			for range c.held {
				switch got := <-answers; {
				case strings.HasSuffix(got, " A 10.0.0.1"):
					own++
				case got != forwarded && got != "NODATA cluster.local.":
					t.Errorf("before-sync %q: held, then %s", c.mode, got)
				}
			}
			if own == 0 {
				t.Errorf("before-sync %q: nothing was answered from the table", c.mode)
			}
		}
	})
}

func TestBeforeSyncTimesOut(t *testing.T) { // C6
	for _, c := range []struct {
		mode dnsproxy.BeforeSync
		name string
		wait time.Duration
	}{
		{dnsproxy.BeforeSyncForward, "web.shop.svc.cluster.local", 2 * time.Second},
		{dnsproxy.BeforeSyncHold, "www.example", 2 * time.Second},
		{dnsproxy.BeforeSyncServfail, "www.example", 0},
		{dnsproxy.BeforeSyncServfail, "web.shop.svc.cluster.local", 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := newProxy(t, dnsproxy.Config{BeforeSync: c.mode})
			began := time.Now()
			resp := p.serve(t, "udp", withEDNS(question(c.name, dns.TypeA), 1232))
			if e := ede(resp); resp.Rcode != dns.RcodeServerFailure || e == nil || e.InfoCode != dns.ExtendedErrorCodeNotReady {
				t.Errorf("want SERVFAIL, not ready:\n%v", resp)
			}
			if took := time.Since(began); took != c.wait {
				t.Errorf("%s %s: SERVFAIL took %s, want %s", c.mode, c.name, took, c.wait)
			}
			time.Sleep(10 * time.Second) //nolint:forbidigo // the bubble's clock
			began = time.Now()
			if p.serve(t, "udp", question(c.name, dns.TypeA)); time.Since(began) != 0 {
				t.Errorf("%s %s: later, SERVFAIL took %s", c.mode, c.name, time.Since(began))
			}
		})
	}
}

// generation returns a table in which every address begins with 10.N.
func generation(n int) hosts {
	h := hosts{}
	for i := range 50 {
		name := fmt.Sprintf("web-%d", i)
		h[name+".shop.svc.cluster.local"] = service(name, "shop", addrs(n, 6)...)
		h[fmt.Sprintf("api-%d.example.com", i)] = external(addrs(n, 6)...)
	}
	return h
}

// Pushes during queries lose no query, and each answer is from one table. After a push, answers are from its table.
func TestPushWhileAnswering(t *testing.T) { // C9
	t.Parallel()
	p := start(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: resolvConf(t, "search shop.svc.cluster.local corp.example")}})
	pushes := []map[int][]byte{split(t, generation(1).wire(t)), split(t, generation(2).wire(t))}
	var clients sync.WaitGroup
	stop := make(chan struct{})
	defer clients.Wait()
	defer close(stop)
	for n := range 40 {
		if err := p.Load(pushes[n%2]); err != nil {
			t.Fatal(err)
		}
		if got, want := p.ask(t, "web-0", dns.TypeA).Answer[1].String(), fmt.Sprintf("10.%d.", n%2+1); !strings.Contains(got, want) {
			t.Errorf("after push %d: %s, want %s…", n, got, want)
		}
		if n > 0 {
			continue
		}
		for i := range 4 {
			conn := p.dial(t, []string{"udp", "tcp"}[i%2])
			clients.Go(func() {
				defer conn.Close()
				for n := i; ; n++ {
					select {
					case <-stop:
						return
					default:
					}
					name := []string{"web-%d", "api-%d.example.com.corp.example", "web-%d.shop.svc.cluster.local"}[n%3]
					packet, err := question(fmt.Sprintf(name, n%50), dns.TypeA).Pack()
					if err != nil {
						t.Error(err)
						return
					}
					write(t, conn, packet)
					oneGeneration(t, parse(t, read(t, conn)))
				}
			})
		}
	}
}

// oneGeneration fails the test unless resp has the six addresses of one generation.
func oneGeneration(t *testing.T, resp *dns.Msg) {
	t.Helper()
	got := map[string]int{}
	for _, rr := range resp.Answer {
		if a, ok := rr.(*dns.A); ok {
			got[a.A.String()[:len("10.x")]]++
		}
	}
	if len(got) != 1 || got["10.1"]+got["10.2"] != 6 {
		t.Errorf("want the addresses of one table:\n%v", resp)
	}
}

func TestBadPushKeepsTheTable(t *testing.T) { // C3
	t.Parallel()
	p := newProxy(t, dnsproxy.Config{})
	if p.Table() != nil {
		t.Error("a table before the first push")
	}
	good := hosts{"api.example.com": external("192.0.2.1")}
	p.load(t, good)
	before := p.Table()
	bad := split(t, good.wire(t))
	bad[7] = []byte("\xff\xff")
	err := p.Load(bad)
	if err == nil || !strings.Contains(err.Error(), "shard 7 (2 bytes)") {
		t.Errorf("a push that is no NameTable: %v", err)
	}
	if p.Table() != before {
		t.Error("a bad push replaced the table")
	}
}

func TestPushOfSeveralTables(t *testing.T) { // C9
	t.Parallel()
	p, _ := startMesh(t, hosts{"old.example": external("192.0.2.1")})
	one, two := hosts{"one.example": external("192.0.2.1")}, hosts{"two.example": external("192.0.2.2")}
	for _, c := range []struct {
		push [][]byte
		want [4]string
	}{
		{[][]byte{one.wire(t), two.wire(t)}, [4]string{forwarded, "one.example. A 192.0.2.1", "two.example. A 192.0.2.2", "NODATA example."}},
		{[][]byte{two.wire(t)}, [4]string{forwarded, forwarded, "two.example. A 192.0.2.2", "NODATA example."}},
		{[][]byte{nil}, [4]string{forwarded, forwarded, forwarded, forwarded}},
		{nil, [4]string{forwarded, forwarded, forwarded, forwarded}},
	} {
		if err := p.Load(split(t, c.push...)); err != nil {
			t.Fatal(err)
		}
		p.converse(t, []dialogue{
			{"old.example A", c.want[0]}, {"one.example A", c.want[1]}, {"two.example A", c.want[2]}, {"example A", c.want[3]},
		})
	}
}

// Held queries count as in flight: queries beyond the bound are refused at once.
func TestHeldInflight(t *testing.T) { // C6, F10
	synctest.Test(t, func(t *testing.T) {
		p := start(t, dnsproxy.Config{BeforeSync: dnsproxy.BeforeSyncHold, Forward: forward.Config{MaxInflight: 1}})
		conn := p.dial(t, "tcp")
		defer conn.Close()
		asked := map[uint16]bool{}
		for _, name := range []string{"web", "db"} {
			req := withEDNS(question(name, dns.TypeA), 1232)
			asked[req.Id] = true
			packet, err := req.Pack()
			if err != nil {
				t.Fatal(err)
			}
			write(t, conn, packet)
		}
		refused := parse(t, read(t, conn))
		if e := ede(refused); refused.Rcode != dns.RcodeServerFailure || e == nil || !strings.Contains(e.ExtraText, "too many") {
			t.Fatalf("one of two held queries is not refused:\n%v", refused)
		}
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"), "db.shop.svc.cluster.local": service("db", "shop", "10.0.0.2")})
		held := parse(t, read(t, conn))
		if held.Id == refused.Id || !asked[held.Id] || len(held.Answer) != 2 {
			t.Errorf("the query that was held is answered with\n%v", held)
		}
	})
}
