package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
)

// Names of the figures of pushes. Those of the sink, the client that only receives,
// end in sinkSuffix.
const (
	firstPush  = "first_push_ms"
	onePush    = "one_changed_push_ms"
	allPush    = "all_changed_push_ms"
	sinkSuffix = "_sink"

	quietP99 = "latency_p99_without_pushes_us"
	oneP99   = "latency_p99_one_changed_us"
	allP99   = "latency_p99_all_changed_us"
)

const (
	// repeats is the number of pushes with a change for one figure. It is even, so the last
	// table equals the first one.
	repeats = 10
	// settle is the time for a client to finish its work after an ACK.
	settle = 500 * time.Millisecond
	// pushInterval is the time between pushes while latencies are measured.
	pushInterval = time.Second
)

// pushResults are the costs of pushes.
type pushResults struct {
	Hosts int `json:"hosts"`
	// Bytes is the length of one table on the wire.
	Bytes   int     `json:"bytes"`
	Figures figures `json:"figures"`
}

// A pushBench measures pushes of one size.
type pushBench struct {
	options

	lab      *lab
	results  *pushResults
	notes    *results
	progress io.Writer
	// base, one and all are files with tables: the lab's, one with another address for one
	// host, and one with other addresses for all hosts.
	base, one, all string
}

// measurePushes measures pushes in a new lab.
func measurePushes(ctx context.Context, o options, r *results) (err error) {
	l, err := newLab(o.pushHosts, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	r.Push = &pushResults{Hosts: o.pushHosts, Figures: figures{}}
	b := &pushBench{options: o, lab: l, results: r.Push, notes: r, progress: os.Stderr}
	if err := b.writeTables(); err != nil {
		return err
	}
	for round := range o.rounds {
		fmt.Fprintf(b.progress, "pushes, round %d of %d\n", round+1, o.rounds)
		if err := b.round(ctx, round); err != nil {
			return err
		}
	}
	return nil
}

// writeTables makes the tables that are pushed.
func (b *pushBench) writeTables() error {
	b.base = b.lab.path("table.pb")
	one := nameTable(moved(b.lab.services, 1), b.lab.wildcards)
	b.results.Bytes = len(one)
	var err error
	if b.one, err = b.lab.write("one.pb", one); err != nil {
		return err
	}
	all := nameTable(moved(b.lab.services, len(b.lab.services)), b.lab.wildcards)
	b.all, err = b.lab.write("all.pb", all)
	return err
}

// A client of pushes, with its own control plane.
type client struct {
	instance

	control *control
	round   int
	// suffix is the suffix of the names of its figures.
	suffix string
}

// round measures a sink and an agent.
func (b *pushBench) round(ctx context.Context, round int) error {
	sink := client{round: round, suffix: sinkSuffix}
	err := b.with(ctx, sink, b.sink, b.costs)
	if err != nil {
		return fmt.Errorf("pushing to the sink: %w", err)
	}
	var agent client
	agent.round = round
	if agent.addr, err = freeAddr(ctx); err != nil {
		return err
	}
	err = b.with(ctx, agent, b.agentOf, func(ctx context.Context, c client) error {
		if err := b.costs(ctx, c); err != nil {
			return err
		}
		size, err := memory(c.pid)
		if err != nil {
			return err
		}
		b.results.Figures.set(memoryMB, round, float64(size)/(1<<20))
		return b.latencies(ctx, c)
	})
	if err != nil {
		return fmt.Errorf("pushing to the agent: %w", err)
	}
	return nil
}

// sink returns the command line of a client that only receives.
func (b *pushBench) sink(ctx context.Context, c client) ([]string, error) {
	binary, err := b.lab.build(ctx, ".", "sink")
	return []string{binary, c.control.addr.String()}, err
}

// agentOf returns the command line of an agent.
func (b *pushBench) agentOf(ctx context.Context, c client) ([]string, error) {
	how, err := b.lab.agent(ctx, c.addr, c.control.addr, b.lab.noUpstream()...)
	return how.argv, err
}

// with starts a control plane and its client c with argv, calls use, and ends both.
func (b *pushBench) with(ctx context.Context, c client,
	argv func(context.Context, client) ([]string, error), use func(context.Context, client) error,
) error {
	var err error
	if c.control, err = b.lab.startControl(ctx); err != nil {
		return err
	}
	defer b.lab.stop(c.control.process)
	words, err := argv(ctx, c)
	if err != nil {
		return err
	}
	if c.process, err = b.lab.start(ctx, command{name: "client", argv: words}); err != nil {
		return err
	}
	defer b.lab.stop(c.process)
	if err := c.control.expect(ctx, "stream"); err != nil {
		return errors.Join(err, c.alive())
	}
	return use(ctx, c)
}

// costs measures the processor time of the first push, of pushes that change one host, and
// of pushes that change all hosts.
func (b *pushBench) costs(ctx context.Context, c client) error {
	for _, pushes := range []struct {
		figure string
		files  []string
		times  int
	}{
		{firstPush, []string{b.base}, 1},
		{onePush, []string{b.one, b.base}, repeats},
		{allPush, []string{b.all, b.base}, repeats},
	} {
		before, err := processorTime(c.pid)
		if err != nil {
			return err
		}
		for k := range pushes.times {
			if err := c.control.push(ctx, pushes.files[k%len(pushes.files)]); err != nil {
				return err
			}
		}
		if err := sleep(ctx, settle); err != nil {
			return err
		}
		after, err := processorTime(c.pid)
		if err != nil {
			return err
		}
		each := microseconds(after-before) / 1000 / float64(pushes.times)
		b.results.Figures.set(pushes.figure+c.suffix, c.round, each)
	}
	return nil
}

// latencies measures the slowest answers without pushes and with one push per second.
func (b *pushBench) latencies(ctx context.Context, c client) error {
	l := load{
		addr: c.addr, queries: b.lab.path(directMix + ".queries"),
		// Long enough for several pushes.
		seconds: max(5, 3*b.seconds), rate: latencyRate, latencies: true,
	}
	runs := []struct {
		figure string
		files  []string
	}{
		{quietP99, nil},
		{oneP99, []string{b.one, b.base}},
		{allP99, []string{b.all, b.base}},
	}
	// Each round starts with another one.
	for k := range runs {
		r := runs[(k+c.round)%len(runs)]
		t, err := b.underPushes(ctx, c.control, l, r.files)
		if gone := c.alive(); gone != nil {
			return gone
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			b.notes.note("%s: %v; the round has no figure", r.figure, err)
			continue
		}
		b.results.Figures.set(r.figure, c.round, microseconds(t.quantile(0.99)))
	}
	return nil
}

// underPushes runs l while the tables in files are pushed in turn.
func (b *pushBench) underPushes(ctx context.Context, c *control, l load, files []string) (tally, error) {
	pushing, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- pushRegularly(pushing, c, slices.Clone(files)) }()
	t, err := l.run(ctx)
	cancel()
	return t, errors.Join(err, <-ended)
}

// pushRegularly pushes the tables in files in turn until ctx ends. It completes the last
// push.
func pushRegularly(ctx context.Context, c *control, files []string) error {
	if len(files) == 0 {
		return nil
	}
	ticker := time.NewTicker(pushInterval)
	defer ticker.Stop()
	for k := 0; ; k++ {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			if err := c.push(context.WithoutCancel(ctx), files[k%len(files)]); err != nil {
				return err
			}
		}
	}
}

// sleep waits, unless ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
