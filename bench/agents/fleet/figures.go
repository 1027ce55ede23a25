package fleet

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A Round measures how long it takes until all agents have had a push.
type Round struct {
	began   time.Time
	times   []atomic.Int64 // of each agent, in nanoseconds since began; 0 before its push
	missing atomic.Int64
	done    chan struct{}
}

// Begin begins a round, in which n agents are expected. Pushes that arrive from now on count.
func (f *Fleet) Begin(n int) *Round {
	r := &Round{began: time.Now(), times: make([]atomic.Int64, len(f.agents)), done: make(chan struct{})}
	r.missing.Store(int64(n))
	f.round.Store(r)
	return r
}

// notePush notes a push of the agent.
func (f *Fleet) notePush(a *agent, now time.Time) {
	if a.full && f.cfg.Mode == Named && f.cfg.Edited != nil {
		f.noteDelays(a, now)
	}
	r := f.round.Load()
	if r != nil && r.times[a.id].CompareAndSwap(0, max(1, int64(now.Sub(r.began)))) && r.missing.Add(-1) == 0 {
		close(r.done)
	}
}

// Wait returns when all agents that are expected have had a push, or after a limit.
func (r *Round) Wait(ctx context.Context, limit time.Duration) error {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return fmt.Errorf("%d agents have had no push after %v", r.missing.Load(), limit)
	case <-r.done:
		return nil
	}
}

// Times returns the time from start to the push of each agent that has had one.
func (r *Round) Times(start time.Time) Times {
	var all Times
	for i := range r.times {
		if t := r.times[i].Load(); t > 0 {
			all = append(all, time.Duration(t)-start.Sub(r.began))
		}
	}
	return all
}

// Times are measured times.
type Times []time.Duration

// Quantile returns the time that a share of the times does not exceed; 0 if there are none.
func (t Times) Quantile(share float64) time.Duration {
	if len(t) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(t))
	return sorted[min(int(share*float64(len(sorted))), len(sorted)-1)]
}

// collected are times that several goroutines measure.
type collected struct {
	mu  sync.Mutex
	all Times
}

func (c *collected) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, d)
}

// take returns the times since the last call.
func (c *collected) take() Times {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.all
	c.all = nil
	return all
}

// noteDelays notes the time from the edit of each host in a push to the push. It leaves out the first push of a stream,
// because it answers a reconnect, which other figures measure.
func (f *Fleet) noteDelays(a *agent, now time.Time) {
	if a.pushes == 1 {
		return
	}
	for _, host := range a.table.changed {
		if at, ok := f.cfg.Edited(host); ok {
			f.delays.add(now.Sub(at))
		}
	}
}

// Delays returns the times from the edit of a host to its arrival at a full agent. It returns the times that were
// measured since the last call.
func (f *Fleet) Delays() Times { return f.delays.take() }

// Outages returns how long agents were without a stream before they connected again. It returns the times that were
// measured since the last call.
func (f *Fleet) Outages() Times { return f.outages.take() }

// Counts are the sums of what agents have counted.
type Counts struct {
	Read, Written      int64 // bytes on the wire, HTTP/2 and TLS included, TCP and IP not
	Pushes             int64
	Streams            int64 // streams that had a push
	Failures, Rejected int64 // streams that ended without a push, and pushes with a wrong version
}

// Counts returns the sums.
func (f *Fleet) Counts() (c Counts) {
	for _, a := range f.agents {
		c.Read += a.read.Load()
		c.Written += a.written.Load()
		c.Pushes += a.received.Load()
		c.Streams += a.streams.Load()
		c.Failures += a.failures.Load()
		c.Rejected += a.rejected.Load()
	}
	return c
}

// Since returns the difference from earlier counts.
func (c Counts) Since(old Counts) Counts {
	return Counts{
		c.Read - old.Read, c.Written - old.Written, c.Pushes - old.Pushes,
		c.Streams - old.Streams, c.Failures - old.Failures, c.Rejected - old.Rejected,
	}
}

// A Census is the state of all agents.
type Census struct {
	Connected int
	Servers   []int          // agents of each server
	Problems  map[string]int // for agents without a stream: why the last stream has ended
}

// Census returns the state of all agents.
func (f *Fleet) Census() Census {
	c := Census{Servers: make([]int, len(f.cfg.Servers)), Problems: map[string]int{}}
	for _, a := range f.agents {
		a.mu.Lock()
		if a.lost.IsZero() && a.conn != nil {
			c.Connected++
			c.Servers[a.server]++
		} else {
			c.Problems[a.problem]++
		}
		a.mu.Unlock()
	}
	return c
}

// Digests returns how many agents have a table, by its digest. Agents without a table do not count.
func (f *Fleet) Digests() map[string]int {
	digests := map[string]int{}
	for _, a := range f.agents {
		if digest, ok := a.digest(); ok {
			digests[digest]++
		}
	}
	return digests
}

// LastPush returns when an agent last had a push.
func (f *Fleet) LastPush() (last time.Time) {
	for _, a := range f.agents {
		a.mu.Lock()
		if a.pushed.After(last) {
			last = a.pushed
		}
		a.mu.Unlock()
	}
	return last
}
