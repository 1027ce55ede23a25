package dnsproxy_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// provenance asks a question, "NAME TYPE", and returns where the answer came from.
func (p *proxy) provenance(tb testing.TB, network, ask string) dnsproxy.Provenance {
	tb.Helper()
	name, qtype, _ := strings.Cut(ask, " ")
	query := withEDNS(question(name, dns.StringToType[qtype]), dnsproxy.DefaultEDNSUDPSize)
	dnsproxy.AskProvenance(query, false)
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
	t.Parallel()
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
		got := p.provenance(t, network, "www.example A")
		wantProvenance(t, network, got, dnsproxy.Provenance{Source: "cache", Server: server, AgeSeconds: got.AgeSeconds, Rows: []string{"F8"}})
	}
	wait.Until(t, "the age of the reply", func() bool { return p.provenance(t, "udp", "www.example A").AgeSeconds > 0 })
	// Without RD the query is relayed.
	query := withEDNS(question("www.example", dns.TypeA), 1232)
	query.RecursionDesired = false
	dnsproxy.AskProvenance(query, false)
	got, err := dnsproxy.ReadProvenance(p.exchange(t, "udp", query))
	if err != nil || got.Source != "upstream" || got.Server != server {
		t.Errorf("without RD: %+v, %v", got, err)
	}
	// A failure has the nameserver that sent it.
	fake.Handle(fakedns.Rcode(dns.RcodeNotImplemented))
	wantProvenance(t, "a failure", p.provenance(t, "udp", "other.example A"), dnsproxy.Provenance{Source: "upstream", Server: refusing, Failure: refusing + ": REFUSED"})
	got = p.provenance(t, "udp", "other.example A")
	wantProvenance(t, "a failure in the cache", got, dnsproxy.Provenance{
		Source: "cached_failure", Server: refusing, AgeSeconds: got.AgeSeconds, Failure: refusing + ": REFUSED", Rows: []string{"F8"},
	})
}

// A stale answer has its age and the reason, a failure of the cache the reason.
func TestProvenanceOfFailures(t *testing.T) { // R12, F8, F9
	t.Parallel()
	for name, failing := range map[string]fakedns.Handler{"SERVFAIL": fakedns.Rcode(dns.RcodeServerFailure), "silence": fakedns.Silence} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fake := nameserver(t, fakedns.Answer("www.example. 1 IN A 192.0.2.1"))
			server := fake.Addr.String()
			p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Timeout: 300 * time.Millisecond}})
			p.provenance(t, "udp", "www.example A")
			fake.Handle(failing)
			wait.Until(t, "a stale answer", func() bool { return p.provenance(t, "udp", "www.example A").Source == "stale" })
			reason := server + ": SERVFAIL"
			if name == "silence" {
				reason = "no nameserver answered: " + server + ": no reply in time"
			}
			for range 2 { // the first may have waited for the nameserver, the second does not
				got := p.provenance(t, "udp", "www.example A")
				wantProvenance(t, "stale", got, dnsproxy.Provenance{
					Source: "stale", Server: server, AgeSeconds: got.ExpiredSeconds + 1, ExpiredSeconds: got.ExpiredSeconds, Failure: reason, Rows: []string{"F9"},
				})
			}
			wait.Until(t, "it has expired a while ago", func() bool {
				got := p.provenance(t, "udp", "www.example A")
				return got.ExpiredSeconds >= 2 && strings.Contains(got.String(), " ago, expired ")
			})
			p.provenance(t, "udp", "other.example A")
			got := p.provenance(t, "udp", "other.example A")
			if got.Source != "cached_failure" || got.Failure != reason || cmp.Diff(got.Rows, []string{"F8"}) != "" {
				t.Errorf("a failure in the cache: %+v, want the reason %q", got, reason)
			}
		})
	}
}

// The option stays between client and agent. Without it an answer has none, and if it does not fit the answer is
// truncated.
func TestProvenanceOption(t *testing.T) { // R12, F19
	t.Parallel()
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
}

// A client that asks for it gets what each nameserver was sent and what came of it, as far as that
// fits into a response.
func TestTrace(t *testing.T) { // R18
	t.Parallel()
	refuses, silent := nameserver(t, fakedns.Rcode(dns.RcodeRefused)), nameserver(t, fakedns.Silence)
	fake := nameserver(t, fakedns.Answer("www.example. 300 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Timeout: 2 * time.Second, Upstreams: servers(refuses, silent, fake)}})
	trace := func(name string, size uint16, attempts bool) dnsproxy.Provenance {
		t.Helper()
		query := withEDNS(question(name, dns.TypeA), size)
		dnsproxy.AskProvenance(query, attempts)
		resp := p.exchange(t, "udp", query)
		from, err := dnsproxy.ReadProvenance(resp)
		if err != nil || resp.Truncated {
			t.Fatalf("%v:\n%v", err, resp)
		}
		return from
	}
	got := trace("www.example", 1232, true).Attempts
	if len(got) < 3 {
		t.Fatalf("attempts: %+v", got)
	}
	for i, want := range []struct {
		server, result string
		used           bool
	}{{refuses.Addr.String(), "REFUSED", false}, {silent.Addr.String(), "", false}, {fake.Addr.String(), "NOERROR", true}} {
		a := got[i]
		if a.Server != want.server || a.Protocol != "udp" || a.Result != want.result || a.Used != want.used || a.Took <= 0 {
			t.Errorf("attempt %d: %+v, want %+v", i, a, want)
		}
	}
	if got[0].Sent != 0 || got[2].Sent < got[1].Sent+got[1].Patience/2 || !got[2].Repeated || got[1].Repeated || got[1].Patience <= 0 {
		t.Errorf("times: %+v", got)
	}
	// One that does not ask for it, and an answer of the cache, have none.
	for _, attempts := range []bool{false, true} {
		if from := trace("www.example", 1232, attempts); from.Source != "cache" || from.Attempts != nil {
			t.Errorf("of the cache: %+v", from)
		}
	}
	if from := trace("other.example", 1232, false); from.Attempts != nil {
		t.Errorf("without asking: %+v", from)
	}
	// Attempts that do not fit are counted.
	fake.Handle(fakedns.Silence)
	if from := trace("silent.example", 512, true); from.MoreAttempts == 0 || from.Source != "upstream" {
		t.Errorf("in 512 bytes: %+v", from)
	}
}

// Over TCP a nameserver is one attempt more. A client that waits for the query of another one, which has not asked for a
// trace, is told what came of a query that failed, with each nameserver once.
func TestTraceMeetings(t *testing.T) { // R18
	t.Parallel()
	asked, release := make(chan struct{}, 1), make(chan struct{})
	fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		name := query.Question[0].Name
		if strings.HasPrefix(name, "fails") {
			select {
			case asked <- struct{}{}:
			default:
			}
			<-release
			return fakedns.Rcode(dns.RcodeServerFailure)(query, network)
		}
		resp := fakedns.Answer(name+" 300 IN A 192.0.2.1")(query, network)
		resp.Truncated = network == "udp"
		return resp
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Timeout: wait.Limit, Upstreams: servers(fake)}})
	trace := func(name string) []upstream.Attempt {
		t.Helper()
		query := withEDNS(question(name, dns.TypeA), 1232)
		dnsproxy.AskProvenance(query, true)
		from, err := dnsproxy.ReadProvenance(p.exchange(t, "udp", query))
		if err != nil {
			t.Fatal(err)
		}
		return from.Attempts
	}
	got := trace("large.example")
	if len(got) != 2 || got[0].Protocol != "udp" || got[0].Result != "NOERROR, truncated" || got[0].Used || got[1].Protocol != "tcp" || !got[1].Used {
		t.Errorf("over TCP: %+v", got)
	}
	var asking sync.WaitGroup
	asking.Go(func() { p.ask(t, "fails.example", dns.TypeA) })
	<-asked
	asking.Go(func() {
		if got := trace("fails.example"); len(got) != 1 || got[0].Server != fake.Addr.String() || got[0].Protocol != "udp" || got[0].Result != "SERVFAIL" || !got[0].Used || got[0].Took <= 0 {
			t.Errorf("of the query of another client: %+v", got)
		}
	})
	p.await(t, "nametap_dns_inflight", 2)
	close(release)
	asking.Wait()
}

// A stale answer says what was sent to the nameservers that have not answered yet.
func TestTraceOfStale(t *testing.T) { // R18, F9
	t.Parallel()
	fake := nameserver(t, fakedns.Answer("www.example. 1 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	p.provenance(t, "udp", "www.example A")
	fake.Handle(fakedns.Silence)
	wait.Until(t, "the reply has expired", func() bool { // a query would make the agent ask before
		content, err := p.CacheContent(forward.CacheSelection{Name: "www.example"}, 1)
		return err == nil && content.Entries[0].TTL < 0
	})
	query := withEDNS(question("www.example", dns.TypeA), 1232)
	dnsproxy.AskProvenance(query, true)
	from, err := dnsproxy.ReadProvenance(p.exchange(t, "udp", query))
	if err != nil || from.Source != "stale" || len(from.Attempts) == 0 || from.Attempts[0].Server != fake.Addr.String() || from.Attempts[0].Result != "" || from.Attempts[0].Usual <= 0 {
		t.Errorf("%+v, %v", from, err)
	}
}
