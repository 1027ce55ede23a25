package main

import (
	"errors"
	"math"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// startTestUpstream starts an upstream at a free address.
func startTestUpstream(t *testing.T) (*upstream, netip.AddrPort) {
	t.Helper()
	addr, err := freeAddr(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	u, err := startUpstream(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(u.close)
	return u, addr
}

func TestUpstream(t *testing.T) {
	u, addr := startTestUpstream(t)
	ask := func(name string, qtype uint16, wait time.Duration) answer {
		return ask(t.Context(), addr, new(dns.Msg).SetQuestion(name, qtype), wait)
	}
	for _, c := range []struct {
		name           string
		qtype          uint16
		rcode, records int
	}{
		{"www." + externalDomain, dns.TypeA, dns.RcodeSuccess, 1},
		{"WWW.wild." + wildcardDomain, dns.TypeAAAA, dns.RcodeSuccess, 1},
		{"www." + externalDomain, dns.TypeMX, dns.RcodeSuccess, 0},
		{"www." + externalDomain + ownDomain + ".", dns.TypeA, dns.RcodeNameError, 0},
		{"www.other.", dns.TypeA, dns.RcodeNameError, 0},
	} {
		a := ask(c.name, c.qtype, patience)
		if a.failed() || a.reply.Rcode != c.rcode || len(a.reply.Answer) != c.records || len(a.reply.Ns) != 1-c.records {
			t.Errorf("%s: %v, %v", c.name, a.err, a.reply)
		}
	}
	if got := u.asked.Load(); got != 5 {
		t.Errorf("asked %d times, want 5", got)
	}
	u.behave(conduct{silent: true})
	a := ask(probeName, dns.TypeA, 50*time.Millisecond)
	if !a.failed() || a.outcome() == "" {
		t.Errorf("silent: %v", a.reply)
	}
	u.behave(conduct{loss: 1})
	if a := ask(probeName, dns.TypeA, 50*time.Millisecond); !a.failed() {
		t.Errorf("all is lost: %v", a.reply)
	}
}

func TestAskSteadily(t *testing.T) {
	_, addr := startTestUpstream(t)
	answers := askSteadily(t.Context(), addr, 20, distinct("test"))
	if took := answers[19].sent.Sub(answers[0].sent); took < 15*time.Second/steadyRate {
		t.Errorf("20 queries in %v", took)
	}
	if n, took := failures(answers), latencies(answers); n != 0 || len(took) != 20 || took[0] > took[19] {
		t.Errorf("%d failures, latencies %v", n, took)
	}
	if got := answers[7].reply.Question[0].Name; got != "q000007.test."+externalDomain {
		t.Errorf("the eighth answer is for %q", got)
	}
}

func TestCounter(t *testing.T) {
	addr, err := freeAddr(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	u, behind := startTestUpstream(t)
	c, err := startCounter(addr, behind)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	for range 3 {
		if a := ask(t.Context(), addr, new(dns.Msg).SetQuestion(probeName, dns.TypeA), patience); a.failed() {
			t.Error(a.outcome())
		}
	}
	if got, asked := c.queries.Load(), u.asked.Load(); got != 3 || asked != 3 {
		t.Errorf("%d queries counted, %d arrived, want 3", got, asked)
	}
}

func TestQuantile(t *testing.T) {
	sorted := []time.Duration{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 6, 0.99: 10, 1: 10} {
		if got := quantile(sorted, q); got != want {
			t.Errorf("%v: %v, want %v", q, got, want)
		}
	}
	if got := quantile(nil, 0.5); got != 0 {
		t.Errorf("of nothing: %v", got)
	}
}

func TestParseMetrics(t *testing.T) {
	text, err := os.ReadFile("testdata/metrics.txt")
	if err != nil {
		t.Fatal(err)
	}
	got, err := parseMetrics(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if got["go_goroutines"] != 22 || got["nametap_dns_queries_total"] != 7 || !math.IsInf(got["limit"], 1) {
		t.Errorf("%v", got)
	}
	if _, err := parseMetrics("x{a=\"b\"} many\n"); err == nil {
		t.Error("a value that is none is taken")
	}
}

// The zone can be loaded by a server, and is the same each time.
func TestZone(t *testing.T) {
	z := makeZone()
	records := 0
	parser := dns.NewZoneParser(strings.NewReader(z.text.String()), replayDomain, "")
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
	asked, again := z.replayed(n), makeZone().replayed(n)
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

func TestDifference(t *testing.T) {
	message := func(rcode int, records ...string) *dns.Msg {
		m := new(dns.Msg).SetQuestion("www.example.", dns.TypeA)
		m.Response, m.Rcode = true, rcode
		for _, text := range records {
			rr, err := dns.NewRR(text)
			if err != nil {
				t.Fatal(err)
			}
			m.Answer = append(m.Answer, rr)
		}
		return m
	}
	one, two := "www.example. 60 IN A 192.0.2.1", "www.example. 60 IN A 192.0.2.2"
	theirs := message(0, one, two)
	for name, c := range map[string]struct {
		ours *dns.Msg
		same bool
	}{
		"equal":        {message(0, one, two), true},
		"order":        {message(0, two, one), true},
		"older":        {message(0, one, "www.example. 5 IN A 192.0.2.2"), true},
		"rounding":     {message(0, one, "www.example. 61 IN A 192.0.2.2"), true},
		"newer":        {message(0, one, "www.example. 62 IN A 192.0.2.2"), false},
		"less":         {message(0, one), false},
		"more":         {message(0, one, two, "www.example. 60 IN A 192.0.2.3"), false},
		"twice":        {message(0, one, one, two), false},
		"other":        {message(0, one, "www.example. 60 IN A 192.0.2.3"), false},
		"owner's case": {message(0, one, "WWW.example. 60 IN A 192.0.2.2"), false},
		"code":         {message(3, one, two), false},
	} {
		err := difference(c.ours, theirs)
		if (err == nil) != c.same {
			t.Errorf("%s: %v", name, err)
		}
		if newer := errors.Is(err, errNewer); newer != (name == "newer") {
			t.Errorf("%s: TTL said to be above: %v", name, newer)
		}
	}
	edns := message(0, one, two).SetEdns0(1232, false)
	if err := difference(edns, theirs); err != nil {
		t.Errorf("EDNS, which is between two hops: %v", err)
	}
}

func TestResolvConf(t *testing.T) {
	got, err := dns.ClientConfigFromReader(strings.NewReader(string(resolvConf(firstServer(), secondServer()))))
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Servers) != 2 || got.Servers[1] != "127.0.0.3" || got.Ndots != 5 || len(got.Search) != 3 {
		t.Errorf("%+v", got)
	}
}

func TestExperimentOptions(t *testing.T) {
	for _, flag := range []string{"-flood", "-capture"} {
		o, err := parseOptions([]string{flag}, os.Stderr)
		if err != nil || !o.experiments() {
			t.Errorf("%s: %+v, %v", flag, o, err)
		}
	}
	if o, err := parseOptions([]string{"-flood", "-push"}, os.Stderr); err == nil {
		t.Errorf("-flood with -push: %+v", o)
	}
}
