package guard_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/guard"
)

// G13: what was asked and connected to is counted by name. Another process goes on with it, and says what its policy does.
func TestRecords(t *testing.T) {
	g := guard.New("key")
	g.Use(parse(t, example))
	ask := func(text string, qtype uint16, answers int) {
		_, rule := g.Policy().Judge(name(t, text), qtype)
		g.Asked(name(t, text), qtype, rule, answers)
	}
	for range 3 {
		ask("api.example.com", dns.TypeA, -1)
		ask("mail.example.com", dns.TypeTXT, 1)
	}
	ask("mail.example.com", dns.TypeMX, 1)
	ask("mail.example.com", dns.TypeSRV, 0)
	ask("leak.example.com", dns.TypeA, -1)
	g.Connected(name(t, "api.example.com"), netip.MustParseAddrPort("240.64.0.1:443"), true)
	g.Connected(name(t, "api.example.com"), netip.MustParseAddrPort("[::ffff:100.64.0.1]:22"), true)
	g.Connected(name(t, "api.example.com"), netip.MustParseAddrPort("240.64.0.1:23"), false)
	g.Connected("", netip.MustParseAddrPort("10.0.0.1:22"), false)
	text, err := json.Marshal(g.Records())
	if err != nil {
		t.Fatal(err)
	}
	var records guard.Records
	if err := json.Unmarshal(text, &records); err != nil {
		t.Fatal(err)
	}
	next := guard.New("key")
	next.Restore(records)
	next.Use(parse(t, example))
	for _, g := range []*guard.Guard{g, next} {
		lines := new(strings.Builder)
		for _, r := range g.Records().Names {
			fmt.Fprintln(lines, r.Name, r.Verdict, r.Rule, r.Asked, r.Exists, r.Types, r.Ports, r.Private)
		}
		got := lines.String()
		if want := `api.example.com allowed policy.yaml:4 3 false [] [22 443] true
leak.example.com denied  1 false [] [] false
mail.example.com allowed policy.yaml:8 5 true [MX TXT] [] false
`; got != want || g.Records().Names[0].Last.IsZero() {
			t.Errorf("%s\nwant\n%s", got, want)
		}
	}
	queries, connections := g.Counts()
	if got := fmt.Sprint(queries, connections); got != "{8 1} {2 2}" {
		t.Error(got)
	}
}

// G13: there is room for 4,096 names. Names that were used within the last second do not give way, others do.
func TestRecordsGiveWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := guard.New("key")
		for i := range 40_000 {
			g.Asked(name(t, fmt.Sprintf("n%d.example.com", i)), dns.TypeA, nil, -1)
		}
		if n := len(g.Records().Names); n != 4096 {
			t.Errorf("%d names", n)
		}
		time.Sleep(2 * time.Second) //nolint:forbidigo // the bubble's clock
		late := name(t, "late.example.com")
		if allocs := testing.AllocsPerRun(100, func() { g.Asked(late, dns.TypeA, nil, -1) }); allocs != 0 {
			t.Errorf("%v allocations", allocs)
		}
		all := g.Records().Names
		if i := slices.IndexFunc(all, func(r guard.Record) bool { return r.Name == "late.example.com" }); len(all) != 4096 || i < 0 || all[i].Asked != 101 {
			t.Error("a name that is asked for later is not recorded")
		}
	})
}
