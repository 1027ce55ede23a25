package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// idleSwitches is the largest number of context switches a second of an idle pod, the supervisor included.
const idleSwitches = 15

// A cost is what processes have cost the kernel so far.
type cost struct {
	switches, nanoseconds int
}

// costOf returns the cost of a process and its children, over all of their threads.
func costOf(tb testing.TB, pid int) (c cost) {
	tb.Helper()
	for _, pid := range append(process.Children(pid), pid) {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		if err != nil {
			tb.Fatal(err)
		}
		for _, thread := range threads {
			status, err := os.ReadFile(filepath.Join(thread, "status"))
			if err != nil {
				continue // the thread has ended
			}
			for line := range strings.Lines(string(status)) {
				if _, count, found := strings.Cut(line, "_ctxt_switches:"); found {
					c.switches += number(tb, count)
				}
			}
			if stat, err := os.ReadFile(filepath.Join(thread, "schedstat")); err == nil {
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

// idle returns the context switches of an idle agent a second, and prints them with its processor time. Other load
// of the machine makes it switch more often, so it returns the best of three turns.
func (a *agent) idle(turn time.Duration) float64 {
	a.host.tb.Helper()
	best := 0.0
	for i := range 3 {
		before, began := costOf(a.host.tb, a.Process.Pid), time.Now()
		wait.For(a.host.tb, "the turn is over", time.After(turn))
		after, seconds := costOf(a.host.tb, a.Process.Pid), time.Since(began).Seconds()
		switches := float64(after.switches-before.switches) / seconds
		a.host.tb.Logf("%.1f context switches and %.2f ms of processor time a second",
			switches, float64(after.nanoseconds-before.nanoseconds)/1e6/seconds)
		if i == 0 || switches < best {
			best = switches
		}
	}
	return best
}

// TestIdlePod checks how often an agent with a supervisor wakes up while no client queries it.
func TestIdlePod(t *testing.T) { // R11
	h := newHost(t)
	h.capabilities = nil
	a := h.supervised("--dns-addr", "localhost:15053")
	if got := a.idle(10 * time.Second); got > idleSwitches {
		t.Errorf("%.1f context switches a second, want at most %d", got, idleSwitches)
	}
}

// TestIdleVM prints what an agent with capture costs while no client queries it.
func TestIdleVM(t *testing.T) { // R11
	v := newVM(t, "nft")
	a := v.capture()
	a.idle(10 * time.Second)
}
