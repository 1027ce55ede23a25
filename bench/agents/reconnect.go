package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/nametap/nametap/bench/agents/fleet"
)

// maxReconnects bounds how often all agents connect again for a figure.
const maxReconnects = 3

// reconnect measures how long it takes until all agents have connected again, which they do at once.
func (s *stage) reconnect(ctx context.Context, f *figures) error {
	reconnects := min(maxReconnects, s.repeats)
	for _, changed := range []bool{false, true} {
		var all fleet.Times
		var sum cost
		for range reconnects {
			times, c, err := s.reconnectOnce(ctx, changed)
			if err != nil {
				return err
			}
			all = append(all, times...)
			sum.server += c.server
			sum.client += c.client
			sum.Read += c.Read
			sum.Written += c.Written
			sum.Failures += c.Failures
		}
		name := "nothing has changed"
		if changed {
			name = "one host has changed"
		}
		part := &figures{}
		part.addTimes("until an agent is served", all)
		sum.addPerPush(part, reconnects*s.agents)
		part.add("streams that were refused or failed", float64(sum.Failures))
		for _, one := range part.Figures {
			f.add(name+": "+one.Name, one.Value)
		}
	}
	return s.addMemory(f)
}

// reconnectOnce ends all connections, changes a host or none, and lets all agents connect at once.
func (s *stage) reconnectOnce(ctx context.Context, changed bool) (fleet.Times, cost, error) {
	s.fleet.Hold()
	defer s.fleet.Release()
	s.fleet.Disconnect()
	for s.fleet.Census().Connected > 0 {
		if err := sleep(ctx, 10*time.Millisecond); err != nil {
			return nil, cost{}, err
		}
	}
	if changed {
		if _, err := s.source.Change(rand.IntN(s.source.Len())); err != nil {
			return nil, cost{}, err
		}
	}
	if err := s.idle(ctx); err != nil {
		return nil, cost{}, err
	}
	m, err := s.meter()
	if err != nil {
		return nil, cost{}, err
	}
	r := s.fleet.Begin(s.agents)
	begun := time.Now()
	s.fleet.Release()
	if err := r.Wait(ctx, s.limit); err != nil {
		return nil, cost{}, fmt.Errorf("%w: %v", err, s.fleet.Census().Problems)
	}
	times := r.Times(begun)
	if err := s.quiet(ctx); err != nil {
		return nil, cost{}, err
	}
	c, err := m.read()
	return times, c, err
}

// idleLimit is how long to wait for servers that are never idle.
const idleLimit = 10 * time.Second

// idle waits until the servers do nothing: they have noticed that connections have ended.
func (s *stage) idle(ctx context.Context) error {
	const interval, little = 500 * time.Millisecond, 10 * time.Millisecond
	limit := time.Now().Add(idleLimit)
	for last := time.Duration(-1); ; {
		used, err := s.processor()
		if err != nil {
			return err
		}
		if last >= 0 && used-last < little || time.Now().After(limit) {
			return nil
		}
		last = used
		if err := sleep(ctx, interval); err != nil {
			return err
		}
	}
}
