package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/nametap/nametap/bench/lab"
)

// experiments are the chosen experiments on forwarding and capture in one run, inside the namespaces.
type experiments struct {
	options

	lab      *lab.Lab
	results  *results
	progress io.Writer
}

// experiment runs all chosen experiments.
func experiment(ctx context.Context, o options, r *results) (err error) {
	if err := requirements(&o); err != nil {
		return err
	}
	if o.capture {
		if err := lab.InOwnNamespace(); err != nil {
			return fmt.Errorf("-capture: %w", err)
		}
	}
	if err := lab.Furnish(o.inside); err != nil {
		return err
	}
	l, err := lab.NewLab(o.hosts, o.agent, o.inside)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
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

// twoNameservers starts two nameservers for forwarders, until stop is called.
func (e *experiments) twoNameservers() (first, second *lab.Upstream, stop func(), err error) {
	first, err = lab.StartUpstream(lab.Port53(lab.FirstServer()))
	if err != nil {
		return nil, nil, nil, err
	}
	second, err = lab.StartUpstream(lab.Port53(lab.SecondServer()))
	if err != nil {
		first.Close()
		return nil, nil, nil, err
	}
	stop = func() {
		second.Close()
		first.Close()
	}
	if err := e.lab.UseNameservers(lab.FirstServer(), lab.SecondServer()); err != nil {
		stop()
		return nil, nil, nil, err
	}
	return first, second, stop, nil
}
