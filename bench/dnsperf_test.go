package main

import (
	"os"
	"strings"
	"testing"
	"time"
)

func readTestdata(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestParseDNSPerf(t *testing.T) {
	got, err := parseDNSPerf(readTestdata(t, "dnsperf.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if got.sent != 154253 || got.completed != 154253 || got.noerror != 154253 || got.lost != 0 {
		t.Errorf("counts: %+v", got)
	}
	if got.perSecond != 154181.151583 {
		t.Errorf("rate %v, want 154181.151583", got.perSecond)
	}
	if got.latencies != nil {
		t.Errorf("%d latencies of a run that was not verbose", len(got.latencies))
	}
	if err := got.valid(); err != nil {
		t.Error(err)
	}
}

func TestParseDNSPerfLatencies(t *testing.T) {
	got, err := parseDNSPerf(readTestdata(t, "dnsperf-verbose.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if got.completed != 20 || len(got.latencies) != 20 {
		t.Fatalf("%d queries and %d latencies, want 20", got.completed, len(got.latencies))
	}
	for q, want := range map[float64]time.Duration{
		0:    105 * time.Microsecond,
		0.5:  200 * time.Microsecond,
		0.99: 288 * time.Microsecond,
		1:    288 * time.Microsecond,
	} {
		if got := got.quantile(q).Round(time.Microsecond); got != want {
			t.Errorf("quantile %v: %v, want %v", q, got, want)
		}
	}
}

func TestParseDNSPerfLost(t *testing.T) {
	got, err := parseDNSPerf(readTestdata(t, "dnsperf-lost.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if got.sent != 6 || got.lost != 6 || got.completed != 0 {
		t.Errorf("counts: %+v", got)
	}
	if got.valid() == nil {
		t.Error("a run without answers counts")
	}
}

func TestParseDNSPerfErrors(t *testing.T) {
	for name, text := range map[string]string{
		"nothing":       "",
		"no statistics": "DNS Performance Testing Tool\nVersion 2.10.0\n",
		"no number":     "Queries sent: many\nQueries completed: 1\nQueries lost: 0\n",
		"a bad latency": "> NOERROR a.example A soon\n",
	} {
		if got, err := parseDNSPerf(text); err == nil {
			t.Errorf("%s: %+v, want an error", name, got)
		}
	}
}

func TestValid(t *testing.T) {
	for _, c := range []struct {
		name  string
		tally tally
		want  string
	}{
		{"all answered", tally{sent: 1000, completed: 1000, noerror: 1000}, ""},
		{"fewer lost than one in a thousand", tally{sent: 10_000, completed: 9991, lost: 9, noerror: 9991}, ""},
		{"one in a thousand lost", tally{sent: 1000, completed: 999, lost: 1, noerror: 999}, "lost"},
		{"a failure", tally{sent: 10, completed: 10, noerror: 9}, "not NOERROR"},
	} {
		err := c.tally.valid()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

func TestArguments(t *testing.T) {
	l := load{queries: "q", seconds: 3, rate: 2000, tcp: true, core: "1", latencies: true}
	if got, want := l.String(), "q TCP 2,000/s"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	got := strings.Join(l.arguments(), " ")
	for _, want := range []string{"taskset -c 1 dnsperf", "-d q", "-l 3", "-Q 2000", "-m tcp", "-v"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in %q", want, got)
		}
	}
}
