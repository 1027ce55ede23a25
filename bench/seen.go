package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"syscall"
	"time"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"
)

// readerSettle is how long readers get to connect before a run.
const readerSettle = time.Second

// seenStates are the states of an agent: without readers of its queries, and with them. The agent of the
// last state sends dnstap.
func seenStates() []seenState {
	return []seenState{
		{title: "no reader"},
		{title: "no reader, again"},
		{title: "a tail that matches nothing", readers: 1, argv: []string{"tail", "nothing.invalid"}},
		{title: "a tail of everything", readers: 1, argv: []string{"tail"}},
		{title: "eight tails of everything that do not read", readers: 8, argv: []string{"tail"}, stalled: true},
		{title: "dnstap", tap: true},
	}
}

// A seenState is how the queries of an agent are read.
type seenState struct {
	title   string
	readers int
	argv    []string // of a reader, without the binary
	stalled bool
	tap     bool
}

// A seenBench measures the cost of readers of queries.
type seenBench struct {
	bench

	binary string
	// status has the address for readers, by the address for DNS.
	status map[netip.AddrPort]netip.AddrPort
	// plain and tapped are agents without dnstap, and with it.
	plain, tapped *lab.Server
}

// measureSeen compares an agent whose queries are not read with the same agent and readers.
func measureSeen(ctx context.Context, o options, r *results, progress io.Writer) error {
	tool, err := exec.LookPath("fstrm_capture")
	if err != nil {
		return fmt.Errorf("-seen: on Debian: apt-get install fstrm-bin: %w", err)
	}
	l, err := lab.NewLab(o.hosts, o.agent, o.inside)
	if err != nil {
		return err
	}
	defer l.Close()
	b := &seenBench{bench: bench{options: o, lab: l, results: r, progress: progress}, status: map[netip.AddrPort]netip.AddrPort{}}
	socket := l.Path("dnstap.sock")
	_, err = l.Start(ctx, lab.Command{
		Name: "dnstap", Argv: []string{tool, "-t", "protobuf:dnstap.Dnstap", "-u", socket, "-w", "/dev/null"}, Core: lab.ClientCore,
	})
	if err != nil {
		return err
	}
	if b.plain, err = b.start(ctx); err != nil {
		return err
	}
	if b.tapped, err = b.start(ctx, "--dnstap", "unix://"+socket); err != nil {
		return err
	}
	states := seenStates()
	figures := make([]report.Figures, len(states))
	for round := range o.rounds {
		fmt.Fprintf(progress, "readers, round %d of %d\n", round+1, o.rounds)
		for i := range states {
			k := (i + round) % len(states)
			if figures[k] == nil {
				figures[k] = report.Figures{}
			}
			if err := b.measureState(ctx, states[k], func(name string, value float64) { figures[k].Set(name, round, value) }); err != nil {
				return err
			}
		}
	}
	r.Tables = append(r.Tables, b.table(states, figures))
	return nil
}

// start starts an agent with more settings, and notes where its readers find it.
func (b *seenBench) start(ctx context.Context, settings ...string) (*lab.Server, error) {
	agent := lab.Peers()[1]
	prepare := agent.Prepare
	agent.Prepare = func(ctx context.Context, l *lab.Lab, addr netip.AddrPort) (lab.Launch, error) {
		how, err := prepare(ctx, l, addr)
		if err == nil {
			b.binary, b.status[addr] = how.Argv[0], how.Status
			how.Argv = append(how.Argv, settings...)
		}
		return how, err
	}
	return b.lab.StartServer(ctx, agent)
}

// measureState makes the runs of one state.
func (b *seenBench) measureState(ctx context.Context, s seenState, set func(string, float64)) error {
	server := b.plain
	if s.tap {
		server = b.tapped
	}
	saturated := lab.Load{Addr: server.Pinned.Addr, Queries: b.lab.Path(lab.DirectMix + ".queries"), Seconds: b.seconds, Core: lab.ClientCore}
	paced := saturated
	paced.Addr, paced.Core, paced.Rate, paced.Latencies = server.Free.Addr, "", pacedRate, true
	for _, one := range []struct {
		instance lab.Instance
		load     lab.Load
		use      func(lab.Run)
	}{
		{server.Pinned, saturated, func(r lab.Run) { set(udpMicros, r.Micros()) }},
		{server.Free, paced, func(r lab.Run) {
			set(pacedMicros, r.Micros())
			set(latencyP50, lab.Microseconds(r.Quantile(0.50)))
			set(latencyP99, lab.Microseconds(r.Quantile(0.99)))
		}},
	} {
		stop, err := b.read(ctx, s, b.status[one.instance.Addr], one.load.Core)
		if err != nil {
			return err
		}
		err = b.run(ctx, one.instance, one.load, one.use)
		stop()
		if err != nil {
			return err
		}
	}
	return nil
}

// read starts the readers of a state. The caller must call stop.
func (b *seenBench) read(ctx context.Context, s seenState, status netip.AddrPort, core string) (stop func(), err error) {
	var readers []*lab.Process
	stop = func() {
		for _, p := range readers {
			_ = syscall.Kill(p.Pid, syscall.SIGCONT) // a stopped process does not take the signal that ends it
			b.lab.Stop(p)
		}
	}
	for range s.readers {
		argv := append([]string{"sh", "-c", `exec "$@" >/dev/null`, "sh", b.binary}, s.argv...)
		p, err := b.lab.Start(ctx, lab.Command{Name: "tail", Argv: append(argv, "--status-addr", status.String(), "--state-dir", ""), Core: core})
		if err != nil {
			stop()
			return nil, err
		}
		readers = append(readers, p)
	}
	if err := sleep(ctx, readerSettle); err != nil {
		stop()
		return nil, err
	}
	for _, p := range readers {
		if err := p.Alive(); err != nil {
			stop()
			return nil, err
		}
		if s.stalled {
			if err := syscall.Kill(p.Pid, syscall.SIGSTOP); err != nil {
				stop()
				return nil, fmt.Errorf("stopping a reader: %w", err)
			}
		}
	}
	return stop, nil
}

// table compares the states with the first one.
func (b *seenBench) table(states []seenState, figures []report.Figures) report.Table {
	t := report.Table{
		Title: fmt.Sprintf("Queries for mesh names that are read, medians of %d rounds of %d s", b.rounds, b.seconds),
		Header: []string{
			"state", "saturated µs", "× no reader", "µs at 5,000/s", "× no reader", "p50 µs at 5,000/s", "p99 µs at 5,000/s", "× no reader",
		},
	}
	for i, s := range states {
		row := []string{s.title}
		for _, f := range []report.Figure{
			figures[i][udpMicros], figures[i][udpMicros].Over(figures[0][udpMicros]),
			figures[i][pacedMicros], figures[i][pacedMicros].Over(figures[0][pacedMicros]),
			figures[i][latencyP50], figures[i][latencyP99], figures[i][latencyP99].Over(figures[0][latencyP99]),
		} {
			row = append(row, report.Cell(f.Median()))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}
