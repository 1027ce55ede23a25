package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"
)

// memorySettle is how long an agent is left alone before its memory is read. The agent returns memory to the kernel
// when pushes pause.
const memorySettle = 5 * time.Second

// memoryFields are the fields of /proc/PID/smaps_rollup that are reported: everything
// resident, pages that only this process has, and its share of pages of files.
func memoryFields() []string { return []string{"Rss", "Anonymous", "Pss_File"} }

// measureMemory measures the resident memory of an agent that nothing queries: with its
// first table, and after pushes that change one host and all hosts.
func measureMemory(ctx context.Context, o options, r *results) (err error) {
	l, err := lab.NewLab(o.hosts, o.agent, o.inside)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	b := &pushBench{options: o, lab: l, results: &pushResults{Hosts: o.hosts}, notes: r, progress: os.Stderr}
	if err := b.writeTables(); err != nil {
		return err
	}
	steps := []memoryStep{
		{"the first table", []string{b.base}, 1},
		{fmt.Sprintf("%d pushes, one host changed", repeats), []string{b.one, b.base}, repeats},
		{fmt.Sprintf("%d pushes, all hosts changed", repeats), []string{b.all, b.base}, repeats},
	}
	found := make([]report.Figures, len(steps))
	for round := range o.rounds {
		fmt.Fprintf(b.progress, "memory, round %d of %d\n", round+1, o.rounds)
		c := client{round: round}
		if c.Addr, err = lab.FreeAddr(ctx); err != nil {
			return err
		}
		err = b.with(ctx, c, b.agentOf, func(ctx context.Context, c client) error {
			for i, step := range steps {
				if found[i] == nil {
					found[i] = report.Figures{}
				}
				if err := step.measure(ctx, c, found[i]); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	t := report.Table{
		Title:  fmt.Sprintf("Resident memory of the agent with %d hosts, in MiB", o.hosts),
		Header: []string{"after", "resident", "anonymous", "pages of files"},
	}
	for i, step := range steps {
		row := []string{step.name}
		for _, field := range memoryFields() {
			row = append(row, fmt.Sprintf("%.1f", found[i][field].Median()))
		}
		t.Rows = append(t.Rows, row)
	}
	r.Tables = append(r.Tables, t)
	return nil
}

// A memoryStep pushes the tables in files, which take turns.
type memoryStep struct {
	name  string
	files []string
	times int
}

// measure makes the pushes and reads the memory of an agent, in MiB.
func (s memoryStep) measure(ctx context.Context, c client, found report.Figures) error {
	for k := range s.times {
		if err := c.control.Push(ctx, s.files[k%len(s.files)]); err != nil {
			return err
		}
	}
	if err := sleep(ctx, memorySettle); err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(c.Pid), "smaps_rollup"))
	if err != nil {
		return fmt.Errorf("reading the memory of process %d: %w", c.Pid, err)
	}
	for _, field := range memoryFields() {
		size, err := lab.ParseSize(string(text), field)
		if err != nil {
			return err
		}
		found.Set(field, c.round, float64(size)/(1<<20))
	}
	return nil
}
