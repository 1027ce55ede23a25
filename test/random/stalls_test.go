package random

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// Stalls are the moments in which this process or the agent was ready to run and had no processor for most of the time.
// What happens in them says nothing about the agent.
type stalls struct {
	mu   sync.Mutex
	list []stall
}

type stall struct{ from, until time.Time }

// watch notes stalls until ctx ends.
func (s *stalls) watch(ctx context.Context, pids ...int) {
	const interval = 200 * time.Millisecond
	last, waited := time.Now(), map[string]time.Duration{}
	for clock.Sleep(ctx, interval) {
		now := time.Now()
		worst := now.Sub(last) - interval // of this goroutine
		for thread, total := range waitingTimes(pids) {
			if before, found := waited[thread]; found {
				worst = max(worst, total-before)
			}
			waited[thread] = total
		}
		if worst > interval/2 {
			s.mu.Lock()
			s.list = append(s.list, stall{last, now})
			s.mu.Unlock()
		}
		last = now
	}
}

// waitingTimes returns how long each thread of some processes has waited for a processor (proc(5)).
func waitingTimes(pids []int) map[string]time.Duration {
	all := map[string]time.Duration{}
	for _, pid := range pids {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid)) // the pattern is good
		for _, thread := range threads {
			text, err := os.ReadFile(thread)
			if err != nil {
				continue // the thread has ended
			}
			if fields := strings.Fields(string(text)); len(fields) > 1 {
				nanoseconds, _ := strconv.ParseInt(fields[1], 10, 64)
				all[thread] = time.Duration(nanoseconds)
			}
		}
	}
	return all
}

// between returns how long the stalls took that lie in a time, in whole or in part.
func (s *stalls) between(from, until time.Time) (took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, stall := range s.list {
		if stall.until.After(from) && stall.from.Before(until) {
			took += stall.until.Sub(stall.from)
		}
	}
	return took
}
