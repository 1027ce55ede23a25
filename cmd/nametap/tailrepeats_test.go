package main

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
)

// R13: failures that are repeated within a second are shown once, and the last line says how many there were. Other
// failures, and queries that did not fail, have a line each.
func TestRepeats(t *testing.T) {
	var out strings.Builder
	c := &tailCommand{header: true}
	began := time.Now()
	show := func(after time.Duration, name string, noteworthy bool) {
		t.Helper()
		_, err := c.show(&out, &seen.Record{
			Time: began.Add(after), Client: netip.MustParseAddrPort("192.0.2.1:4711"), Name: name, Type: "A", Rcode: "SERVFAIL", Source: "self", Noteworthy: noteworthy,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, after := range []time.Duration{0, 1, 999, 1000} {
		show(after*time.Millisecond, "a.example.", true)
		show(after*time.Millisecond, "b.example.", true)
		show(after*time.Millisecond, "fine.example.", false)
	}
	for line, times := range map[string]int{"a.example A ": 2, "b.example A ": 2, "fine.example A ": 4} {
		if got := strings.Count(out.String(), line); got != times {
			t.Errorf("%q is there %d times, want %d:\n%s", line, got, times, out.String())
		}
	}
	if c.shown != 12 || c.hidden != 4 {
		t.Errorf("%d shown, %d hidden; want 12 and 4", c.shown, c.hidden)
	}
}
