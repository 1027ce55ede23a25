package main

import (
	"context"
	"slices"
	"sync"
	"time"
)

// rollingRate is how many edits a second the experiment replicas makes.
const rollingRate = 1

// rolling measures edits while the replicas are restarted one after the other, again and again. Agents
// choose among the replicas that are ready, as behind a Service.
func (s *stage) rolling(ctx context.Context, f *figures, rate float64) error {
	m, err := s.meter()
	if err != nil {
		return err
	}
	s.fleet.Delays()
	s.fleet.Outages()
	edits := s.cluster.Edits()
	editing, stop := context.WithTimeout(ctx, s.lasts)
	defer stop()
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { s.editAt(editing, rate) })
	restarts, err := s.restarts(ctx, editing)
	if err != nil {
		return err
	}
	group.Wait()
	if err := s.quiet(ctx); err != nil {
		return err
	}
	f.add("replicas", float64(len(s.servers)))
	f.add("restarts", float64(restarts))
	f.addTimes("an agent is without a stream", s.fleet.Outages())
	c := s.fleet.Census()
	f.add("agents of the replica with the fewest", float64(slices.Min(c.Servers)))
	f.add("agents of the replica with the most", float64(slices.Max(c.Servers)))
	f.add("streams that were refused or failed", float64(s.fleet.Counts().Since(m.counts).Failures))
	return s.addTraffic(f, m, edits)
}

// restarts restarts one replica after the other, with a pause before each restart, until the context while ends. It
// returns the number of restarts.
func (s *stage) restarts(ctx, while context.Context) (n int, err error) {
	pause := s.lasts / time.Duration(4*len(s.servers))
	for {
		if sleep(while, pause) != nil {
			return n, ctx.Err()
		}
		i := n % len(s.servers)
		// The endpoint of a pod that ends is removed from its Service first.
		s.fleet.SetUp(i, false)
		s.end(s.servers[i])
		if err := s.start(ctx, s.servers[i]); err != nil {
			return n, err
		}
		s.fleet.SetUp(i, true)
		n++
	}
}
