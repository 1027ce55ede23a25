package main

import (
	"context"
	"fmt"
	"net/netip"
)

// A server is a running peer. It runs twice, because a Go program adapts to the number of
// processors at its start.
type server struct {
	peer

	version string
	// pinned is bound to serverCore, free is not bound.
	pinned, free instance
}

// An instance is one process of a server.
type instance struct {
	*process

	addr netip.AddrPort
	// status is the address of its metrics, or the zero value.
	status netip.AddrPort
}

// startServer starts p and checks its answers, because the figures of a server with wrong
// answers would be meaningless.
func (l *lab) startServer(ctx context.Context, p peer) (*server, error) {
	s := &server{peer: p}
	var err error
	if s.pinned, err = l.startInstance(ctx, s, serverCore); err != nil {
		return nil, err
	}
	if s.free, err = l.startInstance(ctx, s, ""); err != nil {
		return nil, err
	}
	return s, nil
}

// startInstance starts one process of s, waits for it and checks it.
func (l *lab) startInstance(ctx context.Context, s *server, core string) (instance, error) {
	addr, err := freeAddr(ctx)
	if err != nil {
		return instance{}, err
	}
	how, err := s.prepare(ctx, l, addr)
	if err != nil {
		return instance{}, err
	}
	s.version = how.version
	p, err := l.start(ctx, command{name: s.name, argv: how.argv, core: core})
	if err != nil {
		return instance{}, err
	}
	direct, asks := mixes()[0], checker{network: "udp", addr: addr, fixed: s.fixed}
	ready := how.ready
	if ready == nil {
		ready = func(ctx context.Context) error { return asks.ask(ctx, direct, l.services[0]) }
	}
	if s.echo {
		ready = func(ctx context.Context) error {
			return asks.ask(ctx, mix{question: direct.question, check: anything}, l.services[0])
		}
	}
	if err := p.await(ctx, startLimit, ready); err != nil {
		return instance{}, err
	}
	return instance{process: p, addr: addr}, l.checkInstance(ctx, s, addr)
}

// checkInstance checks samples of the measured answers.
func (l *lab) checkInstance(ctx context.Context, s *server, addr netip.AddrPort) error {
	for _, network := range []string{"udp", "tcp"} {
		asks := checker{network: network, addr: addr, fixed: s.fixed}
		for _, m := range mixes() {
			switch {
			case s.echo, network == "tcp" && !s.tcp:
				continue // not measured
			case m.name != directMix && s.name != agentName:
				continue
			}
			hosts := l.services
			if m.wildcards {
				hosts = l.wildcards
			}
			if err := asks.check(ctx, m, hosts); err != nil {
				return fmt.Errorf("%s answers wrongly: %w", s.name, err)
			}
		}
	}
	return nil
}
