package dnsproxy_test

import (
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// slowly starts a nameserver whose replies take long.
func slowly(t *testing.T, handler fakedns.Handler, after time.Duration) *fakedns.Server {
	t.Helper()
	fake := nameserver(t, handler)
	fake.Handle(handler, fakedns.Delay(after))
	return fake
}

// internal answers every name.
func internal(query *dns.Msg, network string) *dns.Msg { return deadZone(query, network) }

// F4: the first server is preferred while it answers, however fast another one answers
// NXDOMAIN.
func TestOrder(t *testing.T) {
	t.Parallel()
	for order, wantNXDOMAIN := range map[forward.Order]bool{"": false, forward.OrderStrict: false, forward.OrderFastest: true} {
		t.Run(string(order), func(t *testing.T) {
			t.Parallel()
			first, second := slowly(t, internal, 300*time.Millisecond), nameserver(t, fakedns.Answer())
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second), Order: order}})
			nxdomain := 0
			for i := range 10 {
				switch resp := p.ask(t, fmt.Sprintf("w%d.corp.example", i), dns.TypeA); {
				case resp.Rcode == dns.RcodeNameError:
					nxdomain++
				case resp.Rcode != dns.RcodeSuccess || len(resp.Answer) != 1:
					t.Errorf("name %d:\n%v", i, resp)
				}
			}
			if wantNXDOMAIN != (nxdomain > 0) {
				t.Errorf("%d of 10 names are said not to exist", nxdomain)
			}
			if asked := len(second.Queries()); asked == 0 {
				t.Error("the second server was never asked")
			}
		})
	}
}

// F5: the option rotate of resolv.conf means the order fastest, and the log says so once.
func TestRotate(t *testing.T) {
	t.Parallel()
	logger, log := newLog()
	path := resolvConf(t, "options rotate")
	first, second := slowly(t, internal, 300*time.Millisecond), nameserver(t, internal)
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{ResolvConf: path, Upstreams: servers(first, second)}, Logger: logger})
	wait.Until(t, "only the fastest nameserver is queried", func() bool {
		second.Reset()
		for i := range 5 {
			p.ask(t, fmt.Sprintf("w%d-%d.example", time.Now().UnixNano(), i), dns.TypeA)
		}
		return len(second.Queries()) >= 5
	})
	if n := log.Count("options rotate means upstream-order fastest"); n != 1 {
		t.Errorf("%d lines:\n%s", n, log)
	}
}

// F4: NODATA of the second server does not win either; a positive answer of the second
// server wins at once.
func TestOrderNoData(t *testing.T) {
	t.Parallel()
	second := nameserver(t, fakedns.Answer("w.example. 60 IN AAAA 2001:db8::1", "fast.example. 60 IN A 192.0.2.2"))
	first := nameserver(t, internal)
	first.Handle(internal, func(r fakedns.Request, packets []fakedns.Packet) []fakedns.Packet {
		if !strings.HasSuffix(r.Msg.Question[0].Name, "example.") {
			return packets // a probe
		}
		return fakedns.Delay(time.Second)(r, packets)
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second)}})
	p.converse(t, []dialogue{
		{"w.example A", "w.example. A 192.0.2.1"},
		{"fast.example A", "fast.example. A 192.0.2.2"},
	})
}

// F4: a first server that fails or is dead is ignored.
func TestOrderFirstIsDead(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]*fakedns.Server{
		"silent": nameserver(t, fakedns.Silence), "fails": nameserver(t, fakedns.Rcode(dns.RcodeServerFailure)),
	} {
		second := nameserver(t, fakedns.Answer())
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second)}})
		for i := range 10 {
			began := time.Now()
			p.converse(t, []dialogue{{fmt.Sprintf("w%d.example A", i), "NXDOMAIN"}})
			if took := time.Since(began); took > forward.DefaultTimeout/2 {
				t.Errorf("the first server is %s: NXDOMAIN took %s", name, took)
			}
		}
	}
}

// F4: a first server that has internal names only is queried for each name, as by glibc, whether
// it refuses the others or fails for them.
func TestOrderFirstKnowsItsOwnNames(t *testing.T) {
	t.Parallel()
	own := fakedns.Answer("git.corp.example. 60 IN A 10.0.0.1", "both.corp.example. 60 IN A 10.0.0.2")
	public := fakedns.Answer("both.corp.example. 60 IN A 192.0.2.2")
	for name, rcode := range map[string]int{"refuses": dns.RcodeRefused, "fails": dns.RcodeServerFailure} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			first := nameserver(t, except("corp.example.", own, fakedns.Rcode(rcode)))
			second := nameserver(t, except("corp.example.", public, internal))
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second)}})
			for i := range 10 {
				p.converse(t, []dialogue{{fmt.Sprintf("w%d.example A", i), fmt.Sprintf("w%d.example. A 192.0.2.1", i)}})
			}
			p.converse(t, []dialogue{{"git.corp.example A", "git.corp.example. A 10.0.0.1"}})
			p.converse(t, []dialogue{{"both.corp.example A", "both.corp.example. A 10.0.0.2"}})
		})
	}
}

// F4, F8: a negative answer of the second server while the first one fails is cached only
// briefly, since the first may know the name. If the first refuses the name, it is cached
// as usual.
func TestOrderNegativeIsProvisional(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		first   fakedns.Handler
		wantTTL uint32
	}{
		"silent":  {fakedns.Silence, 30},
		"fails":   {fakedns.Rcode(dns.RcodeServerFailure), 30},
		"refuses": {fakedns.Rcode(dns.RcodeRefused), 3600},
		"agrees":  {withSOA(t, "3600", fakedns.Answer()), 3600},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			second := withSOA(t, "3600", fakedns.Answer("six.example. 60 IN AAAA 2001:db8::1"))
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(nameserver(t, c.first), nameserver(t, second))}})
			for _, qname := range []string{"git.example", "six.example"} {
				for _, from := range []string{"a nameserver", "the cache"} {
					resp := p.ask(t, qname, dns.TypeA)
					if len(resp.Ns) != 1 || resp.Ns[0].Header().Ttl > c.wantTTL || resp.Ns[0].Header().Ttl < c.wantTTL-10 {
						t.Errorf("%s from %s: want an SOA record with a TTL of %d s:\n%v", qname, from, c.wantTTL, resp)
					}
				}
			}
		})
	}
}

// F4, F8: a positive answer of the second server while the first one fails, or is late, is cached
// only briefly, since the first may have another one. If the first refuses the name, it is cached
// as usual.
func TestOrderPositiveIsProvisional(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		first   fakedns.Handler
		wantTTL uint32
	}{
		"silent":    {fakedns.Silence, 30},
		"fails":     {fakedns.Rcode(dns.RcodeServerFailure), 30},
		"malformed": {fakedns.Rcode(dns.RcodeFormatError), 30},
		"refuses":   {fakedns.Rcode(dns.RcodeRefused), 3600},
		"disclaims": {fakedns.Rcode(dns.RcodeNotImplemented), 3600},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			second := nameserver(t, fakedns.Answer("git.example. 3600 IN A 192.0.2.1"))
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(nameserver(t, c.first), second)}})
			for _, from := range []string{"a nameserver", "the cache"} {
				resp := p.ask(t, "git.example", dns.TypeA)
				if len(resp.Answer) != 1 || resp.Answer[0].Header().Ttl > c.wantTTL || resp.Answer[0].Header().Ttl < c.wantTTL-10 {
					t.Errorf("from %s: want a TTL of %d s:\n%v", from, c.wantTTL, resp)
				}
			}
		})
	}
}

// F4, F8: one late reply of the first server gives its name the second server's answer for 30 s at most.
func TestOrderLateOnce(t *testing.T) {
	t.Parallel()
	first, second := nameserver(t, internal), nameserver(t, fakedns.Answer("late.example. 3600 IN A 192.0.2.2"))
	first.Handle(internal, func(r fakedns.Request, packets []fakedns.Packet) []fakedns.Packet {
		if r.Msg.Question[0].Name == "late.example." {
			return fakedns.Delay(time.Second)(r, packets)
		}
		return packets
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second)}})
	for i := range 10 {
		p.converse(t, []dialogue{{fmt.Sprintf("w%d.example A", i), fmt.Sprintf("w%d.example. A 192.0.2.1", i)}})
	}
	for _, from := range []string{"a nameserver", "the cache"} {
		resp := p.ask(t, "late.example", dns.TypeA)
		if got := outcome(resp); got != "late.example. A 192.0.2.1" && (got != "late.example. A 192.0.2.2" || resp.Answer[0].Header().Ttl > 30) {
			t.Errorf("from %s:\n%v", from, resp)
		}
	}
	p.converse(t, []dialogue{{"w.example A", "w.example. A 192.0.2.1"}})
}

// F4: failures of the first server for the names of one domain do not give other names to the second one.
func TestOrderFailuresOfOneDomain(t *testing.T) {
	t.Parallel()
	own := fakedns.Answer("git.corp.example. 60 IN A 10.0.0.1")
	for name, bogus := range map[string]fakedns.Handler{
		"SERVFAIL": fakedns.Rcode(dns.RcodeServerFailure), "FORMERR": fakedns.Rcode(dns.RcodeFormatError), "silence": fakedns.Silence,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			first := nameserver(t, except("bogus.example.", bogus, own))
			second := nameserver(t, except("bogus.example.", internal, fakedns.Answer("git.corp.example. 60 IN A 192.0.2.2")))
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second)}})
			for i := range 10 {
				bogus := fmt.Sprintf("w%d.bogus.example", i)
				p.converse(t, []dialogue{{bogus + " A", bogus + ". A 192.0.2.1"}})
			}
			p.converse(t, []dialogue{{"git.corp.example A", "git.corp.example. A 10.0.0.1"}})
		})
	}
}

// F2, F4: a first server whose TCP is blocked is up, and its truncated reply wins over
// NXDOMAIN of another server.
func TestOrderFirstWithoutTCP(t *testing.T) {
	t.Parallel()
	own := fakedns.Answer("git.example. 60 IN A 10.0.0.1", "big.example. 60 IN A 10.0.0.2", "localhost. 60 IN A 127.0.0.1")
	first := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		if network == "tcp" {
			return nil
		}
		reply := own(query, network)
		reply.Truncated = query.Question[0].Name == "big.example."
		return reply
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, nameserver(t, fakedns.Answer()))}})
	p.converse(t, []dialogue{{"git.example A", "git.example. A 10.0.0.1"}})
	for range 2 {
		if resp := p.ask(t, "big.example", dns.TypeA); !resp.Truncated {
			t.Errorf("want the truncated reply of the first server:\n%v", resp)
		}
	}
	for _, status := range p.UpstreamStatus() {
		if status.State != upstream.Up {
			t.Errorf("want every server up: %+v", status)
		}
	}
}

// F3, F4: a server that was down is back, and the other one begins to fail before the next probe of the first: no query
// fails.
func TestOrderTakesTurns(t *testing.T) {
	t.Parallel()
	own := fakedns.Answer("www.example. 0 IN A 10.0.0.1", "back.example. 60 IN A 10.0.0.2")
	var probes atomic.Int32
	first := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
		if q := query.Question[0]; q.Name == "localhost." || q.Name == "id.server." {
			probes.Add(1)
		}
		return nil
	})
	second := nameserver(t, own)
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second)}})
	wait.Until(t, "the first server is down and its next probe is a second away", func() bool {
		p.converse(t, []dialogue{{"www.example A", "www.example. A 10.0.0.1"}})
		return probes.Load() >= 5
	})
	first.Handle(own)
	second.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	p.converse(t, []dialogue{{"back.example A", "back.example. A 10.0.0.2"}})
}

// F2: if the first server truncates a reply and refuses connections, the client gets the whole reply of another
// one.
func TestWholeReplyOfSecond(t *testing.T) {
	t.Parallel()
	own := fakedns.Answer("big.example. 3600 IN A 10.0.0.2")
	first := fakedns.Start(t, fakedns.Truncate(own), fakedns.NoTCP)
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, nameserver(t, fakedns.Truncate(own)))}})
	if resp := p.ask(t, "big.example", dns.TypeA); resp.Truncated || len(resp.Answer) != 1 || resp.Answer[0].Header().Ttl > 30 {
		t.Errorf("want the whole reply of the second server, for 30 s at most:\n%v", resp)
	}
	p = startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, nameserver(t, fakedns.Answer()))}})
	if resp := p.ask(t, "big.example", dns.TypeA); !resp.Truncated || resp.Rcode != dns.RcodeSuccess {
		t.Errorf("the second server has no answer: want the truncated reply of the first:\n%v", resp)
	}
}

// F3, R2: a nameserver that refuses every query is counted, logged once and named, although it lives.
func TestNameserverRefuses(t *testing.T) {
	t.Parallel()
	fake := nameserver(t, fakedns.Rcode(dns.RcodeRefused))
	logger, log := newLog()
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}, Logger: logger})
	for i := range 30 {
		p.converse(t, []dialogue{{fmt.Sprintf("w%d.example A", i), "REFUSED"}})
	}
	status := p.UpstreamStatus()[0]
	if status.State != upstream.Up || !status.Refusing || status.Responses["REFUSED"] < 30 || status.LastErrorAt.IsZero() {
		t.Errorf("%+v", status)
	}
	if n := strings.Count(log.String(), "nameserver answers all queries with failures"); n != 1 {
		t.Errorf("%d lines in the log:\n%s", n, log)
	}
	if counted := p.sum(t, "nametap_upstream_responses_total", "rcode", "REFUSED"); counted < 30 {
		t.Errorf("%v refusals are counted", counted)
	}
}

// F3, R15: a nameserver that fails for all names of one domain, as it does if the domain's own nameservers fail, is not
// named as one that answers no query.
func TestOneDomainFails(t *testing.T) {
	t.Parallel()
	fake := nameserver(t, fakedns.Rcode(dns.RcodeServerFailure))
	logger, log := newLog()
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}, Logger: logger})
	for i := range 30 {
		p.converse(t, []dialogue{{fmt.Sprintf("w%d.bogus.example A", i), "SERVFAIL"}})
	}
	if status := p.UpstreamStatus()[0]; status.Refusing || status.Responses["SERVFAIL"] < 30 || status.LastError != "SERVFAIL" {
		t.Errorf("%+v", status)
	}
	if strings.Contains(log.String(), "nameserver answers all queries with failures") {
		t.Error(log)
	}
}

// F3: a nameserver that is sent only what the first one has failed for is not said to refuse all queries. If both fail for
// all, both are.
func TestNameserverRefusesTheRest(t *testing.T) {
	t.Parallel()
	part := func(query *dns.Msg, network string) *dns.Msg {
		if strings.Contains(query.Question[0].Name, ".fails") {
			return fakedns.Rcode(dns.RcodeServerFailure)(query, network)
		}
		return fakedns.Answer()(query, network)
	}
	first, second := nameserver(t, part), nameserver(t, part)
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second)}})
	refusing := func() (list [2]bool) {
		for i, status := range p.UpstreamStatus() {
			list[i] = status.Refusing
		}
		return list
	}
	for i := range 30 {
		p.converse(t, []dialogue{{fmt.Sprintf("w%d.example A", i), "NXDOMAIN"}, {fmt.Sprintf("w.fails%d.example A", i), "SERVFAIL"}})
	}
	if got := refusing(); got != [2]bool{} {
		t.Errorf("a part of the names fails: refusing %v", got)
	}
	first.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	second.Handle(fakedns.Rcode(dns.RcodeRefused))
	for i := range 30 {
		p.converse(t, []dialogue{{fmt.Sprintf("x%d.example A", i), "SERVFAIL"}})
	}
	if got := refusing(); got != [2]bool{true, true} {
		t.Errorf("all names fail: refusing %v", got)
	}
}

// R4: the replies of each nameserver are counted by response code, in at most seven series for every nameserver, whatever
// codes it sends.
func TestNameserverResponses(t *testing.T) {
	t.Parallel()
	const first, many = 6, 40 // further response codes
	code := func(query *dns.Msg) int {
		n, _ := strconv.Atoi(strings.TrimSuffix(query.Question[0].Name, ".example."))
		return n
	}
	fake := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
		reply := new(dns.Msg).SetRcode(query, code(query)).SetEdns0(1232, false) // for the high bits
		reply.Rcode = code(query)
		return reply
	})
	dead := deadServer(t)
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: append(servers(fake), dead)}})
	for n := range first + many {
		query := withEDNS(question(fmt.Sprintf("%d.example", n), dns.TypeA), 1232)
		p.exchange(t, "udp", query)
	}
	wait.Until(t, "all replies are counted", func() bool {
		return p.sum(t, "nametap_upstream_responses_total", "upstream", fake.Addr.String()) >= first+many
	})
	for rcode, least := range map[string]float64{
		"NOERROR": 1, "FORMERR": 1, "SERVFAIL": 1, "NXDOMAIN": 1, "NOTIMP": 1, "REFUSED": 1, "other": many,
	} {
		if n := p.sum(t, "nametap_upstream_responses_total", "rcode", rcode); n < least {
			t.Errorf("%v replies with %s are counted, want %v", n, rcode, least)
		}
	}
	if n := p.sum(t, "nametap_upstream_responses_total", "upstream", dead.String()); n > 0 {
		t.Errorf("%v replies of the dead nameserver are counted", n)
	}
	const codes, always = 7, 3
	if n, err := testutil.GatherAndCount(p.metrics, "nametap_upstream_responses_total"); err != nil || n != codes+always {
		t.Errorf("%d series, %v", n, err)
	}
}

// F4, F8: when the first server is late, the second one's answer is given at once, and the reply of the first
// replaces it in the cache as soon as it comes.
func TestOrderLateReplyReplaces(t *testing.T) {
	t.Parallel()
	first := nameserver(t, internal)
	first.Handle(internal, func(r fakedns.Request, packets []fakedns.Packet) []fakedns.Packet {
		if !strings.HasSuffix(r.Msg.Question[0].Name, "late.example.") {
			return packets // a probe
		}
		return fakedns.Delay(time.Second)(r, packets)
	})
	second := nameserver(t, fakedns.Answer("late.example. 900 IN A 192.0.2.2"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(first, second)}})
	p.converse(t, []dialogue{{"warm.example A", "warm.example. A 192.0.2.1"}, {"late.example A", "late.example. A 192.0.2.2"}})
	wait.Until(t, "the first server's reply is in the cache", func() bool {
		return outcome(p.ask(t, "late.example", dns.TypeA)) == "late.example. A 192.0.2.1"
	})
}
