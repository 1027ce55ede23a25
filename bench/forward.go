package main

import (
	"context"
	"fmt"
	"math"
	"strings"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"
)

// Names of the figures of forwarding.
const (
	missMicros      = "miss_us_per_query"
	missPacedMicros = "miss_paced_us_per_query"
	hitMicros       = "hit_us_per_query"
	ownMicros       = "own_us_per_query"
)

const (
	// missNames is the number of distinct names for each second of a run: more than any
	// server can answer. A run that uses all of them does not count.
	missNames = 120_000
	// hitNames is the number of names for cache hits: few enough for every cache, and
	// queried so often that nearly every query is a hit.
	hitNames = 500
)

// A forwardBench measures the cost of forwarding.
type forwardBench struct {
	bench

	// pinned and free are the instances of each server.
	pinned, free map[string]lab.Instance
	// series counts the files with names: no name is queried twice.
	series int
}

// forwardCosts measures the processor time of a cache miss, of a cache hit, and of a query
// for a mesh name.
func (e *experiments) forwardCosts(ctx context.Context) error {
	if err := e.lab.UseNameservers(lab.FirstServer()); err != nil {
		return err
	}
	binary, err := e.lab.Build(ctx, ".", "fixed")
	if err != nil {
		return err
	}
	// The nameserver shares dnsperf's processor, so the forwarder has the other processor
	// for itself.
	nameserver, err := e.lab.Start(ctx, lab.Command{
		Name: "nameserver", Argv: []string{binary, lab.Port53(lab.FirstServer()).String(), "192.0.2.1"}, Core: lab.ClientCore,
	})
	if err != nil {
		return err
	}
	defer e.lab.Stop(nameserver)
	b := &forwardBench{
		bench:  bench{options: e.options, lab: e.lab, results: newResults(e.options), progress: e.progress},
		pinned: map[string]lab.Instance{}, free: map[string]lab.Instance{},
	}
	b.results.Notes, b.results.LeftOut = e.results.Notes, e.results.LeftOut
	if err := b.start(ctx); err != nil {
		return err
	}
	if err := b.measureAll(ctx); err != nil {
		return err
	}
	e.results.Notes = b.results.Notes
	e.results.Tables = append(e.results.Tables, b.table())
	for name := range b.pinned {
		e.lab.Stop(b.pinned[name].Process)
		e.lab.Stop(b.free[name].Process)
	}
	return nil
}

// start starts every chosen forwarder, and leaves out missing ones.
func (b *forwardBench) start(ctx context.Context) error {
	for _, p := range lab.Forwarders() {
		if !b.wants(p.Name) {
			continue
		}
		fmt.Fprintf(b.progress, "starting %s\n", p.Name)
		pinned, version, err := b.lab.StartForwarder(ctx, p, lab.ServerCore)
		if err == nil {
			b.free[p.Name], _, err = b.lab.StartForwarder(ctx, p, "")
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && p.Name == lab.AgentName:
			return err
		case err != nil:
			fmt.Fprintf(b.progress, "LEFT OUT: %s: %v\n", p.Name, err)
			b.results.LeftOut[p.Name] = err.Error()
			continue
		}
		b.pinned[p.Name] = pinned
		b.results.add(&lab.Server{Peer: p, Version: version})
	}
	return nil
}

// measureAll measures every server once a round. Each round begins with another server.
func (b *forwardBench) measureAll(ctx context.Context) error {
	servers := b.results.Servers
	for round := range b.rounds {
		fmt.Fprintf(b.progress, "forwarding, round %d of %d\n", round+1, b.rounds)
		for i := range servers {
			if err := b.measure(ctx, servers[(i+round)%len(servers)], round); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure makes all runs of one server in one round.
func (b *forwardBench) measure(ctx context.Context, s *serverResults, round int) error {
	hits, err := b.names("hit", hitNames)
	if err != nil {
		return err
	}
	pinned, free := b.pinned[s.Name], b.free[s.Name]
	saturated := lab.Load{Addr: pinned.Addr, Seconds: b.seconds, Core: lab.ClientCore}
	for _, kind := range []struct {
		figure, queries string
		instance        lab.Instance
		rate            int
	}{
		{missMicros, "", pinned, 0},
		{missPacedMicros, "", free, pacedRate},
		{hitMicros, hits, pinned, 0},
		{ownMicros, b.lab.Path(lab.DirectMix + ".queries"), pinned, 0},
	} {
		l := saturated
		l.Queries, l.Addr, l.Rate = kind.queries, kind.instance.Addr, kind.rate
		if kind.rate > 0 {
			l.Core = ""
		}
		if kind.queries == "" {
			if l.Queries, err = b.misses(); err != nil {
				return err
			}
		}
		err := b.run(ctx, kind.instance, l, func(r lab.Run) { s.Figures.Set(kind.figure, round, b.micros(r, kind.queries == "")) })
		if err != nil {
			return err
		}
	}
	return nil
}

// micros returns the processor time of a query, or NaN for a run of misses that queried a
// name twice.
func (b *forwardBench) micros(r lab.Run, misses bool) float64 {
	if misses && r.Sent > missNames*b.seconds {
		b.results.note("%d queries were more than the %d names; the run does not count", r.Sent, missNames*b.seconds)
		return math.NaN()
	}
	return r.Micros()
}

// misses writes a file with names that have not been queried yet.
func (b *forwardBench) misses() (string, error) {
	b.series++
	return b.names(fmt.Sprintf("miss%d", b.series), missNames*b.seconds)
}

// names writes a file with n names of a series.
func (b *forwardBench) names(series string, n int) (string, error) {
	var text strings.Builder
	for i := range n {
		text.WriteString(lab.Distinct(series, i) + " A\n")
	}
	// All runs of misses share one file, because they run one after the other.
	return b.lab.Write(strings.TrimRight(series, "0123456789")+".queries", []byte(text.String()))
}

// table compares the forwarders.
func (b *forwardBench) table() report.Table {
	t := report.Table{
		Title: fmt.Sprintf("A forwarded query, processor time, medians of %d rounds of %d s", b.rounds, b.seconds),
		Header: []string{
			"server", "cache miss µs", "× Istio", "cache miss µs at 5,000/s", "× Istio", "cache hit µs", "mesh name µs", "hit / mesh name",
		},
	}
	istio := b.results.of(lab.IstioName)
	for _, s := range b.results.Servers {
		miss, paced := s.Figures[missMicros], s.Figures[missPacedMicros]
		hit, own := s.Figures[hitMicros], s.Figures[ownMicros]
		row := []string{strings.TrimSpace(s.Title + " " + shortVersion(s.Version))}
		for _, f := range []report.Figure{
			miss, miss.Over(istio[missMicros]), paced, paced.Over(istio[missPacedMicros]), hit, own, hit.Over(own),
		} {
			row = append(row, report.Cell(f.Median()))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}
