package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"
)

const (
	faultQueries = 1000
	// noticing is the number of queries in the second before the measured ones, in which a
	// server can detect a dead nameserver.
	noticing = 100
)

// A fault is a behaviour of the two nameservers.
type fault struct {
	what          string
	first, second conduct
}

// faults are the measured faults; the first one is no fault, for comparison.
func faults() []fault {
	return []fault{
		{what: "none"},
		{what: "one of two silent", second: conduct{silent: true}},
		{what: "30 % of replies lost by both", first: conduct{loss: 0.3}, second: conduct{loss: 0.3}},
	}
}

// A faultResult has the answers of a server during a fault, in all rounds.
type faultResult struct {
	// before are the answers in the first second, in which the fault can be detected.
	before, answers []answer
}

// faultLatencies measures how long forwarded queries take while nameservers have a fault.
// Each fault and round starts the server again, so that it has no history of the
// nameservers.
func (e *experiments) faultLatencies(ctx context.Context) error {
	first, second, stop, err := e.twoNameservers()
	if err != nil {
		return err
	}
	defer stop()
	found := map[string]*faultResult{}
	for round := range e.rounds {
		for k, f := range faults() {
			for i := range compared() {
				p := compared()[(i+round)%len(compared())]
				fmt.Fprintf(e.progress, "faults, round %d of %d: %s, %s\n", round+1, e.rounds, f.what, p.name)
				key := f.what + p.name
				if found[key] == nil {
					found[key] = &faultResult{}
				}
				first.behave(conduct{})
				second.behave(conduct{})
				series := fmt.Sprintf("f%d-%d-%s", round, k, p.name)
				answers, err := e.underFault(ctx, p, series, func() {
					first.behave(f.first)
					second.behave(f.second)
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
func (e *experiments) underFault(ctx context.Context, p peer, series string, begin func()) ([]answer, error) {
	i, _, err := e.lab.startForwarder(ctx, p, "")
	if err != nil {
		return nil, err
	}
	defer e.lab.stop(i.process)
	begin()
	answers := askSteadily(ctx, i.addr, noticing+faultQueries, distinct(series))
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return answers, i.alive()
}

// faultTable compares the servers fault by fault.
func (e *experiments) faultTable(found map[string]*faultResult) table {
	t := table{
		title: fmt.Sprintf("%s forwarded queries at %d per second, %d times, all together; the second before them separately",
			thousands(faultQueries), steadyRate, e.rounds),
		header: []string{
			"fault, server", "p50 ms", "p99 ms", "longest ms", "failed", "over 4 s", "longest ms of the second before", "failed in it",
		},
	}
	for _, f := range faults() {
		for _, p := range compared() {
			r := found[f.what+p.name]
			took, before := latencies(r.answers), latencies(r.before)
			late, _ := slices.BinarySearch(took, 4*time.Second+1)
			t.rows = append(t.rows, []string{
				f.what + ", " + p.title,
				milliseconds(quantile(took, 0.5)), milliseconds(quantile(took, 0.99)), milliseconds(quantile(took, 1)),
				strconv.Itoa(failures(r.answers)), strconv.Itoa(len(took) - late),
				milliseconds(quantile(before, 1)), strconv.Itoa(failures(r.before)),
			})
		}
	}
	return t
}

// milliseconds formats d for a table.
func milliseconds(d time.Duration) string { return cell(float64(d) / float64(time.Millisecond)) }
