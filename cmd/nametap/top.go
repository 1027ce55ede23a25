package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/settings"
)

// A topCommand is one run of nametap top.
type topCommand struct {
	seenQueries
	by      topKey
	rows    int
	counted *top
}

func newTopCommand() *cobra.Command {
	t := &topCommand{by: keyName, counted: newTop()}
	command := &cobra.Command{
		Use:   "top [NAME]",
		Short: "Show which names, clients, nameservers or response codes have most queries",
		Long: `Count the queries that the agent answers from now on, with NAME those for the name and all
names below it, and show the most frequent names, clients, nameservers or response codes:
on a terminal every second, otherwise once at the end, which is after --for or ^C.

1,000 keys are counted. If there are more, a number may be too high by as much as OVER says.
The exit code is 1 if --for found no query.`,
		Example: `  nametap top
  nametap top --by client --failed
  nametap top --by server --for 30s --output json`,
		Args: usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(command *cobra.Command, args []string) error {
			return t.run(command.Context(), command.OutOrStdout(), args)
		},
	}
	flags := command.Flags()
	t.declare(flags)
	flags.Var(settings.OneOf(&t.by, keyName, keyClient, keyServer, keyRcode), "by",
		"what to count `by`: name, client, server or rcode")
	flags.IntVarP(&t.rows, "count", "n", 20, "show this `number` of rows")
	return command
}

// A topKey says by what queries are counted: for keyName, there is one count for each name.
type topKey string

// The values of topKey.
const (
	keyName   topKey = "name"
	keyClient topKey = "client"
	keyServer topKey = "server"
	keyRcode  topKey = "rcode"
)

// key returns the key under which a query is counted.
func (t *topCommand) key(r *seen.Record) string {
	switch t.by {
	case keyClient:
		return t.names.nameOf(r)
	case keyServer:
		switch {
		case r.Source != "upstream":
			return r.Source
		case r.Server == "":
			return "none answered"
		}
		return r.Server
	case keyRcode:
		return r.Rcode
	case keyName:
	}
	return clip.Line(r.Question())
}

func (t *topCommand) run(ctx context.Context, w io.Writer, args []string) error {
	if t.rows <= 0 {
		return usageError{fmt.Errorf("--count=%d: want a number of rows", t.rows)}
	}
	t.lookUp = t.by == keyClient
	params, err := t.params(args)
	if err != nil {
		return err
	}
	limited, cancel := t.limited(ctx, w)
	defer cancel()
	return t.countQueries(ctx, limited, w, params)
}

// countQueries counts queries until the context limited ends, and prints the counts.
func (t *topCommand) countQueries(ctx, limited context.Context, w io.Writer, params url.Values) error {
	live := t.output != outputJSON && isTerminal(w)
	records, ended := make(chan *seen.Record), make(chan error, 1)
	go func() {
		ended <- t.status.tail(limited, params, &t.lost, func(r *seen.Record) (more bool, err error) {
			select {
			case records <- r:
				return true, nil
			case <-limited.Done():
				return false, nil
			}
		})
	}()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var err error
	for reading := true; reading; {
		select {
		case r := <-records:
			t.counted.add(t.key(r), r)
		case <-tick.C:
			if live {
				if err := t.redraw(w); err != nil {
					return err
				}
			}
		case err = <-ended:
			reading = false
		}
	}
	stopped := limited.Err() != nil // --for, or a signal
	if !stopped && t.counted.queries == 0 {
		return tailEnded(err)
	}
	if err := t.output.print(w, t.result(), t.print); err != nil {
		return err
	}
	switch {
	case !stopped:
		return tailEnded(err)
	case t.counted.queries == 0 && ctx.Err() == nil:
		return exitError(exitFailed)
	}
	return nil
}

// A topResult is the table in JSON.
type topResult struct {
	By      topKey      `json:"by"`
	Seconds float64     `json:"seconds"`
	Queries int         `json:"queries"`
	Lost    uint64      `json:"lost"`
	Rows    []*topCount `json:"rows"`
}

func (t *topCommand) result() topResult {
	return topResult{
		By: t.by, Seconds: time.Since(t.counted.began).Round(time.Millisecond).Seconds(), Queries: t.counted.queries,
		Lost: t.lost, Rows: t.counted.mostFrequent(t.rows),
	}
}

// clearScreen clears a terminal, and moves its cursor to the first line.
const clearScreen = "\x1b[H\x1b[2J"

// redraw clears the terminal and prints the table.
func (t *topCommand) redraw(w io.Writer) error {
	if _, err := io.WriteString(w, clearScreen); err != nil {
		return err
	}
	return t.output.print(w, nil, t.print)
}

// print prints the table.
func (t *topCommand) print(w io.Writer) {
	took := time.Since(t.counted.began)
	fmt.Fprintf(w, "%d queries in %v\n", t.counted.queries, took.Round(100*time.Millisecond))
	const row = "%9s  %9s  %8s  %9s  %7s  %s\n"
	fmt.Fprintf(w, row, "QUERIES", "PER S", "FAILED", "TOOK", "OVER", strings.ToUpper(string(t.by)))
	for _, c := range t.counted.mostFrequent(t.rows) {
		mean := "-"
		if c.Mean != nil {
			mean = time.Duration(*c.Mean * float64(time.Second)).Round(time.Microsecond).String()
		}
		fmt.Fprintf(w, row, strconv.Itoa(c.Queries), strconv.FormatFloat(float64(c.Queries)/took.Seconds(), 'f', 1, 64),
			strconv.Itoa(c.Failed), mean, strconv.Itoa(c.Over), c.Key)
	}
}

// maxKeys is how many keys are counted at a time.
const maxKeys = 1000

// A top counts the most frequent keys of a stream, however many other keys there are. It uses the algorithm
// Space-Saving (Metwally, Agrawal and El Abbadi, 2005). When maxKeys keys are counted, a new key replaces the least
// frequent key and takes over its count, because the new key may have been replaced before. So no count is too low.
type top struct {
	began   time.Time
	queries int
	byKey   map[string]*topCount
	all     []*topCount // the values of byKey
}

// A topCount is the count of one key.
type topCount struct {
	Key     string `json:"key"`
	Queries int    `json:"queries"`
	// Over is by how much Queries may be too high. The fields below count only the queries since the key has replaced
	// another key.
	Over   int      `json:"over"`
	Failed int      `json:"failed"`
	Mean   *float64 `json:"meanSeconds,omitempty"` // mean time of the queries whose time was measured

	took     float64
	measured int
}

func newTop() *top { return &top{began: time.Now(), byKey: map[string]*topCount{}} }

// add counts a query.
func (t *top) add(key string, r *seen.Record) {
	t.queries++
	c, known := t.byKey[key]
	switch {
	case known:
	case len(t.all) < maxKeys:
		c = &topCount{Key: key}
		t.all = append(t.all, c)
	default:
		c = slices.MinFunc(t.all, func(a, b *topCount) int { return a.Queries - b.Queries })
		delete(t.byKey, c.Key)
		*c = topCount{Key: key, Queries: c.Queries, Over: c.Queries}
	}
	t.byKey[key] = c
	c.Queries++
	if r.Rcode != "NOERROR" && r.Rcode != "NXDOMAIN" || r.Source == "stale" {
		c.Failed++
	}
	if r.Took != nil {
		c.took, c.measured = c.took+*r.Took, c.measured+1
	}
}

// mostFrequent returns the most frequent keys, up to n.
func (t *top) mostFrequent(n int) []*topCount {
	sorted := append([]*topCount{}, t.all...) // in JSON a list, also if it is empty
	slices.SortFunc(sorted, func(a, b *topCount) int {
		return cmp.Or(cmp.Compare(b.Queries, a.Queries), strings.Compare(a.Key, b.Key))
	})
	sorted = sorted[:min(n, len(sorted))]
	for _, c := range sorted {
		if c.measured > 0 {
			mean := c.took / float64(c.measured)
			c.Mean = &mean
		}
	}
	return sorted
}
