package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/nametap/nametap/bench/agents/cluster"
	"github.com/nametap/nametap/bench/agents/fleet"
	"github.com/nametap/nametap/bench/lab"
	"github.com/nametap/nametap/internal/clock"
)

// A source has the objects of a control plane.
type source interface {
	// Change changes a host, and returns the time of the change. For a real API server, that is the time of its answer.
	Change(i int) (time.Time, error)
	// Len returns the number of hosts that can be changed.
	Len() int
}

// A stage is a control plane and the agents that are connected to it.
type stage struct {
	*bench

	name    string
	mode    fleet.Mode
	servers []*server
	fleet   *fleet.Fleet
	source  source
	empty   memory // of all servers, without agents
}

// stage starts a number of replicas, and connects the agents.
func (b *bench) stage(ctx context.Context, replicas int) (*stage, error) {
	s := &stage{bench: b, name: "nametap-discovery", mode: b.mode, source: b.cluster}
	if replicas > 1 {
		s.name = fmt.Sprintf("%d replicas", replicas)
	}
	b.progressf("starting %d nametap-discovery with %d hosts", replicas, b.hosts)
	for range replicas {
		one, err := newServer(ctx)
		if err != nil {
			return nil, err
		}
		s.servers = append(s.servers, one)
		if err := b.start(ctx, one); err != nil {
			return nil, err
		}
	}
	return s, s.connect(ctx)
}

// targetStage connects the agents to a control plane that runs already.
func (b *bench) targetStage(ctx context.Context, t target) (*stage, error) {
	remote, err := newRemote(ctx, b.api, b.token)
	if err != nil {
		return nil, err
	}
	b.cluster = cluster.New(1, b.namespaces) // for the names of namespaces
	s := &stage{bench: b, name: t.name, mode: t.mode, source: remote, servers: []*server{{addr: t.addr, pid: t.pid}}}
	return s, s.connect(ctx)
}

// connect connects the agents, and reports what that takes.
func (s *stage) connect(ctx context.Context) error {
	var err error
	if s.empty, err = s.memory(); err != nil {
		return err
	}
	alone, err := s.edits(ctx, s.repeats)
	if err != nil {
		return err
	}
	s.progressf("connecting %d agents in mode %q to %s", s.agents, s.mode, s.name)
	used, err := s.processor()
	if err != nil {
		return err
	}
	s.fleet = fleet.New(s.config())
	begun := time.Now()
	if err := s.fleet.Start(ctx); err != nil {
		return errors.Join(err, s.alive())
	}
	took := time.Since(begun)
	after, err := s.processor()
	if err != nil {
		return err
	}
	counts, n := s.fleet.Counts(), float64(s.agents)
	f := s.figures("connecting")
	f.add("processor time of an edit without agents, ms", milliseconds(alone))
	f.add("memory without agents, MiB anonymous", mebibytes(s.empty.anonymous))
	f.add("time until all are connected, s", took.Seconds())
	f.add("processor time per agent, µs", lab.Microseconds(after-used)/n)
	f.add("bytes received per agent", float64(counts.Read)/n)
	f.add("streams without a table", float64(counts.Failures))
	return s.addMemory(f)
}

// edits makes edits without agents, and returns the processor time that each takes.
func (s *stage) edits(ctx context.Context, n int) (time.Duration, error) {
	const pause = 150 * time.Millisecond // longer than control planes collect changes
	used, err := s.processor()
	if err != nil {
		return 0, err
	}
	for i := range n {
		if _, err := s.source.Change(i % s.source.Len()); err != nil {
			return 0, err
		}
		if err := sleep(ctx, pause); err != nil {
			return 0, err
		}
	}
	after, err := s.processor()
	return (after - used) / time.Duration(n), err
}

// config returns the Config of the agents.
func (s *stage) config() fleet.Config {
	c := fleet.Config{
		Agents: s.agents, Full: min(s.full, s.agents), Mode: s.mode, Variant: s.variant, Namespaces: s.cluster.Namespaces(), Estimate: s.estimate,
	}
	if len(s.targets) == 0 {
		c.Edited = s.cluster.Edited
	}
	if s.certificates != nil {
		c.TLS = s.certificates.configs
	}
	for _, one := range s.servers {
		c.Servers = append(c.Servers, one.addr)
	}
	return c
}

// experiment runs an experiment, and verifies the tables of the agents after it.
func (s *stage) experiment(ctx context.Context, name string) error {
	s.progressf("%s: %s", s.name, name)
	f := s.figures(name)
	var err error
	switch name {
	case "push":
		err = s.push(ctx, f)
	case "churn":
		err = s.churning(ctx, f)
	case "reconnect":
		err = s.reconnect(ctx, f)
	case "slow":
		err = s.slowReaders(ctx, f)
	case "list":
		err = s.list(ctx, f)
	case "replicas":
		err = s.rolling(ctx, f, rollingRate)
	case "day":
		err = s.rolling(ctx, f, s.rate)
	case ofAgent:
		err = s.realAgent(ctx, f)
	}
	return errors.Join(err, s.verify(ctx, f))
}

// stop ends the agents and the servers.
func (s *stage) stop() {
	if s.fleet != nil {
		s.fleet.Stop()
	}
	for _, one := range s.servers {
		if one.process != nil {
			s.end(one)
		}
	}
}

// alive returns an error, with the end of the server's log, if a server has ended.
func (s *stage) alive() error {
	var errs []error
	for _, one := range s.servers {
		if one.process != nil {
			errs = append(errs, one.process.Alive())
		}
	}
	return errors.Join(errs...)
}

// processor returns the processor time of all servers.
func (s *stage) processor() (sum time.Duration, err error) {
	for _, one := range s.servers {
		used, err := one.processor()
		if err != nil {
			return 0, err
		}
		sum += used
	}
	return sum, nil
}

// memory returns the memory of all servers.
func (s *stage) memory() (sum memory, err error) {
	for _, one := range s.servers {
		m, err := one.memory()
		if err != nil {
			return sum, err
		}
		sum.resident += m.resident
		sum.anonymous += m.anonymous
	}
	return sum, nil
}

// addMemory adds figures of the memory of all servers.
func (s *stage) addMemory(f *figures) error {
	m, err := s.memory()
	f.add("memory, MiB resident", mebibytes(m.resident))
	f.add("memory, MiB anonymous", mebibytes(m.anonymous))
	f.add("memory per agent, KiB anonymous", float64(m.anonymous-s.empty.anonymous)/1024/float64(s.agents))
	return err
}

// ownProcessor returns the processor time of this process.
func ownProcessor() (time.Duration, error) { return lab.ProcessorClock(lab.ClockOf(os.Getpid())) }

// sleep waits for the time d. It returns early, with an error, if ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	if !clock.Sleep(ctx, d) {
		return fmt.Errorf("waiting: %w", ctx.Err())
	}
	return nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func mebibytes(n int) float64 { return float64(n) / (1 << 20) }
