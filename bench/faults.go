package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"
)

const (
	faultQueries = 1000
	// noticing is the number of queries in the first second of a fault, before the measured queries. In this second, a
	// server can detect a dead nameserver.
	noticing = 100
)

// A fault is a behaviour of the two nameservers.
type fault struct {
	what          string
	first, second lab.Conduct
}

// faults are the measured faults; the first one is no fault, for comparison.
func faults() []fault {
	return []fault{
		{what: "none"},
		{what: "one of two silent", second: lab.Conduct{Silent: true}},
		{what: "30 % of replies lost by both", first: lab.Conduct{Loss: 0.3}, second: lab.Conduct{Loss: 0.3}},
	}
}

// A faultResult has the answers of a server during a fault, in all rounds.
type faultResult struct {
	// before are the answers in the first second, in which the fault can be detected.
	before, answers []lab.Answer
}

// faultLatencies measures how long forwarded queries take while nameservers have a fault.
// Each fault and round starts the server again: it then has no history of the nameservers.
func (e *experiments) faultLatencies(ctx context.Context) error {
	first, second, stop, err := e.twoNameservers()
	if err != nil {
		return err
	}
	defer stop()
	found := map[string]*faultResult{}
	for round := range e.rounds {
		for k, f := range faults() {
			for i := range lab.Compared() {
				p := lab.Compared()[(i+round)%len(lab.Compared())]
				fmt.Fprintf(e.progress, "faults, round %d of %d: %s, %s\n", round+1, e.rounds, f.what, p.Name)
				key := f.what + p.Name
				if found[key] == nil {
					found[key] = &faultResult{}
				}
				first.Behave(lab.Conduct{})
				second.Behave(lab.Conduct{})
				series := fmt.Sprintf("f%d-%d-%s", round, k, p.Name)
				answers, err := e.underFault(ctx, p, series, func() {
					first.Behave(f.first)
					second.Behave(f.second)
				})
				if err != nil {
					return err
				}
				found[key].before = append(found[key].before, answers[:noticing]...)
				found[key].answers = append(found[key].answers, answers[noticing:]...)
			}
		}
	}
	e.results.Tables = append(e.results.Tables, e.faultTable(found))
	return nil
}

// underFault starts a server, begins the fault and sends queries.
func (e *experiments) underFault(ctx context.Context, p lab.Peer, series string, begin func()) ([]lab.Answer, error) {
	i, _, err := e.lab.StartForwarder(ctx, p, "")
	if err != nil {
		return nil, err
	}
	defer e.lab.Stop(i.Process)
	begin()
	answers := lab.AskSteadily(ctx, i.Addr, noticing+faultQueries, lab.Distinct(series))
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return answers, i.Alive()
}

// faultTable compares the servers fault by fault.
func (e *experiments) faultTable(found map[string]*faultResult) report.Table {
	t := report.Table{
		Title: fmt.Sprintf("%s forwarded queries at %d per second, %d times, all together; the second before them separately",
			report.Thousands(faultQueries), lab.SteadyRate, e.rounds),
		Header: []string{
			"fault, server", "p50 ms", "p99 ms", "longest ms", "failed", "over 4 s", "longest ms of the second before", "failed in it",
		},
	}
	for _, f := range faults() {
		for _, p := range lab.Compared() {
			r := found[f.what+p.Name]
			took, before := lab.Latencies(r.answers), lab.Latencies(r.before)
			late, _ := slices.BinarySearch(took, 4*time.Second+1)
			t.Rows = append(t.Rows, []string{
				f.what + ", " + p.Title,
				milliseconds(lab.Quantile(took, 0.5)), milliseconds(lab.Quantile(took, 0.99)), milliseconds(lab.Quantile(took, 1)),
				strconv.Itoa(lab.Failures(r.answers)), strconv.Itoa(len(took) - late),
				milliseconds(lab.Quantile(before, 1)), strconv.Itoa(lab.Failures(r.before)),
			})
		}
	}
	return t
}

// milliseconds formats d for a table.
func milliseconds(d time.Duration) string { return report.Cell(float64(d) / float64(time.Millisecond)) }
