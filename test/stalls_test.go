package test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/iptables"
)

// What a stalls measures: a thread wakes up after each beat, and how long the threads of agents have waited for a
// processor is read in each round. What is shorter than late, or less than much in a round, is usual.
const (
	beat  = 10 * time.Millisecond
	late  = 50 * time.Millisecond
	round = 25 // beats
	much  = 100 * time.Millisecond
)

// enough is how long the machine must have stood still for a limit of time of the product to pass that does not pass
// otherwise: half of the lease of the rules, which agents renew in each quarter.
const enough = iptables.LeaseTime / 2

// A stalls knows in which moments this machine stood still, or was too busy to run the agents of a test. The product has
// limits of time, such as the lease of the rules, that pass in such a moment, so what is lost in one is no defect.
type stalls struct {
	once sync.Once

	mu       sync.Mutex
	followed map[int]*followed // by the process
	moments  []still           // in the order of their ends
}

// followed is a process of a test, or of all if tb is nil.
type followed struct {
	tb     testing.TB
	waited map[string]time.Duration // how long each thread has waited for a processor
}

// A moment is a period of time.
type moment struct{ from, to time.Time }

// A still is a moment in which the machine stood still, for a test or, if tb is nil, for all.
type still struct {
	moment
	tb testing.TB
}

// machine is this machine.
var machine = stalls{followed: map[int]*followed{}}

// follow measures how long the threads of a process of a test, and of its children, wait, until it ends.
func (s *stalls) follow(tb testing.TB, pid int) {
	tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.followed[pid] = &followed{tb, map[string]time.Duration{}}
	s.once.Do(func() {
		s.followed[os.Getpid()] = &followed{nil, map[string]time.Duration{}} // clients and nameservers
		go s.measure()
	})
}

// measure measures until the tests have ended.
func (s *stalls) measure() {
	runtime.LockOSThread()
	for n := 0; ; n++ {
		began := time.Now()
		time.Sleep(beat) //nolint:forbidigo // it is what is measured
		s.mu.Lock()
		now := time.Now()
		if now.Sub(began) > beat+late {
			s.moments = append(s.moments, still{moment{began.Add(beat), now}, nil})
		}
		for pid, f := range s.followed {
			if n%round != 0 {
				break
			}
			waited, running := f.read(pid)
			if waited > much {
				s.moments = append(s.moments, still{moment{now.Add(-waited), now}, f.tb})
			}
			if !running {
				delete(s.followed, pid)
			}
		}
		s.mu.Unlock()
	}
}

// read returns how long a process has waited since the last round: its threads together, but no longer than the round,
// or one thread of it. running is false if it has ended.
func (f *followed) read(pid int) (waited time.Duration, running bool) {
	var together, longest time.Duration
	for _, pid := range append(process.Children(pid), pid) {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid)) // none if it has ended
		for _, thread := range threads {
			text, err := os.ReadFile(thread)
			fields := strings.Fields(string(text))
			if err != nil || len(fields) < 2 {
				continue // the thread has ended
			}
			delay, _ := strconv.Atoi(fields[1]) // zero if it is none
			more := time.Duration(delay) - f.waited[thread]
			f.waited[thread], running = time.Duration(delay), true
			together, longest = together+more, max(longest, more)
		}
	}
	if f.tb == nil { // most of its threads have other work
		return longest, running
	}
	return max(longest, min(together, round*beat)), running
}

// between returns how long the machine stood still for a test between two times.
func (s *stalls) between(tb testing.TB, from, to time.Time) (total time.Duration) {
	tb.Helper()
	s.mu.Lock()
	var within []still
	for _, m := range slices.Backward(s.moments) {
		if m.to.Before(from) {
			break
		}
		if m.tb == nil || m.tb == tb {
			within = append(within, m)
		}
	}
	s.mu.Unlock()
	slices.SortFunc(within, func(a, b still) int { return a.from.Compare(b.from) })
	for _, m := range within { // they overlap
		if m.from.Before(from) {
			m.from = from
		}
		if m.to.After(to) {
			m.to = to
		}
		if m.from.Before(m.to) {
			total += m.to.Sub(m.from)
			from = m.to
		}
	}
	return total
}

// excuses reports whether the machine stood still so long, before what happened between two times, that the rules may
// have lost their lease, or the agent may not have known whether its probes arrive.
func (s *stalls) excuses(tb testing.TB, from, to time.Time) bool {
	tb.Helper()
	const before = 2 * iptables.LeaseTime
	time.Sleep(time.Until(to.Add(2 * round * beat))) //nolint:forbidigo // until it is measured
	return s.between(tb, from.Add(-before), to) > enough
}

// stoodStill is excuses for what has happened in the last half minute. It logs that the rest of the test is left out.
func stoodStill(tb testing.TB) bool {
	tb.Helper()
	now := time.Now()
	if !machine.excuses(tb, now.Add(-30*time.Second), now) {
		return false
	}
	tb.Log("the rest is left out: this machine stood still")
	return true
}
