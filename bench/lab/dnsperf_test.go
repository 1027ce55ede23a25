package lab

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
	if got.Sent != 154253 || got.Completed != 154253 || got.NoError != 154253 || got.Lost != 0 {
		t.Errorf("counts: %+v", got)
	}
	if got.PerSecond != 154181.151583 {
		t.Errorf("rate %v, want 154181.151583", got.PerSecond)
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
	if got.Completed != 20 || len(got.latencies) != 20 {
		t.Fatalf("%d queries and %d latencies, want 20", got.Completed, len(got.latencies))
	}
	for q, want := range map[float64]time.Duration{
		0:    105 * time.Microsecond,
		0.5:  200 * time.Microsecond,
		0.99: 288 * time.Microsecond,
		1:    288 * time.Microsecond,
	} {
		if got := got.Quantile(q).Round(time.Microsecond); got != want {
			t.Errorf("quantile %v: %v, want %v", q, got, want)
		}
	}
}

func TestParseDNSPerfLost(t *testing.T) {
	got, err := parseDNSPerf(readTestdata(t, "dnsperf-lost.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if got.Sent != 6 || got.Lost != 6 || got.Completed != 0 {
		t.Errorf("counts: %+v", got)
	}
	if got.valid() == nil {
		t.Error("a run without answers is valid")
	}
}

func TestValid(t *testing.T) {
	for _, c := range []struct {
		name  string
		tally Tally
		want  string
	}{
		{"all answered", Tally{Sent: 1000, Completed: 1000, NoError: 1000}, ""},
		{"fewer lost than one in a thousand", Tally{Sent: 10_000, Completed: 9991, Lost: 9, NoError: 9991}, ""},
		{"one in a thousand lost", Tally{Sent: 1000, Completed: 999, Lost: 1, NoError: 999}, "lost"},
		{"a failure", Tally{Sent: 10, Completed: 10, NoError: 9}, "not NOERROR"},
	} {
		err := c.tally.valid()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}
