package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/bench/lab"
)

const (
	agentRounds = 3    // of queries without edits and with them
	agentLoad   = 10   // seconds of each
	agentRate   = 2000 // queries a second
	editRate    = 10   // edits a second
)

// realAgent measures nametap's agent: the latency of its answers while hosts are edited and while none is,
// and the cost of an edit.
func (s *stage) realAgent(ctx context.Context, f *figures) error {
	control, err := netip.ParseAddrPort(s.servers[0].addr)
	if err != nil {
		return fmt.Errorf("the address of the control plane: %w", err)
	}
	addr, err := lab.FreeAddr(ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(s.lab.Dir, "agent-")
	if err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	how, err := s.lab.Agent(ctx, addr, control, append(s.lab.NoUpstream(), "--state-dir", dir)...)
	if err != nil {
		return err
	}
	p, err := s.lab.Start(ctx, lab.Command{Name: "agent", Argv: how.Argv})
	if err != nil {
		return err
	}
	defer s.lab.Stop(p)
	if err := p.Await(ctx, startLimit, how.Ready); err != nil {
		return err
	}
	queries, err := s.lab.Write("agent.queries", s.queries())
	if err != nil {
		return err
	}
	load := lab.Load{Addr: addr, Queries: queries, Seconds: agentLoad, Rate: agentRate, Latencies: true}
	var runs [2][]agentRun // without edits, with them
	for i := range 2 * agentRounds {
		edits := (i + i/2) % 2 // each round starts with another run
		run, err := s.underEdits(ctx, p.Pid, load, edits*editRate)
		if err != nil {
			return errors.Join(err, p.Alive())
		}
		runs[edits] = append(runs[edits], run)
	}
	size, err := lab.Memory(p.Pid)
	quiet, busy := median(runs[0]), median(runs[1])
	edits := float64(agentLoad * editRate)
	f.add("p50 without edits, µs", lab.Microseconds(quiet.p50))
	f.add("p50 with 10 edits a second, µs", lab.Microseconds(busy.p50))
	f.add("p99 without edits, µs", lab.Microseconds(quiet.p99))
	f.add("p99 with 10 edits a second, µs", lab.Microseconds(busy.p99))
	f.add("agent's processor time per edit, ms", milliseconds(busy.used-quiet.used)/edits)
	f.add("bytes that the agent writes to files and sockets, per edit", float64(busy.written-quiet.written)/edits)
	f.add("agent's memory, MiB resident", mebibytes(size))
	return err
}

// queries returns queries for a thousand hosts, in dnsperf's form.
func (s *stage) queries() []byte {
	var b bytes.Buffer
	for range 1000 {
		fmt.Fprintf(&b, "%s A\n", s.cluster.Host(rand.IntN(s.hosts)))
	}
	return b.Bytes()
}

// An agentRun is what one load of queries has measured.
type agentRun struct {
	p50, p99, used time.Duration
	written        int
}

// underEdits runs a load while hosts are edited at a rate.
func (s *stage) underEdits(ctx context.Context, pid int, l lab.Load, rate int) (r agentRun, err error) {
	used, err := lab.ProcessorTime(pid)
	if err != nil {
		return r, err
	}
	written, err := writtenBy(pid)
	if err != nil {
		return r, err
	}
	editing, stop := context.WithTimeout(ctx, time.Duration(l.Seconds)*time.Second)
	defer stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if rate > 0 {
			s.editAt(editing, float64(rate))
		}
	}()
	t, err := l.Run(ctx)
	<-ended
	if err != nil {
		return r, err
	}
	after, err := lab.ProcessorTime(pid)
	if err != nil {
		return r, err
	}
	more, err := writtenBy(pid)
	return agentRun{t.Quantile(0.5), t.Quantile(0.99), after - used, more - written}, err
}

// writtenBy returns how many bytes a process has written to files and sockets.
func writtenBy(pid int) (n int, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if err != nil {
		return 0, fmt.Errorf("reading what the agent has written: %w", err)
	}
	_, rest, _ := strings.Cut(string(text), "wchar: ")
	if _, err := fmt.Sscan(rest, &n); err != nil {
		return 0, fmt.Errorf("/proc/%d/io: %w", pid, err)
	}
	return n, nil
}

// median returns the median of each figure.
func median(runs []agentRun) agentRun {
	pick := func(figure func(agentRun) int) int {
		var all []int
		for _, r := range runs {
			all = append(all, figure(r))
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	return agentRun{
		p50:     time.Duration(pick(func(r agentRun) int { return int(r.p50) })),
		p99:     time.Duration(pick(func(r agentRun) int { return int(r.p99) })),
		used:    time.Duration(pick(func(r agentRun) int { return int(r.used) })),
		written: pick(func(r agentRun) int { return r.written }),
	}
}
