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
)

// What a stalls measures: a thread wakes up after each beat, and how long the threads of agents have waited for a
// processor is read in each round. What is shorter than late is usual.
const (
	beat  = 10 * time.Millisecond
	round = 25 // beats
	late  = 20 * time.Millisecond
)

// A stalls knows in which moments this machine stood still, or was too busy to run the agents. The product has limits
// of time, such as the lease of the rules, that pass in such a moment, so what is lost in one is no defect.
type stalls struct {
	once sync.Once

	mu      sync.Mutex
	agents  map[int]map[string]time.Duration // how long each thread has waited for a processor, by the process of the agent
	moments []moment                         // in the order of their ends
}

// A moment is a period of time.
type moment struct{ from, to time.Time }

// machine is this machine.
var machine = stalls{agents: map[int]map[string]time.Duration{}}

// follow measures how long the threads of a process and of its children wait, until it ends.
func (s *stalls) follow(pid int) {
	s.once.Do(func() { go s.measure() })
	s.mu.Lock()
	defer s.mu.Unlock()
	s.agents[pid] = map[string]time.Duration{}
}

// measure measures until the tests have ended.
func (s *stalls) measure() {
	runtime.LockOSThread()
	for n := 0; ; n++ {
		began := time.Now()
		time.Sleep(beat)
		s.mu.Lock()
		if now := time.Now(); now.Sub(began) > beat+late {
			s.moments = append(s.moments, moment{began.Add(beat), now})
		}
		if n%round == 0 {
			for pid, waited := range s.agents {
				if !s.read(pid, waited) {
					delete(s.agents, pid)
				}
			}
		}
		s.mu.Unlock()
	}
}

// read reads how long the threads of a process have waited. It returns false if the process has ended.
func (s *stalls) read(pid int, waited map[string]time.Duration) bool {
	found := false
	for _, pid := range append(process.Children(pid), pid) {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid)) // none if it has ended
		for _, thread := range threads {
			text, err := os.ReadFile(thread)
			fields := strings.Fields(string(text))
			if err != nil || len(fields) < 2 {
				continue // the thread has ended
			}
			found = true
			delay, _ := strconv.Atoi(fields[1]) // zero if it is none
			if more := time.Duration(delay) - waited[thread]; more > late {
				now := time.Now()
				s.moments = append(s.moments, moment{now.Add(-more), now})
			}
			waited[thread] = time.Duration(delay)
		}
	}
	return found
}

// between returns how long the machine stood still between two times.
func (s *stalls) between(from, to time.Time) (total time.Duration) {
	s.mu.Lock()
	var within []moment
	for _, m := range slices.Backward(s.moments) {
		if m.to.Before(from) {
			break
		}
		within = append(within, m)
	}
	s.mu.Unlock()
	slices.SortFunc(within, func(a, b moment) int { return a.from.Compare(b.from) })
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
func (s *stalls) excuses(from, to time.Time) bool {
	const before, enough = 5 * time.Second, 250 * time.Millisecond
	time.Sleep(time.Until(to.Add(2 * round * beat))) // until it is measured
	return s.between(from.Add(-before), to) > enough
}

// stoodStill is excuses for what has just happened. It logs that the rest of the test is left out.
func stoodStill(tb testing.TB) bool {
	tb.Helper()
	now := time.Now()
	if !machine.excuses(now, now) {
		return false
	}
	tb.Logf("the rest is left out: this machine stood still for %v in the last minute", machine.between(now.Add(-time.Minute), now))
	return true
}
