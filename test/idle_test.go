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
	"github.com/nametap/nametap/internal/testkit/wait"
)

// The largest numbers of waits a second: of an idle pod, the supervisor included, and of an idle agent with capture,
// which probes the way of clients.
const (
	idlePod = 10
	idleVM  = 40
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

// idle checks that the threads of an idle agent wait at most as often as want a second, and prints that with the agent's
// processor time. Other load of the machine can split a piece of work in two, so one of twelve turns is enough.
func (a *agent) idle(want float64) {
	a.host.tb.Helper()
	var all []string
	for range 12 {
		before, began := costOf(a.host.tb, a.Process.Pid), time.Now()
		wait.For(a.host.tb, "the turn is over", time.After(5*time.Second))
		after, seconds := costOf(a.host.tb, a.Process.Pid), time.Since(began).Seconds()
		waits := float64(after.waits-before.waits) / seconds
		all = append(all, fmt.Sprintf("%.1f waits and %.2f ms of processor time a second",
			waits, float64(after.nanoseconds-before.nanoseconds)/1e6/seconds))
		if waits <= want {
			a.host.tb.Log(all[len(all)-1])
			return
		}
	}
	a.host.tb.Errorf("want at most %v waits a second:\n%s", want, strings.Join(all, "\n"))
}

// TestIdlePod checks how often an agent with a supervisor wakes up while no client queries it.
func TestIdlePod(t *testing.T) { // R11
	h := newHost(t)
	h.capabilities = nil
	a := h.supervised("--dns-addr", "localhost:15053")
	a.idle(idlePod)
}

// TestIdleVM checks how often an agent with capture wakes up while no client queries it.
func TestIdleVM(t *testing.T) { // R11
	v := newVM(t, "nft")
	a := v.capture()
	a.idle(idleVM)
}
