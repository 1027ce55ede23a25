package dnsproxy_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
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
	return p.Read(filter)
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
	for len(all) < n {
		records, lost, err := r.Next(tb.Context())
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
	volatile := cmpopts.IgnoreFields(seen.Record{}, "Time", "Client", "UID", "Unit", "Cgroup", "Took", "Age", "Expired", "Local")
	if diff := cmp.Diff(want, got, volatile); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Every kind of noteworthy query is kept, with its reason and its row, over both transports, and no other.
func TestNoteworthy(t *testing.T) { // R13
	synctest.Test(t, func(t *testing.T) {
		fake := nameserver(t, func(query *dns.Msg, network string) *dns.Msg {
			name := query.Question[0].Name
			switch {
			case strings.HasPrefix(name, "servfail"):
				return fakedns.Rcode(dns.RcodeServerFailure)(query, network)
			case strings.HasPrefix(name, "nx"):
				return fakedns.Rcode(dns.RcodeNameError)(query, network)
			case strings.HasPrefix(name, "cut"):
				reply := new(dns.Msg).SetReply(query)
				reply.Truncated = true
				return reply
			}
			return anywhere("192.0.2.1")(query, network)
		})
		server := fake.Addr.String()
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(fake)}})
		for _, name := range []string{"www.example", "www.example", "nx.example", "nx.www.example.svc.cluster.local", "nx.org.cluster.local", "nx.svc.cluster.local", "web.shop.svc.cluster.local", "localhost"} {
			p.ask(t, name, dns.TypeA)
		}
		wantSeen(t, p.past(t, ""))

		p.ask(t, "servfail.example", dns.TypeA)
		p.exchange(t, "tcp", question("servfail.example", dns.TypeA))
		p.exchange(t, "tcp", question("cut.example", dns.TypeAAAA))
		p.ask(t, "nx.shop.svc.cluster.local", dns.TypeA)
		p.load(t, hosts{"void.shop.svc.cluster.local": headless("void", "shop")})
		p.ask(t, "void.shop.svc.cluster.local", dns.TypeA)
		badVersion := withEDNS(question("www.example", dns.TypeA), 1232)
		badVersion.IsEdns0().SetVersion(1)
		p.exchange(t, "udp", badVersion)
		other := question("www.example", dns.TypeA)
		other.Question[0].Qclass = dns.ClassHESIOD
		p.exchange(t, "udp", other)
		other = question("version.example", dns.TypeTXT)
		other.Question[0].Qclass = dns.ClassCHAOS
		p.exchange(t, "udp", other)
		p.exchange(t, "udp", new(dns.Msg).SetUpdate("servfail.example."))
		failed := server + ": SERVFAIL"
		got := p.past(t, "")
		wantSeen(t, got,
			seen.Record{Name: "servfail.example", Rcode: "SERVFAIL", Source: "upstream", Server: server, Reason: failed, Rows: []string{"F3"}, Noteworthy: true},
			seen.Record{Name: "servfail.example", Transport: "tcp", Rcode: "SERVFAIL", Source: "cached_failure", Server: server, Reason: failed, Rows: []string{"F8"}, Noteworthy: true},
			seen.Record{Name: "www.example", Rcode: "BADVERS", Source: "self", Rows: []string{"A10"}, Noteworthy: true},
			seen.Record{Name: "www.example", Class: "HS", Rcode: "REFUSED", Source: "self", Reason: "nametap serves class IN", Rows: []string{"A10"}, Noteworthy: true},
			seen.Record{Name: "version.example", Type: "TXT", Class: "CH", Rcode: "REFUSED", Source: "probe", Reason: "nametap serves class IN", Rows: []string{"A10"}, Noteworthy: true},
			seen.Record{Opcode: "UPDATE", Name: "servfail.example", Type: "SOA", Rcode: "SERVFAIL", Source: "upstream", Server: server, Reason: failed, Rows: []string{"F3"}, Noteworthy: true},
			// All at one time: the other kind comes last.
			seen.Record{Name: "cut.example", Transport: "tcp", Type: "AAAA", Rcode: "NOERROR", Truncated: true, Source: "upstream", Server: server, Reason: "truncated also over TCP: no nameserver has sent the whole reply", Rows: []string{"F2"}, Noteworthy: true},
			seen.Record{Name: "nx.shop.svc.cluster.local", Rcode: "NXDOMAIN", Source: "upstream", Server: server, Reason: "not in the mesh table: forwarded", Rows: []string{"N9"}, Noteworthy: true},
			seen.Record{Name: "void.shop.svc.cluster.local", Rcode: "NOERROR", Source: "table", Reason: "in the mesh table: the host's FQDN, which has no address: is it a headless Service without a ready endpoint?", Rows: []string{"N1", "A2"}, Noteworthy: true},
		)
		for _, r := range got {
			if r.UID == nil || int(*r.UID) != os.Getuid() {
				t.Errorf("%s: the uid is %v", r.Name, r.UID)
			}
		}
	})
}

// A slow answer is kept, and the last 1,000 of its kind do not push out failures.
func TestNoteworthySlow(t *testing.T) { // R13
	synctest.Test(t, func(t *testing.T) {
		p := newProxy(t, dnsproxy.Config{BeforeSync: dnsproxy.BeforeSyncHold, LocalOnly: []string{"svc.cluster.local"}})
		const slow = 1500 * time.Millisecond
		time.AfterFunc(slow, func() { p.load(t, hosts{"slow.shop.svc.cluster.local": service("slow", "shop", "10.0.0.1")}) })
		p.serve(t, "udp", question("slow.shop.svc.cluster.local", dns.TypeA))
		got := p.past(t, "slow=500ms")
		wantSeen(t, got, seen.Record{
			Name: "slow.shop.svc.cluster.local", Rcode: "NOERROR", Source: "table", Rows: []string{"N1", "A1"}, Noteworthy: true,
		})
		if took := got[0].Took; took == nil || *took != slow.Seconds() {
			t.Errorf("it took %v, want %v", took, slow)
		}
		p.serve(t, "udp", question("fails.example", dns.TypeA))
		for i := range 1100 {
			p.serve(t, "udp", question(fmt.Sprintf("%d.shop.svc.cluster.local", i), dns.TypeA))
		}
		if n := len(p.past(t, "rcode=NXDOMAIN")); n != 1000 {
			t.Errorf("%d names that do not exist are kept, want 1000", n)
		}
		if len(p.past(t, "name=fails.example")) == 0 {
			t.Error("the failure was pushed out")
		}
	})
}

// The reason says what each nameserver did.
func TestNoteworthyNameservers(t *testing.T) { // R13, F3
	synctest.Test(t, func(t *testing.T) {
		refuses, fails := nameserver(t, fakedns.Rcode(dns.RcodeRefused)), nameserver(t, fakedns.Rcode(dns.RcodeServerFailure))
		refused, failed := refuses.Addr.String(), fails.Addr.String()
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(refuses, fails)}})
		p.ask(t, "www.example", dns.TypeA)
		wantSeen(t, p.past(t, "server="+refused), seen.Record{
			Name: "www.example", Rcode: "SERVFAIL", Source: "upstream", Server: failed,
			Reason: failed + ": SERVFAIL; " + refused + ": REFUSED", Rows: []string{"F3"}, Noteworthy: true,
		})
	})
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
	n := 0
	until(t, "a wrong reply in time", func() bool {
		n++
		p.ask(t, fmt.Sprintf("w%d.example", n), dns.TypeA)
		got := p.past(t, fmt.Sprintf("name=w%d.example&slow=500ms&server=%s", n, wrong)) // text after an address does not hide it
		return len(got) == 1 && fmt.Sprint(got[0].Rows) == "[F4]" && got[0].Reason == "no nameserver answered: "+silent.Addr.String()+
			": no reply in time; "+wrong.String()+": no reply in time, only packets that are no reply to a query in flight"
	})
}

// A filter selects by what its parameters mean, whatever their form, and a wrong one is named.
func TestFilters(t *testing.T) { // R13
	synctest.Test(t, func(t *testing.T) {
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: []upstream.Spec{
			{Addr: netip.MustParseAddrPort("127.0.0.11:1")}, {Addr: netip.MustParseAddrPort("[::1]:1")},
		}}})
		p.ask(t, "www.xn--bcher-kva.example", 0)
		for params, want := range map[string]bool{
			"server=127.0.0.11": true, "server=127.0.0.11:1": true, "server=::1": true, "server=0:0::1": true, "server=[::1]:1": true, "server=[::1]": true,
			"server=127.0.0.1": false, "server=127.0.0.11:5353": false, "server=10.127.0.0": false,
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
	})
}

// A reader gets the records that its filter selects, in order, past ones once.
func TestReader(t *testing.T) { // R13
	synctest.Test(t, func(t *testing.T) {
		p := newProxy(t, dnsproxy.Config{})
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
		p.serve(t, "udp", question("0.example", dns.TypeA))
		all, failed, below, other := p.read(t, ""), p.read(t, "failed=1"), p.read(t, "name=Shop.svc.cluster.local&type=aaaa"), p.read(t, "client=192.0.2.1")
		p.serve(t, "udp", question("1.example", dns.TypeA))
		if past := all.Past(time.Time{}); len(past) != 2 {
			t.Errorf("%+v", past)
		}
		p.serve(t, "udp", question("web.shop.svc.cluster.local", dns.TypeA))
		p.serve(t, "tcp", question("web.shop.svc.cluster.local", dns.TypeAAAA))
		p.serve(t, "udp", question("2.example", dns.TypeA))
		for _, c := range []struct {
			reader *seen.Reader
			want   []string
		}{
			{all, []string{"web.shop.svc.cluster.local. A", "web.shop.svc.cluster.local. AAAA", "2.example. A"}},
			{failed, []string{"1.example. A", "2.example. A"}},
			{below, []string{"web.shop.svc.cluster.local. AAAA"}},
		} {
			var got []string
			for _, r := range next(t, c.reader, len(c.want)) {
				got = append(got, r.Name+" "+r.Type)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if records, lost, err := other.Next(ctx); err == nil || lost > 0 {
			t.Errorf("%+v, %d, %v", records, lost, err)
		}
	})
}

// Eight readers that do not read lose queries and count them, and none waits for them. To a ninth, the oldest gives way.
func TestReadersThatDoNotRead(t *testing.T) { // R13
	synctest.Test(t, func(t *testing.T) {
		p := newProxy(t, dnsproxy.Config{})
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
		var readers []*seen.Reader
		for range 9 {
			readers = append(readers, p.read(t, ""))
		}
		if _, _, err := readers[0].Next(t.Context()); !errors.Is(err, seen.ErrGaveWay) {
			t.Errorf("the oldest of nine readers: %v", err)
		}
		const queries = 2000
		for range queries {
			p.serve(t, "udp", question("web.shop.svc.cluster.local", dns.TypeA))
		}
		for _, r := range readers[1:] {
			records, lost, err := r.Next(t.Context())
			if err != nil || len(records) == 0 || uint64(len(records))+lost != queries {
				t.Errorf("%d queries, %d lost, %v", len(records), lost, err)
			}
			r.Close()
		}
	})
}
