package querylog

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
)

// logged returns the lines of a summary over a time in which add is called every 10 ms.
func logged(s summary, over time.Duration, add func(now time.Time, i int)) (lines []string) {
	start := time.Unix(1_000_000, 0)
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
	for i := range int(over / (10 * time.Millisecond)) {
		at := time.Duration(i) * 10 * time.Millisecond
		add(start.Add(at), i)
		text.Reset()
		s.log(log, start.Add(at), false)
		for line := range strings.Lines(text.String()) {
			lines = append(lines, fmt.Sprintf("%v %s", at.Round(100*time.Millisecond), strings.TrimSpace(line)))
		}
	}
	return lines
}

func failure(name, reason string) *seen.Record {
	return &seen.Record{
		Client: netip.MustParseAddrPort("192.0.2.1:4000"), Name: name, Type: "A", Rcode: "SERVFAIL", Source: "upstream", Reason: reason, Rows: []string{"F4"},
	}
}

// The first line about a cause comes after a second, the next one after a minute, whatever the names are. Stale answers
// with the same cause are in the same line.
func TestRepeat(t *testing.T) { // R21
	t.Parallel()
	s := summary{}
	lines := logged(s, 150*time.Second, func(now time.Time, i int) {
		if i < 9000 {
			s.add(failure(fmt.Sprintf("n%d.example%d.com.", i, i%100), "no nameserver answered: 10.0.0.53: no reply in time"), now)
		}
		if i == 500 {
			stale := failure("old.example.com.", "no nameserver answered: all are down")
			stale.Rcode, stale.Source, stale.Rows = "NOERROR", "stale", []string{"F9"}
			s.add(stale, now)
			s.addLost(7, now)
		}
	})
	want := []string{
		`1s level=WARN msg="queries failed" count=101 reason="no nameserver answered" row=F4 first_client=192.0.2.1 example="n0.example0.com A"`,
		`6s level=WARN msg="queries that are not in the log, since there were too many at once" count=7`,
		`1m1s level=WARN msg="queries failed" count=6001 stale=1 reason="no nameserver answered" row=F4 first_client=192.0.2.1 example="n101.example1.com A"`,
		`2m1s level=WARN msg="queries failed" count=2899 reason="no nameserver answered" row=F4 first_client=192.0.2.1 example="n6101.example1.com A"`,
	}
	if got := strings.Join(lines, "\n"); got != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
}

// Clients choose names, and nameservers that are not configured. Neither makes more lines than ten a minute, and each
// query is counted once.
func TestFloodOfCauses(t *testing.T) { // R21
	t.Parallel()
	s, n, total := summary{}, 0, uint64(0)
	lines := logged(s, time.Minute, func(now time.Time, _ int) {
		for range 10 {
			r := failure(fmt.Sprintf("www.example%d.com.", n), "")
			r.Server = fmt.Sprintf("192.0.2.%d", n%200)
			s.add(r, now)
			n++
		}
	})
	if len(lines) > maxGroups+2 {
		t.Errorf("%d lines in a minute", len(lines))
	}
	for _, line := range lines {
		var count uint64
		if _, err := fmt.Sscanf(line[strings.Index(line, "count="):], "count=%d", &count); err != nil {
			t.Fatal(err)
		}
		total += count
	}
	for _, g := range s {
		total += g.count
	}
	if total != uint64(n) || len(s) > maxGroups+2 { //nolint:gosec // positive
		t.Errorf("%d queries are in the lines, want %d; %d groups", total, n, len(s))
	}
}
