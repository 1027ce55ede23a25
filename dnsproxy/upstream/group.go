package upstream

import (
	"sync/atomic"
	"time"
)

// A Group is a list of servers that know the same names. It is safe for concurrent use.
type Group struct {
	client  *Client
	servers []*server
	options Options
	timeout time.Duration

	waiting atomic.Int64 // queries in flight
	trial   atomic.Int64 // when a query was last accepted despite rule 9, in Unix ns
	budget  budget
}

// overloadWaiting is the bound of rule 9: queries times silence.
const overloadWaiting = 128 * time.Second

// trialPause is the time between queries that are accepted despite rule 9.
const trialPause = 100 * time.Millisecond

// Down reports whether all servers are down or looping (rule 2).
func (g *Group) Down() bool {
	now := time.Now()
	for _, s := range g.servers {
		if s.standing(now, s.udp == nil).state < Down {
			return false
		}
	}
	return true
}

// Overloaded reports whether [Group.Exchange] would fail with [ErrOverload] at the moment
// (rule 9).
func (g *Group) Overloaded() bool {
	overloaded, now := g.overloaded()
	return overloaded && now.UnixNano()-g.trial.Load() < int64(trialPause)
}

// refuses reports whether a new query fails at once because of rule 9.
func (g *Group) refuses() bool {
	overloaded, now := g.overloaded()
	if !overloaded {
		return false
	}
	last := g.trial.Load()
	return now.UnixNano()-last < int64(trialPause) || !g.trial.CompareAndSwap(last, now.UnixNano())
}

// overloaded reports whether rule 9 applies: all servers are silent, and too many queries wait
// for them. It also returns the time if it has read the clock.
func (g *Group) overloaded() (overloaded bool, now time.Time) {
	waiting := time.Duration(g.waiting.Load())
	if waiting == 0 || waiting*g.timeout < overloadWaiting {
		return false, now
	}
	now = time.Now()
	least := g.timeout
	for _, s := range g.servers {
		silence, silent := s.silence(now)
		if !silent {
			return false, now
		}
		least = min(least, silence)
	}
	return waiting*least >= overloadWaiting, now
}
