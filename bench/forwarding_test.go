package main

import (
	"errors"
	"math"
	"os"
	"testing"

	"github.com/miekg/dns"
)

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
		t.Error("what is not a value is taken")
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
