package main

import (
	"fmt"
	"testing"

	"github.com/nametap/nametap/dnsproxy/seen"
)

// Frequent keys are found among more keys than are counted, no count is too low, and OVER bounds how much it is too
// high.
func TestTop(t *testing.T) { // R17
	counted, exact := newTop(), map[string]int{}
	add := func(key string) {
		exact[key]++
		counted.add(key, &seen.Record{Rcode: "SERVFAIL"})
	}
	const rounds, frequent = 2000, 10
	for round := range rounds {
		for i := range frequent {
			add(fmt.Sprintf("frequent-%d", i))
		}
		for i := range 3 {
			add(fmt.Sprintf("rare-%d", 3*round+i))
		}
	}
	if len(counted.byKey) != maxKeys || len(counted.all) != maxKeys {
		t.Errorf("%d keys are counted, want %d", len(counted.byKey), maxKeys)
	}
	all := counted.mostFrequent(maxKeys)
	for i, c := range all {
		if n := exact[c.Key]; c.Queries < n || c.Queries-c.Over > n {
			t.Errorf("%s: %d counted, over %d, want %d", c.Key, c.Queries, c.Over, n)
		}
		if want := fmt.Sprintf("frequent-%d", i); i < frequent && (c.Key != want || c.Queries != rounds || c.Failed != rounds || c.Over != 0) {
			t.Errorf("row %d: %+v, want %s", i, c, want)
		}
	}
}
