package main

import (
	"context"
	"fmt"
	"io"
	"time"
)

// Rates of the runs that are not saturated, in queries per second.
const (
	pacedRate   = 5000
	latencyRate = 2000
)

// attempts is the number of attempts of a run that does not count.
const attempts = 3

// Names of figures; the processor time of a mix is mixFigure.
const (
	udpMicros   = "udp_us_per_query"
	udpRate     = "udp_queries_per_s"
	pacedMicros = "paced_us_per_query"
	latencyP50  = "latency_p50_us"
	latencyP99  = "latency_p99_us"
	tcpMicros   = "tcp_us_per_query"
	tcpRate     = "tcp_queries_per_s"
	memoryMB    = "memory_mb"
)

// mixFigure names the processor time of a mix.
func mixFigure(m mix) string { return "mix_" + m.name + "_us_per_query" }

// A bench measures servers and collects the results.
type bench struct {
	options

	lab     *lab
	servers []*server
	results *results
	// progress gets a line for each round.
	progress io.Writer
}

// startServers starts the selected servers. It leaves out a server that does not start,
// with a note in progress and results, except for the agent, whose failure is an error.
func (b *bench) startServers(ctx context.Context) error {
	for _, p := range peers() {
		if !b.wants(p.name) {
			continue
		}
		fmt.Fprintf(b.progress, "starting %s\n", p.name)
		s, err := b.lab.startServer(ctx, p)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && (p.name == agentName || p.echo):
			return err
		case err != nil:
			fmt.Fprintf(b.progress, "LEFT OUT: %s: %v\n", p.name, err)
			b.results.LeftOut[p.name] = err.Error()
			continue
		}
		b.servers = append(b.servers, s)
		b.results.add(s)
	}
	return nil
}

// runRounds measures every server once a round. Each round starts with another server.
func (b *bench) runRounds(ctx context.Context) error {
	for round := range b.rounds {
		fmt.Fprintf(b.progress, "round %d of %d\n", round+1, b.rounds)
		for i := range b.servers {
			s := b.servers[(i+round)%len(b.servers)]
			if err := b.measure(ctx, s, round); err != nil {
				return err
			}
		}
	}
	for _, s := range b.servers {
		size, err := memory(s.free.pid)
		if err != nil {
			return err
		}
		b.results.of(s.name).set(memoryMB, 0, float64(size)/(1<<20))
	}
	return nil
}

// measure makes all runs of one server in one round.
func (b *bench) measure(ctx context.Context, s *server, round int) error {
	set := func(name string, value float64) { b.results.of(s.name).set(name, round, value) }
	saturated := load{addr: s.pinned.addr, queries: b.lab.path(directMix + ".queries"), seconds: b.seconds, core: clientCore}
	relaxed := saturated
	relaxed.addr, relaxed.core = s.free.addr, ""

	err := b.run(ctx, s.pinned, saturated, func(r run) {
		set(udpMicros, r.micros())
		set(udpRate, r.perSecond)
	})
	if err != nil {
		return err
	}
	paced := relaxed
	paced.rate = pacedRate
	if err := b.run(ctx, s.free, paced, func(r run) { set(pacedMicros, r.micros()) }); err != nil {
		return err
	}
	timed := relaxed
	timed.rate, timed.latencies = latencyRate, true
	err = b.run(ctx, s.free, timed, func(r run) {
		set(latencyP50, microseconds(r.quantile(0.50)))
		set(latencyP99, microseconds(r.quantile(0.99)))
	})
	if err != nil {
		return err
	}
	if s.tcp {
		tcp := saturated
		tcp.tcp = true
		err := b.run(ctx, s.pinned, tcp, func(r run) {
			set(tcpMicros, r.micros())
			set(tcpRate, r.perSecond)
		})
		if err != nil {
			return err
		}
	}
	if s.name == agentName {
		return b.measureMixes(ctx, s, round)
	}
	return nil
}

// measureMixes makes a saturated run of every mix, one after the other so that they are
// comparable.
func (b *bench) measureMixes(ctx context.Context, s *server, round int) error {
	for _, m := range mixes() {
		l := load{addr: s.pinned.addr, queries: b.lab.path(m.name + ".queries"), seconds: b.seconds, core: clientCore}
		err := b.run(ctx, s.pinned, l, func(r run) { b.results.of(s.name).set(mixFigure(m), round, r.micros()) })
		if err != nil {
			return err
		}
	}
	return nil
}

// A run is the result of a load.
type run struct {
	tally

	// processor is the server's time.
	processor time.Duration
}

// micros returns the processor time of a query, in µs.
func (r run) micros() float64 { return microseconds(r.processor) / float64(r.completed) }

// microseconds returns d as a number of µs.
func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// run runs l against the server i until the run counts, and passes it to use. If no attempt
// counts, the results get a note instead of figures.
func (b *bench) run(ctx context.Context, i instance, l load, use func(run)) error {
	var err error
	for range attempts {
		var r run
		if r, err = i.under(ctx, l); err == nil {
			use(r)
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if gone := i.alive(); gone != nil {
			return gone
		}
		fmt.Fprintf(b.progress, "a run of %s does not count: %v, %v\n", i.name, l, err)
	}
	b.results.note("%s: %v, %v, %d times in succession; the round has no figure", i.name, l, err, attempts)
	return nil
}

// under runs l and measures the server's processor time.
func (i instance) under(ctx context.Context, l load) (run, error) {
	before, err := processorTime(i.pid)
	if err != nil {
		return run{}, err
	}
	t, err := l.run(ctx)
	if err != nil {
		return run{}, err
	}
	after, err := processorTime(i.pid)
	return run{tally: t, processor: after - before}, err
}
