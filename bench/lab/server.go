package lab

import (
	"context"
	"fmt"
	"net/netip"
)

// A Server is a running peer. It runs twice, because a Go program adapts to the number of
// processors at its start.
type Server struct {
	Peer

	Version string
	// Pinned is bound to ServerCore, Free is not bound.
	Pinned, Free Instance
}

// An Instance is one process of a server.
type Instance struct {
	*Process

	Addr netip.AddrPort
}

// StartServer starts p and checks its answers, because the figures of a server with wrong
// answers would be meaningless.
func (l *Lab) StartServer(ctx context.Context, p Peer) (*Server, error) {
	s := &Server{Peer: p}
	var err error
	if s.Pinned, err = l.startInstance(ctx, s, ServerCore); err != nil {
		return nil, err
	}
	if s.Free, err = l.startInstance(ctx, s, ""); err != nil {
		return nil, err
	}
	return s, nil
}

// startInstance starts one process of s, waits for it and checks it.
func (l *Lab) startInstance(ctx context.Context, s *Server, core string) (Instance, error) {
	addr, err := FreeAddr(ctx)
	if err != nil {
		return Instance{}, err
	}
	how, err := s.Prepare(ctx, l, addr)
	if err != nil {
		return Instance{}, err
	}
	s.Version = how.version
	p, err := l.Start(ctx, Command{Name: s.Name, Argv: how.Argv, Core: core})
	if err != nil {
		return Instance{}, err
	}
	direct, asks := Mixes()[0], Checker{Network: "udp", Addr: addr, fixed: s.fixed}
	ready := how.Ready
	if ready == nil {
		ready = func(ctx context.Context) error { return asks.Ask(ctx, direct, l.Services[0]) }
	}
	if s.Echo {
		ready = func(ctx context.Context) error {
			return asks.Ask(ctx, Mix{question: direct.question, check: anything}, l.Services[0])
		}
	}
	if err := p.Await(ctx, StartLimit, ready); err != nil {
		return Instance{}, err
	}
	return Instance{Process: p, Addr: addr}, l.checkInstance(ctx, s, addr)
}

// checkInstance checks samples of the measured answers.
func (l *Lab) checkInstance(ctx context.Context, s *Server, addr netip.AddrPort) error {
	for _, network := range []string{"udp", "tcp"} {
		asks := Checker{Network: network, Addr: addr, fixed: s.fixed}
		for _, m := range Mixes() {
			switch {
			case s.Echo, network == "tcp" && !s.TCP:
				continue // not measured
			case m.Name != DirectMix && s.Name != AgentName:
				continue
			}
			hosts := l.Services
			if m.wildcards {
				hosts = l.Wildcards
			}
			if err := asks.Check(ctx, m, hosts); err != nil {
				return fmt.Errorf("%s answers wrongly: %w", s.Name, err)
			}
		}
	}
	return nil
}
