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

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/settings"
)

// A topKey says by what queries are counted.
type topKey string

// The values of topKey.
const (
	keyName   topKey = "name"
	keyClient topKey = "client"
	keyServer topKey = "server"
	keyRcode  topKey = "rcode"
)

// newTopCommand returns the command top, which counts the queries that tail would show.
func newTopCommand() *cobra.Command {
	t := &tailCommand{by: keyName}
	command := &cobra.Command{
		Use:   "top [NAME]",
		Short: "Show which names, clients, nameservers or response codes have most queries",
		Long: `Count the queries that nametap tail would show with the same flags, and show the most
frequent names, clients, nameservers or response codes: on a terminal every second, and at
the end, which is after --for, --count, --no-follow or ^C. TOOK is a mean.

1,000 keys are counted, and all others together. The exit code is 1 if there was no query.`,
		Example: `  nametap top
  nametap top --by client --failed
  nametap top --by server --for 30s --output json`,
		Args: usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(command *cobra.Command, args []string) error {
			return t.run(command.Context(), command.OutOrStdout(), args)
		},
	}
	t.declare(command.Flags())
	command.Flags().Var(settings.OneOf(&t.by, keyName, keyClient, keyServer, keyRcode), "by",
		"what to count `by`: name, client, server or rcode")
	return command
}

// redraw shows the counts on a terminal, once a second.
func (t *tailCommand) redraw(w io.Writer) error {
	if t.output == outputJSON || !isTerminal(w) || time.Since(t.drawn) < time.Second {
		return nil
	}
	t.drawn = time.Now()
	const clear = "\x1b[H\x1b[2J" // the cursor to the first line, and no text
	if _, err := io.WriteString(w, clear); err != nil {
		return err
	}
	return t.printCounts(w)
}

const (
	// maxKeys is how many keys are counted. Queries with further keys are counted together, as otherKeys.
	maxKeys   = 1000
	otherKeys = "(others)"
	// maxRows is how many counts are printed as text.
	maxRows = 20
)

// counts has the number of queries by key.
type counts map[string]*topCount

// A topCount counts the queries with one key.
type topCount struct {
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
		one = &topCount{Key: key}
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
	sorted := slices.SortedFunc(maps.Values(t.counts), func(a, b *topCount) int {
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
			mean = seconds(c.Took / float64(c.measured)).String()
		}
		fmt.Fprintf(&text, row, c.Queries, c.Failed, mean, c.Key)
	}
	if more := len(sorted) - maxRows; more > 0 {
		fmt.Fprintf(&text, "and %d more; --output json has all\n", more)
	}
	_, err := io.WriteString(w, text.String())
	return err
}
