package table_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// F12, R10: while settings change, a name that is local-only by the previous or by the next ones is so.
func TestStrictest(t *testing.T) {
	t.Parallel()
	const seed, worlds = 1, 2000
	random := rand.New(rand.NewPCG(seed, seed))
	name := func() string {
		labels := make([]string, 1+random.IntN(4))
		for i := range labels {
			labels[i] = string(rune('a' + random.IntN(2)))
		}
		return strings.Join(labels, ".")
	}
	suffixes := func() table.Suffixes {
		var lists [2][]string
		for i := range lists {
			for range random.IntN(3) {
				lists[i] = append(lists[i], name())
			}
		}
		var s table.Suffixes
		var err error
		if s.Bypass, err = table.ParseSuffixes("bypass", lists[0]); err != nil {
			t.Fatal(err)
		}
		if s.LocalOnly, err = table.ParseSuffixes("local-only", lists[1]); err != nil {
			t.Fatal(err)
		}
		return s
	}
	kept := 0
	for range worlds {
		previous, next := suffixes(), suffixes()
		both := previous.Strictest(next)
		search := []wire.Name{must(wire.ParseHostname(name()))}
		for range 20 {
			q := must(wire.ParseHostname(name()))
			_, _, before := previous.LocalSearched(q, search)
			_, _, after := next.LocalSearched(q, search)
			_, _, between := both.LocalSearched(q, search)
			if (before || after) && !between {
				t.Fatalf("%s, search %v: local-only by %v: %v, by %v: %v, and not by %v", q, search, previous, before, next, after, both)
			}
			if between {
				kept++
			}
		}
	}
	if kept < worlds {
		t.Error(fmt.Errorf("only %d names were local-only", kept))
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}
