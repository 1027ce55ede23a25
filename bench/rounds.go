package main

import (
	"context"
	"fmt"
	"io"

	"github.com/nametap/nametap/bench/lab"
)

// Rates of the runs that are not saturated, in queries per second.
const (
	pacedRate   = 5000
	latencyRate = 2000
)

// attempts is how often a run is tried at most until it counts.
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
func mixFigure(m lab.Mix) string { return "mix_" + m.Name + "_us_per_query" }

// A bench measures servers and collects the results.
type bench struct {
	options

	lab     *lab.Lab
	servers []*lab.Server
	results *results
	// progress gets a line for each round.
	progress io.Writer
}

// startServers starts the selected servers. It leaves out a server that does not start,
// with a note in progress and results. A failure of the agent or of the echo is an error.
func (b *bench) startServers(ctx context.Context) error {
	for _, p := range lab.Peers() {
		if !b.wants(p.Name) {
			continue
		}
		fmt.Fprintf(b.progress, "starting %s\n", p.Name)
		s, err := b.lab.StartServer(ctx, p)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && (p.Name == lab.AgentName || p.Echo):
			return err
		case err != nil:
			fmt.Fprintf(b.progress, "LEFT OUT: %s: %v\n", p.Name, err)
			b.results.LeftOut[p.Name] = err.Error()
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
		size, err := lab.Memory(s.Free.Pid)
		if err != nil {
			return err
		}
		b.results.of(s.Name).Set(memoryMB, 0, float64(size)/(1<<20))
	}
	return nil
}

// measure makes all runs of one server in one round.
func (b *bench) measure(ctx context.Context, s *lab.Server, round int) error {
	set := func(name string, value float64) { b.results.of(s.Name).Set(name, round, value) }
	saturated := lab.Load{Addr: s.Pinned.Addr, Queries: b.lab.Path(lab.DirectMix + ".queries"), Seconds: b.seconds, Core: lab.ClientCore}
	relaxed := saturated
	relaxed.Addr, relaxed.Core = s.Free.Addr, ""

	err := b.run(ctx, s.Pinned, saturated, func(r lab.Run) {
		set(udpMicros, r.Micros())
		set(udpRate, r.PerSecond)
	})
	if err != nil {
		return err
	}
	paced := relaxed
	paced.Rate = pacedRate
	if err := b.run(ctx, s.Free, paced, func(r lab.Run) { set(pacedMicros, r.Micros()) }); err != nil {
		return err
	}
	timed := relaxed
	timed.Rate, timed.Latencies = latencyRate, true
	err = b.run(ctx, s.Free, timed, func(r lab.Run) {
		set(latencyP50, lab.Microseconds(r.Quantile(0.50)))
		set(latencyP99, lab.Microseconds(r.Quantile(0.99)))
	})
	if err != nil {
		return err
	}
	if s.TCP {
		tcp := saturated
		tcp.TCP = true
		err := b.run(ctx, s.Pinned, tcp, func(r lab.Run) {
			set(tcpMicros, r.Micros())
			set(tcpRate, r.PerSecond)
		})
		if err != nil {
			return err
		}
	}
	if s.Name == lab.AgentName {
		return b.measureMixes(ctx, s, round)
	}
	return nil
}

// measureMixes makes a saturated run of every mix, one after the other so that they are
// comparable.
func (b *bench) measureMixes(ctx context.Context, s *lab.Server, round int) error {
	for _, m := range lab.Mixes() {
		l := lab.Load{Addr: s.Pinned.Addr, Queries: b.lab.Path(m.Name + ".queries"), Seconds: b.seconds, Core: lab.ClientCore}
		err := b.run(ctx, s.Pinned, l, func(r lab.Run) { b.results.of(s.Name).Set(mixFigure(m), round, r.Micros()) })
		if err != nil {
			return err
		}
	}
	return nil
}

// run runs the load l against the server i until a run counts, and passes that run to the function use. If no attempt
// counts, the results get a note instead of figures.
func (b *bench) run(ctx context.Context, i lab.Instance, l lab.Load, use func(lab.Run)) error {
	var err error
	for range attempts {
		var r lab.Run
		if r, err = i.Under(ctx, l); err == nil {
			use(r)
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if gone := i.Alive(); gone != nil {
			return gone
		}
		fmt.Fprintf(b.progress, "a run of %s does not count: %v, %v\n", i.Name, l, err)
	}
	b.results.note("%s: %v, %v, %d times in succession; the round has no figure", i.Name, l, err, attempts)
	return nil
}
