package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/nametap/nametap/bench/lab"
	"github.com/nametap/nametap/bench/report"
	"github.com/nametap/nametap/internal/clock"
)

// Names of the figures of pushes; residentSuffix is for memory. The names for the sink, the client that only
// receives, end in sinkSuffix, and those for an agent that is sent shards in shardsSuffix.
const (
	firstPush    = "first_push_ms"
	onePush      = "one_changed_push_ms"
	allPush      = "all_changed_push_ms"
	sinkSuffix   = "_sink"
	shardsSuffix = "_shards"

	residentSuffix = "_resident_mib"

	quietP99 = "latency_p99_without_pushes_us"
	oneP99   = "latency_p99_one_changed_us"
	allP99   = "latency_p99_all_changed_us"
)

const (
	// repeats is the number of pushes with a change for one figure. It is even, so the last
	// table equals the first one.
	repeats = 10
	// settle is the time for a client to finish its work after an ACK. The agent returns memory to the kernel when
	// pushes have paused for some seconds.
	settle       = 500 * time.Millisecond
	memorySettle = 5 * time.Second
	// pushInterval is the time between pushes while latencies are measured.
	pushInterval = time.Second
)

// pushResults are the costs of pushes.
type pushResults struct {
	Hosts int
	// Bytes is the length of one table on the wire.
	Bytes   int
	Figures report.Figures
}

// A pushBench measures pushes of one size.
type pushBench struct {
	options

	lab      *lab.Lab
	results  *pushResults
	notes    *results
	progress io.Writer
	// base, one and all are files with tables: the lab's table, a table with another
	// address for one host, and a table with other addresses for all hosts.
	base, one, all string
}

// measurePushes measures pushes in a new lab.
func measurePushes(ctx context.Context, o options, r *results) (err error) {
	l, err := lab.NewLab(o.pushHosts, o.agent, o.inside)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	r.Push = &pushResults{Hosts: o.pushHosts, Figures: report.Figures{}}
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
	b.base = b.lab.Path("table.pb")
	one := lab.NameTable(lab.Moved(b.lab.Services, 1), b.lab.Wildcards)
	b.results.Bytes = len(one)
	var err error
	if b.one, err = b.lab.Write("one.pb", one); err != nil {
		return err
	}
	all := lab.NameTable(lab.Moved(b.lab.Services, len(b.lab.Services)), b.lab.Wildcards)
	b.all, err = b.lab.Write("all.pb", all)
	return err
}

// A client gets pushes from a control plane of its own.
type client struct {
	lab.Instance

	control *lab.Control
	round   int
	// suffix is the suffix of the names of the client's figures.
	suffix string
}

// round measures a sink, an agent that is sent whole tables, and one that is sent shards.
func (b *pushBench) round(ctx context.Context, round int) error {
	sink := client{round: round, suffix: sinkSuffix}
	err := b.with(ctx, sink, b.sink, b.costs)
	if err != nil {
		return fmt.Errorf("pushing to the sink: %w", err)
	}
	for _, suffix := range []string{"", shardsSuffix} {
		agent := client{round: round, suffix: suffix}
		if agent.Addr, err = lab.FreeAddr(ctx); err != nil {
			return err
		}
		if err := b.with(ctx, agent, b.agentOf, b.costs, b.latencies); err != nil {
			return fmt.Errorf("pushing to the agent: %w", err)
		}
	}
	return nil
}

// sink returns the command line of a client that only receives.
func (b *pushBench) sink(ctx context.Context, c client) ([]string, error) {
	binary, err := b.lab.Build(ctx, ".", "sink")
	return []string{binary, c.control.Addr.String()}, err
}

// agentOf returns the command line of an agent.
func (b *pushBench) agentOf(ctx context.Context, c client) ([]string, error) {
	how, err := b.lab.Agent(ctx, c.Addr, c.control.Addr, b.lab.NoUpstream()...)
	return how.Argv, err
}

// with starts a control plane and its client c, calls the functions in measure, and ends both. The function argv returns
// the command line of the client.
func (b *pushBench) with(ctx context.Context, c client,
	argv func(context.Context, client) ([]string, error), measure ...func(context.Context, client) error,
) error {
	var options []string
	if c.suffix == shardsSuffix {
		options = []string{"-shards"}
	}
	var err error
	if c.control, err = b.lab.StartControl(ctx, options...); err != nil {
		return err
	}
	defer b.lab.Stop(c.control.Process)
	words, err := argv(ctx, c)
	if err != nil {
		return err
	}
	if c.Process, err = b.lab.Start(ctx, lab.Command{Name: "client", Argv: words}); err != nil {
		return err
	}
	defer b.lab.Stop(c.Process)
	if err := c.control.Expect(ctx, "stream"); err != nil {
		return errors.Join(err, c.Alive())
	}
	for _, figures := range measure {
		if err := figures(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// costs measures the processor time of the first push, of pushes that change one host, and
// of pushes that change all hosts, and the resident memory after each of the three.
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
		before, err := lab.ProcessorTime(c.Pid)
		if err != nil {
			return err
		}
		for k := range pushes.times {
			if err := c.control.Push(ctx, pushes.files[k%len(pushes.files)]); err != nil {
				return err
			}
		}
		if err := sleep(ctx, settle); err != nil {
			return err
		}
		after, err := lab.ProcessorTime(c.Pid)
		if err != nil {
			return err
		}
		each := lab.Microseconds(after-before) / 1000 / float64(pushes.times)
		b.results.Figures.Set(pushes.figure+c.suffix, c.round, each)
		if err := sleep(ctx, memorySettle); err != nil {
			return err
		}
		resident, err := lab.Memory(c.Pid)
		if err != nil {
			return err
		}
		b.results.Figures.Set(pushes.figure+residentSuffix+c.suffix, c.round, float64(resident)/(1<<20))
	}
	return nil
}

// latencies measures the slowest answers without pushes and with one push per second.
func (b *pushBench) latencies(ctx context.Context, c client) error {
	l := lab.Load{
		Addr: c.Addr, Queries: b.lab.Path(lab.DirectMix + ".queries"),
		// Long enough for several pushes.
		Seconds: max(5, 3*b.seconds), Rate: latencyRate, Latencies: true,
	}
	runs := []struct {
		figure string
		files  []string
	}{
		{quietP99, nil},
		{oneP99, []string{b.one, b.base}},
		{allP99, []string{b.all, b.base}},
	}
	// Each round starts with another run.
	for k := range runs {
		r := runs[(k+c.round)%len(runs)]
		t, err := b.underPushes(ctx, c.control, l, r.files)
		if gone := c.Alive(); gone != nil {
			return gone
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			b.notes.note("%s: %v; the round has no figure", r.figure, err)
			continue
		}
		b.results.Figures.Set(r.figure+c.suffix, c.round, lab.Microseconds(t.Quantile(0.99)))
	}
	return nil
}

// underPushes runs l while the tables in files are pushed in turn.
func (b *pushBench) underPushes(ctx context.Context, c *lab.Control, l lab.Load, files []string) (lab.Tally, error) {
	pushing, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- pushRegularly(pushing, c, slices.Clone(files)) }()
	t, err := l.Run(ctx)
	cancel()
	return t, errors.Join(err, <-ended)
}

// pushRegularly pushes the tables in files in turn until ctx ends. It completes the last
// push.
func pushRegularly(ctx context.Context, c *lab.Control, files []string) error {
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
			if err := c.Push(context.WithoutCancel(ctx), files[k%len(files)]); err != nil {
				return err
			}
		}
	}
}

// sleep waits for the time d. It returns early, with an error, if ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	clock.Sleep(ctx, d)
	return ctx.Err()
}
