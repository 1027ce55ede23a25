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

// A names has the suffix that lines are grouped by.
func TestSuffix(t *testing.T) { // R21
	t.Parallel()
	for name, want := range map[string]string{
		"api.payments.example.com.":          "example.com",
		"example.com.":                       "example.com",
		"localhost.":                         "localhost",
		".":                                  ".",
		"web.shop.svc.cluster.local.":        "shop.svc.cluster.local",
		"a.b.web.shop.svc.cluster.local.":    "shop.svc.cluster.local",
		"www.example.com.svc.cluster.local.": "com.svc.cluster.local",
		"cluster.local.":                     "cluster.local",
		"4.3.2.1.in-addr.arpa.":              "in-addr.arpa",
		`a\.b.example.com.`:                  "example.com",
	} {
		if got := suffixOf(name, "cluster.local"); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// logged returns the lines of a summary over a time in which add is called every 10 ms.
func logged(s *summary, over time.Duration, add func(at time.Duration)) (lines []string) {
	start := time.Unix(1_000_000, 0)
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
	for at := time.Duration(0); at < over; at += 10 * time.Millisecond {
		add(at)
		if line := s.due(start.Add(at)); line != nil {
			text.Reset()
			line.log(log)
			lines = append(lines, fmt.Sprintf("%v %s", at.Round(100*time.Millisecond), strings.TrimSpace(text.String())))
		}
	}
	return lines
}

func failure(name, reason string) *seen.Record {
	return &seen.Record{
		Client: netip.MustParseAddrPort("192.0.2.1:4000"), Name: name, Type: "A", Rcode: "SERVFAIL", Source: "upstream", Reason: reason, Rows: []string{"F4"},
	}
}

// The first line about a suffix and a reason comes after a second, the next one after a minute.
func TestRepeat(t *testing.T) { // R21
	t.Parallel()
	s, start := newSummary("cluster.local."), time.Unix(1_000_000, 0)
	lines := logged(s, 150*time.Second, func(at time.Duration) {
		now := start.Add(at)
		if at < 90*time.Second {
			s.add(failure(fmt.Sprintf("n%d.example.com.", at/(10*time.Millisecond)), "no reply in time"), now)
		}
		if at == 5*time.Second {
			stale := failure("old.example.com.", "10.0.0.53: SERVFAIL")
			stale.Rcode, stale.Source, stale.Rows = "NOERROR", "stale", []string{"F9"}
			s.add(stale, now)
			s.addLost(7, now)
		}
	})
	failed := `level=WARN msg="queries failed" count=%d suffix=example.com rcode=SERVFAIL reason="no reply in time" row=F4 first_client=192.0.2.1 example="n%d.example.com A"`
	want := []string{
		"1s " + fmt.Sprintf(failed, 101, 0),
		`6s level=WARN msg="queries got stale answers" count=1 suffix=example.com reason="10.0.0.53: SERVFAIL" row=F9 first_client=192.0.2.1 example="old.example.com A"`,
		`7s level=WARN msg="queries that are not in the log, since there were too many at once" count=7`,
		"1m1s " + fmt.Sprintf(failed, 6000, 101),
		"2m1s " + fmt.Sprintf(failed, 2899, 6101),
	}
	// The lines of 6 s and 7 s are due at the same time.
	if len(lines) == len(want) && strings.HasPrefix(lines[1], "6s level=WARN msg=\"queries that") {
		lines[1], lines[2] = "6s"+lines[2][2:], "7s"+lines[1][2:]
	}
	if got := strings.Join(lines, "\n"); got != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
}

// A flood of suffixes and reasons makes one line a second, counts each query once, and keeps few groups.
func TestFloodOfSuffixes(t *testing.T) { // R21
	t.Parallel()
	s, start, n, total := newSummary("cluster.local."), time.Unix(1_000_000, 0), 0, uint64(0)
	const over = time.Minute
	lines := logged(s, over, func(at time.Duration) {
		for range 10 {
			s.add(failure(fmt.Sprintf("www.example%d.com.", n), fmt.Sprintf("reason %d", n%7)), start.Add(at))
			n++
		}
	})
	if most := int(over/time.Second) + 1; len(lines) > most || len(lines) < most/2 {
		t.Errorf("%d lines in %s", len(lines), over)
	}
	for _, line := range lines {
		var count uint64
		if _, err := fmt.Sscanf(line[strings.Index(line, "count="):], "count=%d", &count); err != nil {
			t.Fatal(err)
		}
		total += count
	}
	if len(s.groups) > maxGroups+2 {
		t.Errorf("%d groups", len(s.groups))
	}
	if last := s.last(); last != nil {
		total += last.count
	}
	if total != uint64(n) { //nolint:gosec // positive
		t.Errorf("%d queries are in the lines, want %d", total, n)
	}
}
