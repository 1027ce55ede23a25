package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/internal/clip"
)

// A tailKey says by what `nametap tail --by` counts queries.
type tailKey string

// The values of tailKey.
const (
	keyName   tailKey = "name"
	keyClient tailKey = "client"
	keyServer tailKey = "server"
	keyRcode  tailKey = "rcode"
)

const (
	// maxKeys is how many keys are counted. Queries with further keys are counted together, as otherKeys.
	maxKeys   = 1000
	otherKeys = "(others)"
	// maxRows is how many counts are printed as text.
	maxRows = 20
)

// counts has the number of queries by key.
type counts map[string]*tailCount

// A tailCount counts the queries with one key.
type tailCount struct {
	Key     string  `json:"key"`
	Queries int     `json:"queries"`
	Failed  int     `json:"failed"`
	Took    float64 `json:"tookSeconds"` // the sum of the times that were measured

	measured int // how many were
}

// key returns the key under which a query is counted.
func (t *tailCommand) key(r *seen.Record) string {
	switch {
	case t.by == keyClient:
		return t.names.nameOf(r)
	case t.by == keyRcode:
		return r.Rcode
	case t.by == keyName:
		return clip.Line(r.Question())
	case r.Source != "upstream":
		return r.Source
	}
	return cmp.Or(r.Server, "none answered")
}

// add counts a query.
func (c *counts) add(key string, r *seen.Record) {
	if *c == nil {
		*c = counts{}
	}
	if (*c)[key] == nil && len(*c) >= maxKeys {
		key = otherKeys
	}
	one := (*c)[key]
	if one == nil {
		one = &tailCount{Key: key}
		(*c)[key] = one
	}
	one.Queries++
	if r.Rcode != "NOERROR" && r.Rcode != "NXDOMAIN" || r.Source == "stale" {
		one.Failed++
	}
	if r.Took != nil {
		one.Took, one.measured = one.Took+*r.Took, one.measured+1
	}
}

// printCounts prints the counts, the largest first: in JSON one object a line.
func (t *tailCommand) printCounts(w io.Writer) error {
	sorted := slices.SortedFunc(maps.Values(t.counts), func(a, b *tailCount) int {
		return cmp.Or(cmp.Compare(b.Queries, a.Queries), cmp.Compare(a.Key, b.Key))
	})
	if t.output == outputJSON {
		encoder := json.NewEncoder(w)
		for _, c := range sorted {
			if err := encoder.Encode(c); err != nil {
				return err
			}
		}
		return nil
	}
	const row = "%9v  %8v  %9v  %s\n"
	var text strings.Builder
	fmt.Fprintf(&text, row, "QUERIES", "FAILED", "TOOK", strings.ToUpper(string(t.by)))
	for _, c := range sorted[:min(maxRows, len(sorted))] {
		mean := "-"
		if c.measured > 0 {
			mean = time.Duration(c.Took / float64(c.measured) * float64(time.Second)).Round(time.Microsecond).String()
		}
		fmt.Fprintf(&text, row, c.Queries, c.Failed, mean, c.Key)
	}
	if more := len(sorted) - maxRows; more > 0 {
		fmt.Fprintf(&text, "and %d more; --output json has all\n", more)
	}
	_, err := io.WriteString(w, text.String())
	return err
}
