package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"github.com/miekg/dns"
)

// An experiments is one run of the chosen experiments on forwarding and capture, inside the
// namespaces.
type experiments struct {
	options

	lab      *lab
	results  *results
	progress io.Writer
}

// experiment runs all chosen experiments.
func experiment(ctx context.Context, o options, r *results) (err error) {
	if err := requirements(&o); err != nil {
		return err
	}
	if o.capture {
		if err := inOwnNamespace(); err != nil {
			return fmt.Errorf("-capture: %w", err)
		}
	}
	if err := furnish(o.inside); err != nil {
		return err
	}
	l, err := newLab(o.hosts, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	e := &experiments{options: o, lab: l, results: r, progress: os.Stderr}
	for _, one := range []struct {
		wanted bool
		run    func(context.Context) error
	}{
		{o.forward, e.forwardCosts},
		{o.faults, e.faultLatencies},
		{o.flood, e.floods},
		{o.replay, e.replays},
		{o.getaddrinfo, e.getaddrinfoQueries},
		{o.capture, e.captureCosts},
	} {
		if !one.wanted {
			continue
		}
		if err := one.run(ctx); err != nil {
			return err
		}
	}
	return nil
}

// The nameservers of the experiments, on their standard port.
func firstServer() netip.Addr  { return address(127, 2) }
func secondServer() netip.Addr { return address(127, 3) }

// port53 returns the address of a nameserver of resolv.conf.
func port53(ip netip.Addr) netip.AddrPort { return netip.AddrPortFrom(ip, 53) }

// Names in queries of experiments. Every name below externalDomain exists; queries for
// probeName check whether a server is ready.
const (
	externalDomain = "example.org."
	probeName      = "probe." + externalDomain
)

// startForwarder starts a server that forwards to the lab's nameservers, and waits until it
// answers.
func (l *lab) startForwarder(ctx context.Context, p peer, core string) (instance, string, error) {
	addr, err := freeAddr(ctx)
	if err != nil {
		return instance{}, "", err
	}
	how, err := p.prepare(ctx, l, addr)
	if err != nil {
		return instance{}, "", err
	}
	started, err := l.start(ctx, command{name: p.name, argv: how.argv, core: core})
	if err != nil {
		return instance{}, "", err
	}
	i := instance{process: started, addr: addr, status: how.status}
	own, _ := mixes()[0].question(l.services[0])
	err = started.await(ctx, startLimit, func(ctx context.Context) error {
		if how.ready != nil {
			if err := how.ready(ctx); err != nil {
				return err
			}
		}
		return errors.Join(resolves(ctx, addr, dns.Fqdn(own)), resolves(ctx, addr, probeName))
	})
	return i, how.version, err
}

// resolves returns an error unless a name has an address.
func resolves(ctx context.Context, addr netip.AddrPort, name string) error {
	a := ask(ctx, addr, new(dns.Msg).SetQuestion(name, dns.TypeA), time.Second)
	if a.failed() {
		return fmt.Errorf("asking for %s: %s", name, a.outcome())
	}
	return nil
}

// compared are the servers of most experiments: nametap and Istio's agent, which it
// replaces.
func compared() []peer {
	all := forwarders()
	return all[:2]
}
