package test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/process"
)

// A cost is what processes have cost the kernel so far.
type cost struct {
	// waits is how often a thread gave up its processor because it had nothing to do. The thread of Go's monitor does
	// not count. While another thread runs, the monitor wakes every 20 µs, so its waits tell how slow the machine is.
	waits int

	nanoseconds int
}

// costOf returns the cost of a process and its children, over all of their threads.
func costOf(tb testing.TB, pid int) (c cost) {
	tb.Helper()
	for _, pid := range append(process.Children(pid), pid) {
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			tb.Fatal(err)
		}
		monitor := math.MaxInt // Go starts it before all other threads but the first
		for _, thread := range threads {
			if id := number(tb, thread.Name()); id > pid {
				monitor = min(monitor, id)
			}
		}
		for _, thread := range threads {
			dir := fmt.Sprintf("/proc/%d/task/%s", pid, thread.Name())
			status, err := os.ReadFile(filepath.Join(dir, "status"))
			if err != nil {
				continue // the thread has ended
			}
			_, rest, _ := strings.Cut(string(status), "\nvoluntary_ctxt_switches:")
			if count, _, found := strings.Cut(rest, "\n"); found && thread.Name() != strconv.Itoa(monitor) {
				c.waits += number(tb, count)
			}
			if stat, err := os.ReadFile(filepath.Join(dir, "schedstat")); err == nil {
				c.nanoseconds += number(tb, strings.Fields(string(stat))[0])
			}
		}
	}
	return c
}

// number parses a number.
func number(tb testing.TB, text string) int {
	tb.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

// BenchmarkIdle measures how often an agent wakes up that no client queries: with a supervisor, as in a pod, and with
// capture, which probes the way of clients. R11 has the largest numbers. Other load of the machine can split a piece of
// work in two.
func BenchmarkIdle(b *testing.B) { // R11
	for name, start := range map[string]func(tb testing.TB) *agent{
		"pod": func(tb testing.TB) *agent {
			tb.Helper()
			h := newHost(tb)
			h.capabilities = nil
			return h.supervised("--dns-addr", "localhost:15053")
		},
		"vm": func(tb testing.TB) *agent {
			tb.Helper()
			return newVM(tb, "nft").capture()
		},
	} {
		b.Run(name, func(b *testing.B) {
			a := start(b)
			before := costOf(b, a.Process.Pid)
			for b.Loop() {
				time.Sleep(10 * time.Second) //nolint:forbidigo // it is what is measured
			}
			after, seconds := costOf(b, a.Process.Pid), b.Elapsed().Seconds()
			b.ReportMetric(float64(after.waits-before.waits)/seconds, "waits/s")
			b.ReportMetric(float64(after.nanoseconds-before.nanoseconds)/1e6/seconds, "ms-of-processor/s")
		})
	}
}
