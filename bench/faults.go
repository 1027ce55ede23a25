package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"
)

const (
	// faultRate is in queries per second, for faultSeconds.
	faultRate, faultSeconds = 100, 10
	// noticing is how long a server has, before the measured queries, to detect a dead nameserver.
	noticing = time.Second
	// patience is longer than any resolver waits, to see answers that come too late for resolvers.
	patience = 12
)

// A fault is the share of replies that each of the two nameservers loses.
type fault struct {
	what string
	loss [2]float64
}

// faults are the measured faults; the first one is no fault, for comparison.
func faults() []fault {
	return []fault{
		{what: "none"},
		{what: "one of two silent", loss: [2]float64{0, 1}},
		{what: "30 % of replies lost by both", loss: [2]float64{0.3, 0.3}},
	}
}

// faultLatencies measures how long forwarded queries take while nameservers have a fault.
// Each fault and round starts the server again: it then has no history of the nameservers.
func (e *experiments) faultLatencies(ctx context.Context) error {
	if err := e.lab.UseNameservers(lab.FirstServer(), lab.SecondServer()); err != nil {
		return err
	}
	took, failed := map[string][]time.Duration{}, map[string]int{}
	for round := range e.rounds {
		for k, f := range faults() {
			for i := range lab.Compared() {
				p := lab.Compared()[(i+round)%len(lab.Compared())]
				fmt.Fprintf(e.progress, "faults, round %d of %d: %s, %s\n", round+1, e.rounds, f.what, p.Name)
				t, err := e.underFault(ctx, p, f, fmt.Sprintf("f%d-%d-%s", round, k, p.Name))
				if err != nil {
					return err
				}
				key := f.what + ", " + p.Title
				took[key] = append(took[key], t.Latencies...)
				failed[key] += t.Lost + t.Completed - t.NoError
			}
		}
	}
	t := report.Table{
		Title:  fmt.Sprintf("%d forwarded queries at %d per second, %d times, all together", faultRate*faultSeconds, faultRate, e.rounds),
		Header: []string{"fault, server", "p50 ms", "p99 ms", "longest ms", "failed or lost"},
	}
	for _, f := range faults() {
		for _, p := range lab.Compared() {
			key := f.what + ", " + p.Title
			slices.Sort(took[key])
			row := []string{key}
			for _, q := range []float64{0.5, 0.99, 1} {
				row = append(row, report.Cell(lab.Microseconds(lab.Quantile(took[key], q))/1000))
			}
			t.Rows = append(t.Rows, append(row, strconv.Itoa(failed[key])))
		}
	}
	e.results.Tables = append(e.results.Tables, t)
	return nil
}

// underFault starts two nameservers and a server, begins the fault and sends queries for the names of a series.
func (e *experiments) underFault(ctx context.Context, p lab.Peer, f fault, series string) (lab.Tally, error) {
	nameservers, err := e.nameservers(ctx, f)
	for _, n := range nameservers {
		defer e.lab.Stop(n)
	}
	if err != nil {
		return lab.Tally{}, err
	}
	i, _, err := e.lab.StartForwarder(ctx, p, "")
	if err != nil {
		return lab.Tally{}, err
	}
	defer e.lab.Stop(i.Process)
	var errs []error
	for _, n := range nameservers {
		errs = append(errs, syscall.Kill(n.Pid, syscall.SIGUSR1))
	}
	load := func(series string, seconds int) (lab.Tally, error) {
		var names strings.Builder
		for k := range 2 * faultRate * seconds {
			fmt.Fprintf(&names, "%s A\n", lab.Distinct(series, k))
		}
		path, err := e.lab.Write("fault.queries", []byte(names.String()))
		if err != nil {
			return lab.Tally{}, err
		}
		l := lab.Load{Addr: i.Addr, Queries: path, Seconds: seconds, Rate: faultRate, Waiting: 2 * faultRate * seconds, Patience: patience, Latencies: true}
		return l.Drive(ctx)
	}
	_, before := load("before-"+series, int(noticing/time.Second))
	t, err := load(series, faultSeconds)
	return t, errors.Join(errors.Join(errs...), before, err, i.Alive())
}

// nameservers starts the two nameservers.
func (e *experiments) nameservers(ctx context.Context, f fault) (started []*lab.Process, err error) {
	binary, err := e.lab.Build(ctx, ".", "fixed")
	if err != nil {
		return nil, err
	}
	for k, ip := range []string{lab.FirstServer().String(), lab.SecondServer().String()} {
		p, err := e.lab.Start(ctx, lab.Command{Name: "nameserver", Argv: []string{binary, ip + ":53", "192.0.2.1", fmt.Sprint(f.loss[k])}})
		if err != nil {
			return started, err
		}
		started = append(started, p)
	}
	return started, nil
}
