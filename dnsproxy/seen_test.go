package dnsproxy_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// read adds a reader with the parameters of a filter, KEY=VALUE&...
func (p *proxy) read(tb testing.TB, params string) *seen.Reader {
	tb.Helper()
	values, err := url.ParseQuery(params)
	if err != nil {
		tb.Fatal(err)
	}
	filter, err := seen.ParseFilter(values)
	if err != nil {
		tb.Fatal(err)
	}
	reader, err := p.Read(filter)
	if err != nil {
		tb.Fatal(err)
	}
	return reader
}

// past returns the noteworthy queries so far that a filter selects.
func (p *proxy) past(tb testing.TB, params string) []seen.Record {
	tb.Helper()
	r := p.read(tb, params)
	defer r.Close()
	return r.Past(time.Time{})
}

// next returns the next n queries of a reader.
func next(tb testing.TB, r *seen.Reader, n int) (all []seen.Record) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), wait.Limit)
	defer cancel()
	for len(all) < n {
		records, lost, err := r.Next(ctx)
		if err != nil || lost > 0 {
			tb.Fatalf("%d queries, %d lost, %v: %+v", len(all), lost, err, all)
		}
		all = append(all, records...)
	}
	return all
}

// wantSeen compares records without what differs between runs.
func wantSeen(t *testing.T, got []seen.Record, want ...seen.Record) {
	t.Helper()
	for i := range want {
		want[i].Name += "."
		if want[i].Transport == "" {
			want[i].Transport = "udp"
		}
		if want[i].Type == "" {
			want[i].Type = "A"
		}
	}
	volatile := cmpopts.IgnoreFields(seen.Record{}, "Time", "Client", "UID", "Unit", "Cgroup", "Took", "Age", "Expired")
	if diff := cmp.Diff(want, got, volatile); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Every kind of noteworthy query is kept, with its reason and its row, over both transports, and no other.
func TestNoteworthy(t *testing.T) { // R13
	t.Parallel()
	fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		name := query.Question[0].Name
		switch {
		case strings.HasPrefix(name, "servfail"):
			return fakedns.Rcode(dns.RcodeServerFailure)(query, network)
		case strings.HasPrefix(name, "nx"):
			return fakedns.Rcode(dns.RcodeNameError)(query, network)
		case strings.HasPrefix(name, "silent"):
			return nil
		}
		return fakedns.Answer(name+" 300 IN A 192.0.2.1")(query, network)
	})
	server := fake.Addr.String()
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake), Timeout: 600 * time.Millisecond}})
	for _, name := range []string{"www.example", "www.example", "nx.example", "nx.www.example.svc.cluster.local", "nx.org.cluster.local", "nx.svc.cluster.local", "web.shop.svc.cluster.local", "localhost"} {
		p.ask(t, name, dns.TypeA)
	}
	wantSeen(t, p.past(t, ""))

	p.ask(t, "servfail.example", dns.TypeA)
	p.exchange(t, "tcp", question("servfail.example", dns.TypeA))
	p.exchange(t, "tcp", question("silent.example", dns.TypeAAAA))
	p.ask(t, "nx.shop.svc.cluster.local", dns.TypeA)
	badVersion := withEDNS(question("www.example", dns.TypeA), 1232)
	badVersion.IsEdns0().SetVersion(1)
	p.exchange(t, "udp", badVersion)
	other := question("www.example", dns.TypeA)
	other.Question[0].Qclass = dns.ClassHESIOD
	p.exchange(t, "udp", other)
	other = question("version.example", dns.TypeTXT)
	other.Question[0].Qclass = dns.ClassCHAOS
	p.exchange(t, "udp", other)
	update := new(dns.Msg).SetUpdate("servfail.example.")
	p.exchange(t, "udp", update)
	noReply := "no nameserver answered: " + server + ": no reply in time"
	failed := server + ": SERVFAIL"
	got := p.past(t, "")
	wantSeen(t, got,
		seen.Record{Name: "servfail.example", Rcode: "SERVFAIL", Source: "upstream", Server: server, Reason: failed, Rows: []string{"F3"}, Noteworthy: true},
		seen.Record{Name: "servfail.example", Transport: "tcp", Rcode: "SERVFAIL", Source: "cached_failure", Server: server, Reason: failed, Rows: []string{"F8"}, Noteworthy: true},
		seen.Record{Name: "silent.example", Transport: "tcp", Type: "AAAA", Rcode: "SERVFAIL", Source: "upstream", Reason: noReply, Rows: []string{"F4"}, Noteworthy: true},
		seen.Record{Name: "nx.shop.svc.cluster.local", Rcode: "NXDOMAIN", Source: "upstream", Server: server, Reason: "not in the mesh table: forwarded", Rows: []string{"N9"}, Noteworthy: true},
		seen.Record{Name: "www.example", Rcode: "BADVERS", Source: "self", Rows: []string{"A10"}, Noteworthy: true},
		seen.Record{Name: "www.example", Class: "HS", Rcode: "REFUSED", Source: "self", Reason: "nametap serves class IN", Rows: []string{"A10"}, Noteworthy: true},
		seen.Record{Name: "version.example", Type: "TXT", Class: "CH", Rcode: "REFUSED", Source: "probe", Reason: "nametap serves class IN", Rows: []string{"A10"}, Noteworthy: true},
		seen.Record{Opcode: "UPDATE", Name: "servfail.example", Type: "SOA", Rcode: "SERVFAIL", Source: "upstream", Server: server, Reason: failed, Rows: []string{"F3"}, Noteworthy: true},
	)
	for _, r := range got {
		if slow := r.Name == "silent.example."; slow != (r.Took != nil && *r.Took >= 0.5) {
			t.Errorf("%s took %v", r.Name, r.Took)
		}
		if r.UID == nil || int(*r.UID) != os.Getuid() {
			t.Errorf("%s: the uid is %v", r.Name, r.UID)
		}
	}
}

// A slow answer is kept, and does not push out failures; a stale one has its age.
func TestNoteworthySlowAndStale(t *testing.T) { // R13, F9
	t.Parallel()
	fake := nameserver(t, fakedns.Answer("old.example. 1 IN A 192.0.2.1"))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	p.ask(t, "old.example", dns.TypeA)
	fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	wait.Until(t, "a stale answer", func() bool {
		p.ask(t, "old.example", dns.TypeA)
		return len(p.past(t, "source=stale")) > 0
	})
	failed := fake.Addr.String() + ": SERVFAIL"
	stale := p.past(t, "source=stale")[0]
	wantSeen(t, []seen.Record{stale}, seen.Record{Name: "old.example", Rcode: "NOERROR", Source: "stale", Server: fake.Addr.String(), Reason: failed, Rows: []string{"F9"}, Noteworthy: true})
	if stale.Age < 1 {
		t.Errorf("%+v", stale)
	}
	fake.Handle(func(query *dns.Msg, network string) *dns.Msg {
		if strings.HasPrefix(query.Question[0].Name, "slow") {
			<-time.After(seen.Slow + 50*time.Millisecond)
		}
		return fakedns.Rcode(dns.RcodeNameError)(query, network)
	})
	p.ask(t, "slow.example", dns.TypeA)
	wantSeen(t, p.past(t, "slow=500ms"), seen.Record{Name: "slow.example", Rcode: "NXDOMAIN", Source: "upstream", Server: fake.Addr.String(), Reason: "", Rows: []string{"N9"}, Noteworthy: true})
	for i := range 1100 {
		p.ask(t, fmt.Sprintf("%d.shop.svc.cluster.local", i), dns.TypeA)
	}
	if n := len(p.past(t, "rcode=NXDOMAIN")); n != 1000 {
		t.Errorf("%d names that do not exist are kept, want 1000", n)
	}
	if len(p.past(t, "source=stale")) == 0 {
		t.Error("the stale answer was pushed out")
	}
}

// The reason says what each nameserver did.
func TestNoteworthyNameservers(t *testing.T) { // R13, F3, F4
	t.Parallel()
	refuses := nameserver(t, fakedns.Rcode(dns.RcodeRefused))
	fails := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		if strings.HasPrefix(query.Question[0].Name, "late") {
			<-time.After(seen.Slow + 50*time.Millisecond)
			return fakedns.Answer("late.example. 60 IN A 192.0.2.1")(query, network)
		}
		return fakedns.Rcode(dns.RcodeServerFailure)(query, network)
	})
	silent := nameserver(t, fakedns.Silence)
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(refuses, fails)}})
	p.ask(t, "www.example", dns.TypeA)
	refused, failed := refuses.Addr.String(), fails.Addr.String()
	wantSeen(t, p.past(t, "server="+refused), seen.Record{
		Name: "www.example", Rcode: "SERVFAIL", Source: "upstream", Server: failed,
		Reason: failed + ": SERVFAIL; " + refused + ": REFUSED", Rows: []string{"F3"}, Noteworthy: true,
	})
	slow := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(silent, fails)}})
	slow.ask(t, "late.example", dns.TypeA)
	got := slow.past(t, "")
	if len(got) != 1 || got[0].Server != failed || !strings.HasPrefix(got[0].Reason, silent.Addr.String()+": no reply for ") || fmt.Sprint(got[0].Rows) != "[F4]" {
		t.Errorf("%+v", got)
	}
}

// A nameserver that sends something, but no reply to the query, is told apart from a silent one.
func TestNoteworthyWrongReplies(t *testing.T) { // R13, F4, F11
	t.Parallel()
	wrong := rawNameserver(t, func(query *dns.Msg, reply func([]byte)) {
		msg := new(dns.Msg).SetReply(query)
		msg.Id++
		packet, err := msg.Pack()
		if err != nil {
			t.Error(err)
		}
		reply(packet)
	})
	silent := nameserver(t, fakedns.Silence)
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: append(servers(silent), wrong), Timeout: 600 * time.Millisecond}})
	p.ask(t, "www.example", dns.TypeA)
	wantSeen(t, p.past(t, ""), seen.Record{
		Name: "www.example", Rcode: "SERVFAIL", Source: "upstream", Rows: []string{"F4"}, Noteworthy: true,
		Reason: "no nameserver answered: " + silent.Addr.String() + ": no reply in time; " + wrong.String() + ": no reply in time, only packets that are no reply to a query in flight",
	})
	// Text after an address does not hide it from a filter.
	if got := p.past(t, "server="+wrong.String()); len(got) != 1 {
		t.Errorf("%+v", got)
	}
}

// A query that is refused at a bound is kept, even if the fast path refuses it.
func TestNoteworthyOverload(t *testing.T) { // R13, F10
	t.Parallel()
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(nameserver(t, fakedns.Silence)), MaxInflight: 1}})
	var asking sync.WaitGroup
	for i := range 4 {
		asking.Go(func() { p.ask(t, fmt.Sprintf("%d.example", i), dns.TypeA) })
	}
	asking.Wait()
	refused := slices.DeleteFunc(p.past(t, "rcode=SERVFAIL"), func(r seen.Record) bool { return !slices.Contains(r.Rows, "F10") })
	if len(refused) < 3 || refused[0].Source != "self" || !strings.Contains(refused[0].Reason, "too many queries") {
		t.Errorf("%+v", p.past(t, ""))
	}
}

// So are queries that wait for a worker when long ones have taken the memory, also if there is no answer.
func TestNoteworthyLongQueries(t *testing.T) { // R13, F10
	t.Parallel()
	lives := nameserver(t, func(query *dns.Msg, network string) *dns.Msg { // answers probes
		if strings.HasSuffix(query.Question[0].Name, ".example.") {
			return nil
		}
		return fakedns.Rcode(dns.RcodeNameError)(query, network)
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(lives), Timeout: wait.Limit}})
	defer p.EndForwarding()
	long := func(name string, class uint16, size int) []byte {
		query := withEDNS(question(name, dns.TypeTXT), 1232)
		query.Question[0].Qclass = class
		query.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_LOCAL{Code: dns.EDNS0LOCALSTART, Data: make([]byte, size)}}
		packet, err := query.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return packet
	}
	filling := make([]net.Conn, 320)
	for i := range filling {
		filling[i] = p.dial(t, "tcp")
		defer filling[i].Close()
	}
	udp, tcp := p.dial(t, "udp"), p.dial(t, "tcp")
	defer udp.Close()
	defer tcp.Close()
	number := 0
	fill := func() { // shorter ones, so that no gap is left
		for _, conn := range filling {
			number++
			write(t, conn, long(fmt.Sprintf("%d.example", number), dns.ClassINET, 30_000))
		}
	}
	wait.Until(t, "a query over UDP is dropped", func() bool {
		fill()
		write(t, udp, long("version.bind", dns.ClassCHAOS, 40_000))
		return len(p.past(t, "rcode=dropped&name=version.bind")) > 0
	})
	wait.Until(t, "a query over TCP is refused", func() bool {
		fill()
		write(t, tcp, long("id.server", dns.ClassCHAOS, 40_000))
		return parse(t, read(t, tcp)).Rcode == dns.RcodeServerFailure
	})
	got := p.past(t, "name=id.server&rcode=SERVFAIL")
	if len(got) != 1 || got[0].Transport != "tcp" || got[0].Class != "CH" || got[0].Rcode != "SERVFAIL" || fmt.Sprint(got[0].Rows) != "[F10]" {
		t.Errorf("%+v", got)
	}
}

// A truncated response is noteworthy if its client does not ask again over TCP, or if that is truncated, too.
func TestNoteworthyTruncated(t *testing.T) { // R13, A9, F2
	t.Parallel()
	fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
		name := query.Question[0].Name
		if strings.HasPrefix(name, "cut") {
			resp := new(dns.Msg).SetReply(query)
			resp.Truncated = true
			return resp
		}
		return fakedns.Answer(name+` 300 IN TXT "`+strings.Repeat("x", 250)+`" "`+strings.Repeat("y", 250)+`" "z"`)(query, network)
	})
	server := fake.Addr.String()
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	before := p.read(t, "failed=1")
	defer before.Close()
	all := p.read(t, "")
	defer all.Close()
	large := func(name, network string) {
		t.Helper()
		if resp := p.exchange(t, network, question(name, dns.TypeTXT)); resp.Truncated != (network == "udp") {
			t.Errorf("%s over %s: %v", name, network, resp)
		}
	}
	large("again.example", "udp")
	large("lost.example", "udp")
	large("AGAIN.example", "tcp")
	large("lost2.example", "udp") // from the cache
	large("lost2.example", "udp")
	cut := p.exchange(t, "tcp", question("cut.example", dns.TypeA))
	if !cut.Truncated {
		t.Errorf("%v", cut)
	}
	of := func(name, source string) seen.Record {
		return seen.Record{
			Name: name, Type: "TXT", Rcode: "NOERROR", Truncated: true, Source: source, Server: server,
			Reason: "truncated, and not asked again over TCP within 5s", Rows: []string{"A9"}, Noteworthy: true,
		}
	}
	twice := seen.Record{
		Name: "cut.example", Transport: "tcp", Rcode: "NOERROR", Truncated: true, Source: "upstream", Server: server,
		Reason: "truncated also over TCP: no nameserver has sent the whole reply", Rows: []string{"F2"}, Noteworthy: true,
	}
	wantSeen(t, p.past(t, ""), twice)
	wantSeen(t, next(t, before, 4), twice, of("lost.example", "upstream"), of("lost2.example", "upstream"), of("lost2.example", "cache"))
	past := p.past(t, "")
	wantSeen(t, past, of("lost.example", "upstream"), of("lost2.example", "upstream"), of("lost2.example", "cache"), twice)
	for _, r := range past {
		if r.UID == nil || int(*r.UID) != os.Getuid() {
			t.Errorf("%s: the uid is %v", r.Name, r.UID)
		}
	}
	for _, r := range next(t, all, 6)[:5] {
		if r.Noteworthy || r.Truncated != (r.Transport == "udp") {
			t.Errorf("%+v", r)
		}
	}
}

// A filter selects by what its parameters mean, whatever their form, and a wrong one is named.
func TestFilters(t *testing.T) { // R13
	t.Parallel()
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: []upstream.Spec{
		{Addr: netip.MustParseAddrPort("127.0.0.11:1")}, {Addr: netip.MustParseAddrPort("[::1]:1")},
	}, Timeout: 2 * time.Second}})
	p.ask(t, "www.xn--bcher-kva.example", 0)
	for params, want := range map[string]bool{
		"server=127.0.0.11": true, "server=127.0.0.11:1": true, "server=::1": true, "server=0:0::1": true, "server=[::1]:1": true, "server=[::1]": true,
		"server=127.0.0.1": false, "server=127.0.0.11:53": false, "server=10.127.0.0": false,
		"type=0": true, "type=type0": true, "type=A": false, "type=1": false,
		"rcode=servfail": true, "rcode=2": true, "rcode=RCODE2": true, "rcode=NXDOMAIN": false, "rcode=3": false, "rcode=dropped": false, "rcode=BADSIG": false,
		"client=127.0.0.1": true, "client=::ffff:127.0.0.1": true, "client=127.0.0.0/8": true, "client=127.0.0.1:1": false, "client=127.0.0.2": false,
		"name=xn--bcher-kva.example": true, "name=XN--BCHER-KVA.example.": true, "name=.": true, "name=cher-kva.example": false,
	} {
		if got := p.past(t, params); (len(got) == 1) != want {
			t.Errorf("%s: %+v", params, got)
		}
	}
	if r := p.past(t, "")[0]; r.Type != "TYPE0" || len(p.past(t, "client="+r.Client.String())) != 1 {
		t.Errorf("%+v", r)
	}
	for _, params := range []string{
		"server=nonsense", "server=SERVFAIL", "server=10.96.0", "type=NOPE", "type=65536", "type=-1", "rcode=NOPE", "rcode=RCODEX", "rcode=4096",
		"name=b%C3%BCcher.example", "name=a..b", "source=nope", "slow=5", "slow=-1s",
	} {
		values, err := url.ParseQuery(params)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := seen.ParseFilter(values); err == nil || !strings.Contains(err.Error(), "want") {
			t.Errorf("%s: %v", params, err)
		}
	}
}

// A reader gets the records that its filter selects, in order, past ones once.
func TestReader(t *testing.T) { // R13
	t.Parallel()
	fake := nameserver(t, fakedns.Rcode(dns.RcodeServerFailure))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	p.ask(t, "0.example", dns.TypeA)
	all, failed, below, other := p.read(t, ""), p.read(t, "failed=1"), p.read(t, "name=Shop.svc.cluster.local&type=aaaa"), p.read(t, "client=192.0.2.1")
	own := p.read(t, fmt.Sprint("client=", os.Getuid()))
	p.ask(t, "1.example", dns.TypeA)
	if past := all.Past(time.Time{}); len(past) != 2 {
		t.Errorf("%+v", past)
	}
	p.ask(t, "web.shop.svc.cluster.local", dns.TypeA)
	p.exchange(t, "tcp", question("web.shop.svc.cluster.local", dns.TypeAAAA))
	p.ask(t, "2.example", dns.TypeA)
	names := func(records []seen.Record) string {
		var texts []string
		for _, r := range records {
			texts = append(texts, strings.TrimSuffix(r.Name, ".")+" "+r.Type)
		}
		return strings.Join(texts, ", ")
	}
	if got := names(next(t, all, 3)); got != "web.shop.svc.cluster.local A, web.shop.svc.cluster.local AAAA, 2.example A" {
		t.Error(got)
	}
	if got := names(next(t, failed, 2)); got != "1.example A, 2.example A" {
		t.Error(got)
	}
	if got := names(next(t, below, 1)); got != "web.shop.svc.cluster.local AAAA" {
		t.Error(got)
	}
	for _, r := range next(t, own, 4) {
		if r.UID == nil || int(*r.UID) != os.Getuid() || r.Took == nil && r.Name != "1.example." {
			t.Errorf("%+v", r)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if records, lost, err := other.Next(ctx); err == nil || lost > 0 {
		t.Errorf("%+v, %d, %v", records, lost, err)
	}
}

// Eight readers that do not read lose queries and count them, and none waits for them. A ninth is refused.
func TestReadersThatDoNotRead(t *testing.T) { // R13
	t.Parallel()
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(nameserver(t, fakedns.Silence))}})
	var readers []*seen.Reader
	for range 8 {
		readers = append(readers, p.read(t, ""))
	}
	if _, err := p.Read(new(seen.Filter)); err == nil {
		t.Error("there is a ninth reader")
	}
	const queries = 2000
	for range queries {
		p.ask(t, "web.shop.svc.cluster.local", dns.TypeA)
	}
	for _, r := range readers {
		records, lost, err := r.Next(t.Context())
		if err != nil || len(records) == 0 || uint64(len(records))+lost != queries {
			t.Errorf("%d queries, %d lost, %v", len(records), lost, err)
		}
		r.Close()
	}
	if _, err := p.Read(new(seen.Filter)); err != nil {
		t.Error(err)
	}
}

// Failures of many clients at the same time: the last 1,000 are kept, each whole and with its client.
func TestManyFailures(t *testing.T) { // R13
	t.Parallel()
	fake := nameserver(t, fakedns.Rcode(dns.RcodeServerFailure))
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
	p.ask(t, "0.example", dns.TypeA)
	r := p.read(t, "failed=1")
	var asking sync.WaitGroup
	for client := range 8 {
		asking.Go(func() {
			conn, err := net.Dial("udp", p.addr("udp"))
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			for range 250 {
				query := question(fmt.Sprintf("%d.example", client), dns.TypeA)
				resp, _, err := new(dns.Client).ExchangeWithConn(query, &dns.Conn{Conn: conn})
				if err != nil || resp.Rcode != dns.RcodeServerFailure {
					t.Errorf("%v, %v", resp, err)
				}
			}
		})
	}
	asking.Wait()
	past := r.Past(time.Time{})
	if len(past) != 1000 {
		t.Errorf("%d failures are kept, want 1000", len(past))
	}
	byName, found := map[string]string{}, 0 // the budget may not suffice for all
	for _, rec := range past {
		client := rec.Client.String()
		if rec.Name != "0.example." && byName[rec.Name] != "" && byName[rec.Name] != client || !strings.HasSuffix(rec.Reason, "SERVFAIL") {
			t.Fatalf("%+v", rec)
		}
		byName[rec.Name] = client
		if rec.UID != nil {
			found++
		}
	}
	if t.Logf("the owners of %d are known", found); found == 0 {
		t.Error("none has an owner")
	}
}
