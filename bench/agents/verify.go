package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/nametap/nametap/bench/agents/fleet"
)

// verifyLimit is how long tables may differ after the last push.
const verifyLimit = 30 * time.Second

// verify compares the digests of the agents' tables with the digest of each server's table. To get that table, it
// connects another agent, which has no table, to the server. In other modes than Named, only agents that keep their
// tables are compared, and a difference is no error: the order of addresses in an entry may differ.
func (s *stage) verify(ctx context.Context, f *figures) error {
	limit := time.Now().Add(verifyLimit)
	for {
		digests, err := s.probe(ctx)
		if err != nil {
			return err
		}
		all := s.fleet.Digests()
		equal, others := all[digests[0]], len(all)
		if equal > 0 {
			others--
		}
		wrong := s.fleet.Counts().Rejected
		same := len(slices.Compact(slices.Clone(digests))) == 1
		whole := equal == s.agents && same
		if !whole && s.mode == fleet.Named && time.Now().Before(limit) {
			if err := sleep(ctx, time.Second); err != nil {
				return err
			}
			continue
		}
		f.add("agents with the digest of the server", float64(equal))
		f.add("other digests of agents", float64(others))
		f.add("pushes with a wrong version, so far", float64(wrong))
		if s.mode == fleet.Named && (!whole || wrong > 0) {
			return fmt.Errorf("%d of %d agents have the digest of the server, %d pushes had a wrong version; servers: %v; agents: %v; %v",
				equal, s.agents, wrong, digests, all, s.fleet.Census().Problems)
		}
		return nil
	}
}

// probe returns the digest of the whole table that each server sends.
func (s *stage) probe(ctx context.Context) ([]string, error) {
	var digests []string
	for _, one := range s.servers {
		cfg := s.config()
		cfg.Agents, cfg.Full, cfg.Cold, cfg.Servers = 1, 1, true, []string{one.addr}
		probe := fleet.New(cfg)
		err := probe.Start(ctx)
		all := slices.Collect(maps.Keys(probe.Digests()))
		probe.Stop()
		if err == nil && len(all) != 1 {
			err = errors.New("no table")
		}
		if err != nil {
			return nil, fmt.Errorf("reading the table of a server: %w", err)
		}
		digests = append(digests, all...)
	}
	return digests, nil
}
