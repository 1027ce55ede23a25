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
