package dnsproxy_test

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/testkit/fakeclock"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// provenance asks a question, "NAME TYPE", and returns where the answer came from.
func (p *proxy) provenance(tb testing.TB, network, ask string) dnsproxy.Provenance {
	tb.Helper()
	name, qtype, _ := strings.Cut(ask, " ")
	return p.trace(tb, network, withEDNS(question(name, dns.StringToType[qtype]), dnsproxy.DefaultEDNSUDPSize), false)
}

// trace sends a query with EDNS and returns where the answer came from, on demand with the attempts.
func (p *proxy) trace(tb testing.TB, network string, query *dns.Msg, attempts bool) dnsproxy.Provenance {
	tb.Helper()
	dnsproxy.AskProvenance(query, attempts)
	resp := p.exchange(tb, network, query)
	from, err := dnsproxy.ReadProvenance(resp)
	if err != nil {
		tb.Fatalf("%v:\n%v", err, resp)
	}
	return from
}

func wantProvenance(t *testing.T, ask string, got, want dnsproxy.Provenance) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", ask, diff)
	}
}

// A client that asks for it gets the nameserver that sent the reply, also for a reply from the
// cache; a table's answer has none.
func TestProvenance(t *testing.T) { // R12
	synctest.Test(t, func(t *testing.T) {
		refuses := nameserver(t, fakedns.Rcode(dns.RcodeRefused))
		fake := nameserver(t, fakedns.Answer("www.example. 300 IN A 192.0.2.1", "0.example. 0 IN A 192.0.2.2", "web.shop.svc.cluster.local. 60 IN MX 1 a."))
		server, refusing := fake.Addr.String(), refuses.Addr.String()
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(refuses, fake)}})
		for _, c := range []struct {
			ask  string
			want dnsproxy.Provenance
		}{
			{"www.example A", dnsproxy.Provenance{Source: "upstream", Server: server}},
			{"0.example A", dnsproxy.Provenance{Source: "upstream", Server: server}}, // which is not cached
			{"0.example A", dnsproxy.Provenance{Source: "upstream", Server: server}},
			{"web.shop.svc.cluster.local A", dnsproxy.Provenance{Source: "table"}},
			{"localhost A", dnsproxy.Provenance{Source: "self"}},
		} {
			wantProvenance(t, c.ask, p.provenance(t, "udp", c.ask), c.want)
		}
		for _, network := range []string{"udp", "tcp"} {
			wantProvenance(t, network, p.provenance(t, network, "www.example A"), dnsproxy.Provenance{Source: "cache", Server: server, Rows: []string{"F8"}})
		}
		// Without RD the query is relayed.
		query := withEDNS(question("www.example", dns.TypeA), 1232)
		query.RecursionDesired = false
		if got := p.trace(t, "udp", query, false); got.Source != "upstream" || got.Server != server {
			t.Errorf("without RD: %+v", got)
		}
		// A failure has the nameserver that sent it.
		fake.Handle(fakedns.Rcode(dns.RcodeNotImplemented))
		wantProvenance(t, "a failure", p.provenance(t, "udp", "other.example A"), dnsproxy.Provenance{Source: "upstream", Server: refusing, Failure: refusing + ": REFUSED"})
		wantProvenance(t, "a failure in the cache", p.provenance(t, "udp", "other.example A"), dnsproxy.Provenance{
			Source: "cached_failure", Server: refusing, Failure: refusing + ": REFUSED", Rows: []string{"F8"},
		})
	})
}

// A stale answer has its age and the reason. It is kept for `nametap tail`, too, and says what was sent to nameservers that
// have not answered yet.
func TestProvenanceOfStale(t *testing.T) { // R12, R13, R18, F9
	t.Parallel()
	clock := fakeclock.New()
	fake := nameserver(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1", "late.example. 60 IN A 192.0.2.1"))
	server := fake.Addr.String()
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Clock: clock.Clock}})
	p.provenance(t, "udp", "www.example A")
	p.provenance(t, "udp", "late.example A")
	clock.Suspend(t, time.Hour)
	fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	for range 2 { // the first waits for the nameserver, the second does not
		got := p.provenance(t, "udp", "www.example A")
		wantProvenance(t, "stale", got, dnsproxy.Provenance{
			Source: "stale", Server: server, AgeSeconds: got.ExpiredSeconds + 60, ExpiredSeconds: got.ExpiredSeconds, Failure: server + ": SERVFAIL", Rows: []string{"F9"},
		})
		if got.ExpiredSeconds < 59*60 || !strings.Contains(got.String(), " ago, expired ") {
			t.Errorf("%d s, %v", got.ExpiredSeconds, got)
		}
	}
	kept := p.past(t, "source=stale")
	failed := seen.Record{Name: "www.example", Rcode: "NOERROR", Source: "stale", Server: server, Reason: server + ": SERVFAIL", Rows: []string{"F9"}, Noteworthy: true}
	wantSeen(t, kept, failed, failed)
	if kept[0].Age < 3600 {
		t.Errorf("%+v", kept[0])
	}
	fake.Handle(fakedns.Silence)
	from := p.trace(t, "udp", withEDNS(question("late.example", dns.TypeA), 1232), true)
	if from.Source != "stale" || len(from.Attempts) == 0 || from.Attempts[0].Server != server || from.Attempts[0].Result != "" || from.Attempts[0].Usual <= 0 {
		t.Errorf("%+v", from)
	}
}

// The option stays between client and agent. Without it an answer has none, and if it does not fit the answer is
// truncated.
func TestProvenanceOption(t *testing.T) { // R12, F19
	synctest.Test(t, func(t *testing.T) {
		sent := make(chan *dns.Msg, 100)
		fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
			if strings.HasSuffix(query.Question[0].Name, ".example.") {
				sent <- query.Copy()
			}
			return fakedns.Size(430)(query, network)
		})
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
		ask := func(name string, rd bool, data string) *dns.Msg {
			query := withEDNS(question(name, dns.TypeTXT), 512)
			query.RecursionDesired = rd
			query.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_LOCAL{Code: wire.Provenance, Data: []byte(data)}}
			return p.exchange(t, "udp", query)
		}
		for name, rd := range map[string]bool{"cached.example": true, "relayed.example": false} {
			if resp := ask(name, rd, wire.ProvenanceMark); !resp.Truncated || len(optionCodes(resp)) > 0 {
				t.Errorf("%s: want TC and no option:\n%v", name, resp)
			}
			if query := <-sent; len(optionCodes(query)) > 0 {
				t.Errorf("the nameserver was sent the option:\n%v", query)
			}
		}
		if got := p.provenance(t, "tcp", "cached.example TXT"); got.Source != "cache" {
			t.Errorf("over TCP: %+v", got)
		}
		if resp := p.exchange(t, "udp", withEDNS(question("cached.example", dns.TypeTXT), 512)); resp.Truncated || len(optionCodes(resp)) > 0 {
			t.Errorf("a client that does not ask got\n%v", resp)
		}
		// Another option with the same code is one for nameservers.
		ask("foreign.example", true, "foreign")
		if query := <-sent; len(optionCodes(query)) != 1 {
			t.Errorf("the nameserver was not sent the option of the client:\n%v", query)
		}
	})
}

// A client that asks for it gets what each nameserver was sent and what came of it, as far as that
// fits into a response. Over TCP a nameserver is one attempt more.
func TestTrace(t *testing.T) { // R18
	synctest.Test(t, func(t *testing.T) {
		var fakes []*fakedns.Server
		for range 5 {
			fakes = append(fakes, nameserver(t, fakedns.Rcode(dns.RcodeRefused)))
		}
		last := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
			reply := anywhere("192.0.2.1")(query, network)
			reply.Truncated = network == "udp" && query.Question[0].Name == "large.example."
			return reply
		})
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(append(fakes, last)...)}})
		ask := func(name string) *dns.Msg { return withEDNS(question(name, dns.TypeA), 1232) }
		for name, want := range map[string][]string{"www.example": {"udp NOERROR"}, "large.example": {"udp NOERROR, truncated", "tcp NOERROR"}} {
			got := p.trace(t, "udp", ask(name), true).Attempts
			if len(got) != len(fakes)+len(want) {
				t.Fatalf("attempts: %+v", got)
			}
			for i, a := range got {
				server, result := last.Addr.String(), want[max(0, i-len(fakes))]
				if i < len(fakes) {
					server, result = fakes[i].Addr.String(), "udp REFUSED"
				}
				if a.Server != server || a.Protocol+" "+a.Result != result || a.Used != (i == len(got)-1) || a.Patience <= 0 || a.Repeated {
					t.Errorf("attempt %d: %+v, want %s of %s", i, a, result, server)
				}
			}
		}
		// One that does not ask for it, and an answer of the cache, have none.
		for _, attempts := range []bool{false, true} {
			if from := p.trace(t, "udp", ask("www.example"), attempts); from.Source != "cache" || from.Attempts != nil {
				t.Errorf("of the cache: %+v", from)
			}
		}
		if from := p.trace(t, "udp", ask("other.example"), false); from.Attempts != nil {
			t.Errorf("without asking: %+v", from)
		}
		// Attempts that do not fit are counted.
		from := p.trace(t, "udp", withEDNS(question("many.example", dns.TypeA), 512), true)
		if from.MoreAttempts == 0 || from.MoreAttempts+len(from.Attempts) != len(fakes)+1 || from.Source != "upstream" {
			t.Errorf("in 512 bytes: %+v", from)
		}
	})
}

// A client that waits for the query of another one, which has not asked for a trace, is told what came of a query that
// failed, with each nameserver once.
func TestTraceMeetings(t *testing.T) { // R18
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		holding, asked := held(fakedns.Rcode(dns.RcodeServerFailure), release)
		fake := nameserver(t, holding)
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
		var asking sync.WaitGroup
		asking.Go(func() { p.ask(t, "fails.example", dns.TypeA) })
		<-asked
		asking.Go(func() {
			got := p.trace(t, "udp", withEDNS(question("fails.example", dns.TypeA), 1232), true).Attempts
			if len(got) != 1 || got[0].Server != fake.Addr.String() || got[0].Protocol != "udp" || got[0].Result != "SERVFAIL" || !got[0].Used {
				t.Errorf("of the query of another client: %+v", got)
			}
		})
		p.await(t, "nametap_dns_inflight", 2)
		close(release)
		asking.Wait()
	})
}
