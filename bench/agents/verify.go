package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/nametap/nametap/api/digest"

	"github.com/nametap/nametap/bench/agents/fleet"
)

// verifyLimit is how long tables may differ after the last push.
const verifyLimit = 30 * time.Second

// verify compares the checksums of the agents' tables with the checksum of each server's table. To get that table, it
// connects another agent, which has no table, to the server. In other modes than Hosts, only agents that keep their
// tables are compared, and a difference is no error: the order of addresses in an entry may differ.
func (s *stage) verify(ctx context.Context, f *figures) error {
	limit := time.Now().Add(verifyLimit)
	for {
		sums, err := s.probe(ctx)
		if err != nil {
			return err
		}
		all := s.fleet.Sums()
		equal, others := all[sums[0]], len(all)
		if equal > 0 {
			others--
		}
		wrong := s.fleet.Counts().Rejected
		same := len(slices.Compact(slices.Clone(sums))) == 1
		whole := equal == s.agents && same
		if !whole && s.mode == fleet.Hosts && time.Now().Before(limit) {
			if err := sleep(ctx, time.Second); err != nil {
				return err
			}
			continue
		}
		f.add("agents with the checksum of the server", float64(equal))
		f.add("other checksums of agents", float64(others))
		f.add("changes with a wrong checksum, so far", float64(wrong))
		if s.mode == fleet.Hosts && (!whole || wrong > 0) {
			return fmt.Errorf("%d of %d agents have the checksum of the server, %d changes had a wrong one; servers: %v; agents: %v; %v",
				equal, s.agents, wrong, sums, all, s.fleet.Census().Problems)
		}
		return nil
	}
}

// probe returns the checksum of the whole table that each server sends.
func (s *stage) probe(ctx context.Context) ([]digest.Sum, error) {
	var sums []digest.Sum
	for _, one := range s.servers {
		cfg := s.config()
		cfg.Agents, cfg.Full, cfg.Cold, cfg.Servers = 1, 1, true, []string{one.addr}
		probe := fleet.New(cfg)
		err := probe.Start(ctx)
		all := slices.Collect(maps.Keys(probe.Sums()))
		probe.Stop()
		if err == nil && len(all) != 1 {
			err = errors.New("no table")
		}
		if err != nil {
			return nil, fmt.Errorf("reading the table of a server: %w", err)
		}
		sums = append(sums, all...)
	}
	return sums, nil
}
