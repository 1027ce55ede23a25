package lab

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

func TestLineWriter(t *testing.T) {
	w := newLineWriter()
	for _, part := range []string{"a", "ck\nna", "ck \"x\"\n"} {
		if n, err := w.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatal(n, err)
		}
	}
	if one, two := <-w.lines, <-w.lines; one != "ack" || two != `nack "x"` {
		t.Errorf("lines %q and %q", one, two)
	}
}

func TestResolver(t *testing.T) {
	u, addr := startTestUpstream(t)
	hosts := []Host{{Name: "one." + strings.TrimSuffix(ExternalDomain, ".")}, {Name: "two." + strings.TrimSuffix(ExternalDomain, ".")}}
	const queries = 20
	for i, m := range Manners() {
		r, err := NewResolver(addr, Mixes()[0], hosts)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		for range queries {
			if took, err := r.Ask(m); err != nil || took <= 0 {
				t.Fatalf("%v, %v", took, err)
			}
		}
		if got, want := u.Asked.Load(), int64((i+1)*queries); got != want {
			t.Errorf("%s: asked %d times, want %d", m.What, got, want)
		}
		if open := r.socket >= 0; open == m.fresh {
			t.Errorf("%s: a socket is left open: %v", m.What, open)
		}
	}
}

func TestResolverWantsRecords(t *testing.T) {
	_, addr := startTestUpstream(t)
	for name, why := range map[string]string{"www.other": "NXDOMAIN", clusterDomain + "." + ExternalDomain: ""} {
		r, err := NewResolver(addr, Mixes()[0], []Host{{Name: name}})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if _, err := r.Ask(Manners()[0]); (err == nil) != (why == "") || err != nil && !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v", name, err)
		}
	}
	query := new(dns.Msg).SetQuestion("www.", dns.TypeA)
	message := func(m *dns.Msg) []byte {
		wire, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return wire
	}
	other := new(dns.Msg).SetReply(query)
	other.Id++
	for what, reply := range map[string][]byte{
		"no records": message(new(dns.Msg).SetReply(query)), "other ID": message(other), "a query": message(query), "nothing": nil,
	} {
		if looksRight(message(query), reply) == nil {
			t.Errorf("%s is taken for an answer", what)
		}
	}
}

// Rules cannot be installed in the namespace of the machine.
func TestOwnNamespace(t *testing.T) {
	if InOwnNamespace() == nil {
		t.Error("the machine's namespace is taken for one of our own")
	}
	outside, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	inside := ""
	err = InNetspace(func() error {
		var err error
		inside, err = os.Readlink("/proc/thread-self/ns/net")
		return errors.Join(err, InOwnNamespace())
	})
	if errors.Is(err, unix.EPERM) {
		t.Skip("LEFT OUT: making a network namespace, it needs root")
	}
	if err != nil || inside == "" || inside == outside {
		t.Errorf("namespace %q, outside %q: %v", inside, outside, err)
	}
	if after, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || after != outside {
		t.Errorf("namespace %q afterwards: %v", after, err)
	}
}

// startTestUpstream starts an upstream at a free address.
func startTestUpstream(t *testing.T) (*Upstream, netip.AddrPort) {
	t.Helper()
	addr, err := FreeAddr(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	u, err := StartUpstream(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(u.Close)
	return u, addr
}

func TestUpstream(t *testing.T) {
	u, addr := startTestUpstream(t)
	ask := func(name string, qtype uint16, wait time.Duration) Answer {
		return Ask(t.Context(), addr, new(dns.Msg).SetQuestion(name, qtype), wait)
	}
	for _, c := range []struct {
		name           string
		qtype          uint16
		rcode, records int
	}{
		{"www." + ExternalDomain, dns.TypeA, dns.RcodeSuccess, 1},
		{"WWW.wild." + wildcardDomain, dns.TypeAAAA, dns.RcodeSuccess, 1},
		{"www." + ExternalDomain, dns.TypeMX, dns.RcodeSuccess, 0},
		{"www." + ExternalDomain + ownDomain + ".", dns.TypeA, dns.RcodeNameError, 0},
		{"www.other.", dns.TypeA, dns.RcodeNameError, 0},
	} {
		a := ask(c.name, c.qtype, Patience)
		if a.Failed() || a.Reply.Rcode != c.rcode || len(a.Reply.Answer) != c.records || len(a.Reply.Ns) != 1-c.records {
			t.Errorf("%s: %v, %v", c.name, a.Err, a.Reply)
		}
	}
	if got := u.Asked.Load(); got != 5 {
		t.Errorf("asked %d times, want 5", got)
	}
	u.Behave(Conduct{Silent: true})
	a := ask(ProbeName, dns.TypeA, 50*time.Millisecond)
	if !a.Failed() || a.Outcome() == "" {
		t.Errorf("silent: %v", a.Reply)
	}
	u.Behave(Conduct{Loss: 1})
	if a := ask(ProbeName, dns.TypeA, 50*time.Millisecond); !a.Failed() {
		t.Errorf("all is lost: %v", a.Reply)
	}
}

func TestAskSteadily(t *testing.T) {
	_, addr := startTestUpstream(t)
	answers := AskSteadily(t.Context(), addr, 20, Distinct("test"))
	if took := answers[19].sent.Sub(answers[0].sent); took < 15*time.Second/SteadyRate {
		t.Errorf("20 queries in %v", took)
	}
	if n, took := Failures(answers), Latencies(answers); n != 0 || len(took) != 20 || took[0] > took[19] {
		t.Errorf("%d failures, latencies %v", n, took)
	}
	if got := answers[7].Reply.Question[0].Name; got != "q000007.test."+ExternalDomain {
		t.Errorf("the eighth answer is for %q", got)
	}
}

func TestQuantile(t *testing.T) {
	sorted := []time.Duration{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 6, 0.99: 10, 1: 10} {
		if got := Quantile(sorted, q); got != want {
			t.Errorf("%v: %v, want %v", q, got, want)
		}
	}
	if got := Quantile(nil, 0.5); got != 0 {
		t.Errorf("of nothing: %v", got)
	}
}

// The zone can be loaded by a server, and is the same each time.
func TestZone(t *testing.T) {
	z := MakeZone()
	records := 0
	parser := dns.NewZoneParser(strings.NewReader(z.Text.String()), ReplayDomain, "")
	for rr, ok := parser.Next(); ok; rr, ok = parser.Next() {
		if ttl := rr.Header().Ttl; ttl < shortestTTL || ttl > longestTTL || rr.Header().Class != dns.ClassINET {
			t.Errorf("record %v", rr)
		}
		records++
	}
	if err := parser.Err(); err != nil {
		t.Fatal(err)
	}
	if records < 2*replayNames || len(z.questions) != replayNames {
		t.Errorf("%d records, questions for %d names", records, len(z.questions))
	}
	const n = 10_000
	asked, again := z.Replayed(n), MakeZone().Replayed(n)
	types, missing, names := map[uint16]int{}, 0, map[string]int{}
	for i, q := range asked {
		if again[i] != q {
			t.Fatalf("question %d is %v, and the second time %v", i, q, again[i])
		}
		types[q.Qtype]++
		names[q.Name]++
		if strings.HasPrefix(q.Name, "nx") {
			missing++
		}
	}
	if len(types) != 5 || missing < n*(missingShare-3)/100 || missing > n*(missingShare+3)/100 || len(names) > n*2/3 {
		t.Errorf("types %v, %d for missing names, %d names", types, missing, len(names))
	}
}

func TestResolvConf(t *testing.T) {
	got, err := dns.ClientConfigFromReader(strings.NewReader(string(resolvConf(FirstServer(), SecondServer()))))
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Servers) != 2 || got.Servers[1] != "127.0.0.3" || got.Ndots != 5 || len(got.Search) != 3 {
		t.Errorf("%+v", got)
	}
}
