package dnsproxy_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// F4: while the first server is late, a positive answer of the second one is given, and cached for 30 s at most.
func TestOrderFirstIsLate(t *testing.T) { // F8
	t.Parallel()
	first := nameserver(t, except("late.example.", fakedns.Silence, anywhere("192.0.2.1")))
	second := nameserver(t, fakedns.Answer("late.example. 900 IN A 192.0.2.2"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second)}})
	p.converse(t, []dialogue{{"late.example A", "late.example. A 192.0.2.2"}})
	if ttl := p.ask(t, "late.example", dns.TypeA).Answer[0].Header().Ttl; ttl > 30 {
		t.Errorf("the answer of the second server has a TTL of %d", ttl)
	}
}

// F5: the options rotate and fastest mean the same, and the log says so once.
func TestRotate(t *testing.T) {
	t.Parallel()
	logger, log := newLog()
	slow, fast := nameserver(t, anywhere("192.0.2.1")), nameserver(t, anywhere("192.0.2.2"))
	slow.Handle(anywhere("192.0.2.1"), fakedns.Delay(100*time.Millisecond))
	p := startForwarder(t, dnsproxy.Config{
		Forward: forward.Config{ResolvConf: resolvConf(t, "options rotate"), Upstreams: servers(slow, fast)}, Logger: logger,
	})
	n := 0
	until(t, "only the fastest nameserver is queried", func() bool {
		slow.Reset()
		n++
		p.ask(t, fmt.Sprintf("w%d.example", n), dns.TypeA)
		return len(slow.Queries()) == 0
	})
	if n := log.Count("options rotate means upstream-order fastest"); n != 1 {
		t.Errorf("%d lines:\n%s", n, log)
	}
}

// F4: a first server that has internal names only is queried for each name, as by glibc, whether
// it refuses the others or fails for them.
func TestOrderFirstKnowsItsOwnNames(t *testing.T) {
	t.Parallel()
	own := fakedns.Answer("git.corp.example. 60 IN A 10.0.0.1", "both.corp.example. 60 IN A 10.0.0.2")
	public := fakedns.Answer("both.corp.example. 60 IN A 192.0.2.2")
	for _, rcode := range []int{dns.RcodeRefused, dns.RcodeServerFailure, dns.RcodeFormatError} {
		t.Run(dns.RcodeToString[rcode], func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				first := nameserver(t, except("corp.example.", own, fakedns.Rcode(rcode)))
				second := nameserver(t, except("corp.example.", public, anywhere("192.0.2.1")))
				p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second)}})
				for i := range 10 {
					p.converse(t, []dialogue{{fmt.Sprintf("w%d.example A", i), fmt.Sprintf("w%d.example. A 192.0.2.1", i)}})
				}
				p.converse(t, []dialogue{
					{"git.corp.example A", "git.corp.example. A 10.0.0.1"}, {"both.corp.example A", "both.corp.example. A 10.0.0.2"},
				})
			})
		})
	}
}

// F4, F8: an answer of the second server while the first one fails is cached only briefly, since the first may have
// another one. If the first disclaims the name, it is cached as usual.
func TestOrderProvisional(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		first   fakedns.Handler
		wantTTL uint32
	}{
		"fails":     {fakedns.Rcode(dns.RcodeServerFailure), 30},
		"malformed": {fakedns.Rcode(dns.RcodeFormatError), 30},
		"refuses":   {fakedns.Rcode(dns.RcodeRefused), 3600},
		"disclaims": {fakedns.Rcode(dns.RcodeNotImplemented), 3600},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				second := nameserver(t, withSOA(t, "3600", fakedns.Answer("git.example. 3600 IN A 192.0.2.1")))
				p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(nameserver(t, c.first), second)}})
				for range 2 { // from a nameserver, and from the cache
					positive, negative := p.ask(t, "git.example", dns.TypeA), p.ask(t, "git.example", dns.TypeAAAA)
					if ttl := positive.Answer[0].Header().Ttl; ttl != c.wantTTL {
						t.Errorf("the TTL is %d, want %d", ttl, c.wantTTL)
					}
					if ttl := negative.Ns[0].Header().Ttl; ttl != c.wantTTL {
						t.Errorf("the TTL of NODATA is %d, want %d", ttl, c.wantTTL)
					}
				}
			})
		})
	}
}

// F2: if the first server truncates a reply and refuses connections, the client gets the whole reply of another one.
func TestWholeReplyOfSecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		own := fakedns.Truncate(fakedns.Answer("big.example. 3600 IN A 10.0.0.2"))
		fakes := servers(fakedns.Start(t, own, fakedns.NoTCP), nameserver(t, own))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: fakes}})
		if resp := p.ask(t, "big.example", dns.TypeA); resp.Truncated || len(resp.Answer) != 1 || resp.Answer[0].Header().Ttl != 30 {
			t.Errorf("want the whole reply of the second server, for 30 s:\n%v", resp)
		}
	})
}

// F3, R2, R15: a nameserver that refuses every query is counted, logged once and named, although it lives. One that fails
// for all names of one domain, or that is sent only what the first one has failed for, is not.
func TestNameserverRefuses(t *testing.T) {
	t.Parallel()
	part := func(query *dns.Msg, network string) *dns.Msg {
		if strings.Contains(query.Question[0].Name, ".fails") {
			return fakedns.Rcode(dns.RcodeServerFailure)(query, network)
		}
		return fakedns.Answer()(query, network)
	}
	for name, c := range map[string]struct {
		handler  fakedns.Handler // of both nameservers
		dialogue []dialogue
		refusing bool
	}{
		"all names":  {fakedns.Rcode(dns.RcodeRefused), []dialogue{{"w%d.example A", "REFUSED"}}, true},
		"one domain": {fakedns.Rcode(dns.RcodeServerFailure), []dialogue{{"w%d.bogus.example A", "SERVFAIL"}}, false},
		"some names": {part, []dialogue{{"w%d.example A", "NXDOMAIN"}, {"w.fails%d.example A", "SERVFAIL"}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fakes := servers(nameserver(t, c.handler), nameserver(t, c.handler))
				p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: fakes}})
				for i := range 30 {
					for _, d := range c.dialogue {
						p.converse(t, []dialogue{{fmt.Sprintf(d.ask, i), d.want}})
					}
				}
				for _, status := range p.UpstreamStatus() {
					if status.State != upstream.Up || status.Refusing != c.refusing {
						t.Errorf("%+v", status)
					}
				}
			})
		})
	}
}

// R4: the replies of each nameserver are counted by response code, in at most five series for every nameserver, whatever
// codes it sends.
func TestNameserverResponses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const first, many = 6, 40 // further response codes
		fake := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
			code, _ := strconv.Atoi(strings.TrimSuffix(query.Question[0].Name, ".example."))
			reply := new(dns.Msg).SetRcode(query, code).SetEdns0(1232, false) // for the high bits
			reply.Rcode = code
			return reply
		})
		dead := deadServer(t)
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: append(servers(fake), dead)}})
		for n := range first + many {
			p.exchange(t, "udp", withEDNS(question(fmt.Sprintf("%d.example", n), dns.TypeA), 1232))
		}
		for rcode, least := range map[string]float64{
			"NOERROR": 1, "SERVFAIL": 1, "NXDOMAIN": 1, "REFUSED": 1, "other": many,
		} {
			if n := p.sum(t, "nametap_upstream_responses_total", "rcode", rcode); n < least {
				t.Errorf("%v replies with %s are counted, want %v", n, rcode, least)
			}
		}
		if n := p.sum(t, "nametap_upstream_responses_total", "upstream", dead.String()); n > 0 {
			t.Errorf("%v replies of the dead nameserver are counted", n)
		}
		const codes, always = 5, 3
		if n, err := testutil.GatherAndCount(p.metrics, "nametap_upstream_responses_total"); err != nil || n != codes+always {
			t.Errorf("%d series, %v", n, err)
		}
	})
}

// F16, F10: names whose own servers are silent use up neither the nameserver nor all places of queries in flight.
func TestDeadZonesLeaveRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const places, flood = 64, 500
		fake := nameserver(t, except("dead.example.", fakedns.Silence, anywhere("192.0.2.1")))
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), MaxInflight: places}})
		conn := p.dial(t, "udp")
		defer conn.Close()
		for i := range flood {
			packet, err := question(fmt.Sprintf("w.dead.n%d.dead.example", i), dns.TypeA).Pack()
			if err != nil {
				t.Fatal(err)
			}
			write(t, conn, packet)
			if i%10 == 0 {
				p.converse(t, []dialogue{{fmt.Sprintf("w%d.example A", i), fmt.Sprintf("w%d.example. A 192.0.2.1", i)}})
			}
		}
		p.await(t, "nametap_dns_inflight", places)
		until(t, "the other queries are refused", func() bool { return p.count(t, "nametap_dns_overflows_total") >= flood-places })
		p.converse(t, []dialogue{{"web A", webAddress}})
	})
}

// F10, F20: long queries in flight are bounded in bytes, too: further ones are refused at once, and mesh names are still
// answered. Queries that need no nameserver, but a worker, are dropped over UDP, and all are kept for `nametap tail`.
func TestLongQueriesInFlight(t *testing.T) { // R13
	synctest.Test(t, func(t *testing.T) {
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(nameserver(t, fakedns.Silence))}})
		const length, bound = 60_000, 8 << 20
		long := func(name string, class uint16) []byte {
			req := withEDNS(question(name, dns.TypeTXT), 1232)
			req.Question[0].Qclass = class
			req.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_LOCAL{Code: dns.EDNS0LOCALSTART, Data: make([]byte, length)}}
			packet, err := req.Pack()
			if err != nil {
				t.Fatal(err)
			}
			return packet
		}
		udp, tcp, n := p.dial(t, "udp"), p.dial(t, "tcp"), 0
		defer udp.Close()
		for ; p.count(t, "nametap_dns_overflows_total") == 0; n++ {
			tcp.Close()
			tcp = p.dial(t, "tcp") // one connection has a bound of its own
			defer tcp.Close()
			write(t, tcp, long(fmt.Sprintf("w%d.example", n), dns.ClassINET))
			until(t, "the query waits or is refused", func() bool {
				return p.count(t, "nametap_dns_inflight") > float64(n) || p.count(t, "nametap_dns_overflows_total") > 0
			})
		}
		if resp := parse(t, read(t, tcp)); resp.Rcode != dns.RcodeServerFailure || n < bound/length-1 || n > bound/length+2 {
			t.Errorf("query %d:\n%v", n, resp)
		}
		write(t, udp, long("version.bind", dns.ClassHESIOD))
		until(t, "a query over UDP is dropped", func() bool { return len(p.past(t, "rcode=dropped&name=version.bind")) == 1 })
		if resp := parse(t, p.send(t, "tcp", long("id.server", dns.ClassCHAOS))); resp.Rcode != dns.RcodeServerFailure {
			t.Errorf("over TCP:\n%v", resp)
		}
		got := p.past(t, "name=id.server&rcode=SERVFAIL")
		if len(got) != 1 || got[0].Transport != "tcp" || got[0].Class != "CH" || fmt.Sprint(got[0].Rows) != "[F10]" {
			t.Errorf("%+v", got)
		}
		p.converse(t, []dialogue{{"web A", webAddress}})
	})
}

// Messages that wait on workers are bounded, and neither mesh names nor probes wait for them.
func TestManyTasks(t *testing.T) { // F10
	synctest.Test(t, func(t *testing.T) {
		p := startForwarder(t, dnsproxy.Config{ID: "here", Forward: forward.Config{Upstreams: servers(nameserver(t, fakedns.Silence))}})
		conn := p.dial(t, "udp")
		defer conn.Close()
		for i := range 5_000 {
			packet, err := new(dns.Msg).SetUpdate(fmt.Sprintf("w%d.example.", i)).Pack()
			if err != nil {
				t.Fatal(err)
			}
			write(t, conn, packet)
		}
		p.await(t, "nametap_dns_inflight", 4096)
		probe := question("id.server", dns.TypeTXT)
		probe.Question[0].Qclass = dns.ClassCHAOS
		if resp := p.exchange(t, "udp", probe); resp.Rcode != dns.RcodeSuccess {
			t.Errorf("the probe:\n%v", resp)
		}
		p.converse(t, []dialogue{{"web A", webAddress}})
	})
}
