package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/nametap/nametap/bench/agents/fleet"
	"github.com/nametap/nametap/bench/lab"
)

// settle is the time for servers to take the last ACKs, and for clients to send them.
const settle = 50 * time.Millisecond

// A meter measures what an experiment costs.
type meter struct {
	stage          *stage
	began          time.Time
	server, client time.Duration
	counts         fleet.Counts
}

// meter starts a meter.
func (s *stage) meter() (m meter, err error) {
	m = meter{stage: s, began: time.Now(), counts: s.fleet.Counts()}
	if m.server, err = s.processor(); err != nil {
		return m, err
	}
	m.client, err = ownProcessor()
	return m, err
}

// A cost is what was measured.
type cost struct {
	took, server, client time.Duration
	fleet.Counts
}

// read returns the cost since the start of the meter.
func (m meter) read() (c cost, err error) {
	now, err := m.stage.meter()
	return cost{now.began.Sub(m.began), now.server - m.server, now.client - m.client, now.counts.Since(m.counts)}, err
}

// addPerPush adds figures of one push to one agent. n is the number of these pushes.
func (c cost) addPerPush(f *figures, n int) {
	f.add("server's processor time per agent, µs", lab.Microseconds(c.server)/float64(n))
	f.add("client's processor time per agent, µs", lab.Microseconds(c.client)/float64(n))
	received := float64(c.Read) / float64(n)
	f.add("bytes received per agent", received)
	f.add("the same with TCP and IPv4 at MTU 1500", withHeaders(received))
	f.add("bytes sent per agent", float64(c.Written)/float64(n))
}

// withHeaders adds to a number of bytes the headers of TCP, with timestamps, and IPv4.
func withHeaders(n float64) float64 {
	const headers, segment = 52, 1448
	return n + headers*math.Ceil(n/segment)
}

// round changes a host, and returns how long it took until n agents had it.
func (s *stage) round(ctx context.Context, i, n int) (fleet.Times, error) {
	r := s.fleet.Begin(n)
	at, err := s.source.Change(i % s.source.Len())
	if err != nil {
		return nil, err
	}
	if err := r.Wait(ctx, s.limit); err != nil {
		return nil, err
	}
	times := r.Times(at)
	return times, sleep(ctx, settle)
}

// rounds changes hosts one after the other, and returns how long they took.
func (s *stage) rounds(ctx context.Context, n int) (all fleet.Times, err error) {
	for range s.repeats {
		times, err := s.round(ctx, rand.IntN(s.source.Len()), n)
		if err != nil {
			return nil, err
		}
		all = append(all, times...)
	}
	return all, nil
}

// push measures edits of one host, one after the other.
func (s *stage) push(ctx context.Context, f *figures) error {
	if _, err := s.round(ctx, 0, s.agents); err != nil { // the first round may do more
		return err
	}
	m, err := s.meter()
	if err != nil {
		return err
	}
	spread, err := s.rounds(ctx, s.agents)
	if err != nil {
		return err
	}
	c, err := m.read()
	if err != nil {
		return err
	}
	f.add("edits of one host", float64(s.repeats))
	f.add("pushes per agent and edit", float64(c.Pushes)/float64(s.agents*s.repeats))
	c.addPerPush(f, s.agents*s.repeats)
	f.addTimes("from the edit to the agent", spread)
	return s.addMemory(f)
}

// churning measures edits at a rate: a share of the hosts is edited in a minute.
func (s *stage) churning(ctx context.Context, f *figures) error {
	m, err := s.meter()
	if err != nil {
		return err
	}
	s.fleet.Delays()
	edits := s.cluster.Edits()
	editing, stop := context.WithTimeout(ctx, s.lasts)
	defer stop()
	s.editAt(editing, s.churn*float64(s.hosts)/60)
	if err := s.quiet(ctx); err != nil {
		return err
	}
	return s.addTraffic(f, m, edits)
}

// editAt edits random hosts at a rate, until ctx ends. One edit in 20 removes a Service, which a later
// edit creates again.
func (s *stage) editAt(ctx context.Context, perSecond float64) {
	const removed = 0.05
	begun := time.Now()
	for n := 1; ; n++ {
		next := begun.Add(time.Duration(float64(n) / perSecond * float64(time.Second)))
		if sleep(ctx, time.Until(next)) != nil {
			return
		}
		i := rand.IntN(s.cluster.Len())
		if rand.Float64() < removed {
			s.cluster.Remove(i)
			continue
		}
		_, _ = s.cluster.Change(i) // the simulated API server refuses none
	}
}

// addTraffic adds figures of the edits since the meter m has started. edits is the number of edits before.
func (s *stage) addTraffic(f *figures, m meter, edits int) error {
	c, err := m.read()
	if err != nil {
		return err
	}
	edits = s.cluster.Edits() - edits
	f.add("edits a second", float64(edits)/c.took.Seconds())
	f.add("pushes per agent", float64(c.Pushes)/float64(s.agents))
	f.add("servers' share of a processor, %", 100*c.server.Seconds()/c.took.Seconds())
	f.add("client's share of a processor, %", 100*c.client.Seconds()/c.took.Seconds())
	f.add("servers' processor time per push, µs", lab.Microseconds(c.server)/float64(max(c.Pushes, 1)))
	f.add("client's processor time per push, µs", lab.Microseconds(c.client)/float64(max(c.Pushes, 1)))
	f.add("servers' processor time per agent and edit, µs", lab.Microseconds(c.server)/float64(s.agents*max(edits, 1)))
	f.add("bytes received per agent", float64(c.Read)/float64(s.agents))
	f.add("bytes received per agent and edit", float64(c.Read)/float64(s.agents*max(edits, 1)))
	f.addTimes("from an edit to a full agent", s.fleet.Delays())
	return s.addMemory(f)
}

// quiet waits until all agents are connected, and none of them has had a push for a second.
func (s *stage) quiet(ctx context.Context) error {
	limit := time.Now().Add(s.limit)
	for {
		if err := sleep(ctx, 250*time.Millisecond); err != nil {
			return err
		}
		switch c := s.fleet.Census(); {
		case c.Connected == s.agents && time.Since(s.fleet.LastPush()) > time.Second:
			return nil
		case time.Now().After(limit):
			return fmt.Errorf("%d of %d agents are connected, and the last push was %v ago: %v",
				c.Connected, s.agents, time.Since(s.fleet.LastPush()).Round(time.Millisecond), c.Problems)
		}
	}
}

// slowReaders measures edits while a share of the agents does not read.
func (s *stage) slowReaders(ctx context.Context, f *figures) error {
	slow := min(int(s.slow*float64(s.agents)), s.agents-s.config().Full)
	before, err := s.rounds(ctx, s.agents)
	if err != nil {
		return err
	}
	f.add("agents that stop reading", float64(slow))
	f.addTimes("before, from the edit to the agent", before)
	if err := s.addMemory(f); err != nil {
		return err
	}
	s.fleet.Pause(slow)
	defer s.fleet.Resume()
	if _, err := s.round(ctx, 0, s.agents); err != nil { // the slow agents still read this push
		return err
	}
	during, err := s.rounds(ctx, s.agents-slow)
	if err != nil {
		return err
	}
	f.addTimes("meanwhile, from the edit to the others", during)
	m, err := s.memory()
	if err != nil {
		return err
	}
	f.add("meanwhile, memory, MiB anonymous", mebibytes(m.anonymous))
	begun, counts := time.Now(), s.fleet.Counts()
	s.fleet.Resume()
	if err := s.quiet(ctx); err != nil {
		return err
	}
	f.add("until they had the latest state, ms", milliseconds(s.fleet.LastPush().Sub(begun)))
	after := s.fleet.Counts().Since(counts)
	f.add("pushes to each of them", float64(after.Pushes)/float64(max(slow, 1)))
	f.add("bytes to each of them", float64(after.Read)/float64(max(slow, 1)))
	return nil
}
