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

// The largest numbers of context switches a second: of an idle pod, the supervisor included, and of an idle agent with
// capture, which probes the way of clients.
const (
	idlePod = 15
	idleVM  = 60
)

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

// idle checks that an idle agent switches contexts at most as often as want a second, and prints that with its processor
// time. Other load of the machine makes it switch more often, so one of twelve turns is enough.
func (a *agent) idle(want float64) {
	a.host.tb.Helper()
	var all []string
	for range 12 {
		before, began := costOf(a.host.tb, a.Process.Pid), time.Now()
		wait.For(a.host.tb, "the turn is over", time.After(5*time.Second))
		after, seconds := costOf(a.host.tb, a.Process.Pid), time.Since(began).Seconds()
		switches := float64(after.switches-before.switches) / seconds
		all = append(all, fmt.Sprintf("%.1f context switches and %.2f ms of processor time a second",
			switches, float64(after.nanoseconds-before.nanoseconds)/1e6/seconds))
		if switches <= want {
			a.host.tb.Log(all[len(all)-1])
			return
		}
	}
	a.host.tb.Errorf("want at most %v context switches a second:\n%s", want, strings.Join(all, "\n"))
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
