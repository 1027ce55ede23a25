package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// apply installs the rules of the goal with this many attempts, and reports whether that changed
// anything. m is what the kernel had a moment ago.
func (c *Capture) apply(ctx context.Context, m machine, attempts int) (changed bool, err error) {
	defer func() { c.changes = c.changes || changed }()
	cfg := c.goal.Config
	if err := checkMapped(cfg); err != nil {
		return false, err
	}
	chosen, reason, err := m.choose(cfg.Backend)
	if err != nil {
		return false, err
	}
	other := m.side(chosen.backend.other())
	changed, err = c.install(ctx, chosen, reason, attempts)
	if cfg.Backend == Auto && errors.Is(err, errNoTable) && !errors.Is(err, ErrIncomplete) && other.usable() {
		chosen, other = other, chosen
		var err2 error
		changed, err2 = c.install(ctx, chosen, "the kernel has no tables for "+string(other.backend), attempts)
		if err2 != nil {
			err2 = errors.Join(err2, err)
		}
		err = err2
	}
	if err != nil && !errors.Is(err, ErrIncomplete) {
		return changed, err
	}
	removed, otherErr := removeSide(ctx, other, attempts)
	changed = changed || removed
	if changed {
		c.entries.sweep(cfg, c.in, true)
	}
	if otherErr == nil {
		c.cleared(other)
		return changed, err
	}
	otherErr = fmt.Errorf("%w: %w, %s: %w", ErrIncomplete, errElsewhere, other.backend, otherErr)
	return changed, errors.Join(err, otherErr)
}

// install installs the rules in one backend. If that fails and this process had none installed,
// it leaves none; otherwise it keeps what works.
func (c *Capture) install(ctx context.Context, s *side, reason string, attempts int) (changed bool, err error) {
	in := installed{backend: s.backend, reason: reason,
		families: make(map[Family]variant), missing: make(map[Family]error), reduced: make(map[Family]error)}
	for _, f := range families() {
		variants := c.goal.variantsFor(f, s.saved[f])
		p := s.place(f, attempts)
		wanted := len(variants[0].rules.tables(f)) > 0
		var a applied
		var err error
		switch {
		case s.reason[f] != nil:
			if wanted {
				in.missing[f] = s.reason[f]
			}
			continue
		case !wanted:
			a.have, a.changed, err = p.remove(ctx, s.saved[f])
		default:
			p.made = c.place(site{s.backend, f})
			supported, lacks := possible(variants, s.saved[f])
			if a, err = p.apply(ctx, s.saved[f], supported); err == nil {
				in.families[f] = a.variant
				a.reduced = cmp.Or(a.reduced, lacks)
			}
		}
		changed = changed || a.changed
		if err != nil {
			in.missing[f] = err
			continue
		}
		s.saved[f] = a.have
		if a.reduced != nil {
			in.reduced[f] = a.reduced
		}
	}
	err = c.goal.Config.acceptable(in)
	if err != nil && !errors.Is(err, ErrIncomplete) {
		if c.in.backend == "" {
			ctx := context.WithoutCancel(ctx)
			_, removeErr := removeSide(ctx, c.goal.Config.toolbox().inspect(ctx, s.backend), brief)
			err = errors.Join(err, removeErr)
		}
		return changed, err
	}
	if ctx.Err() == nil {
		c.logMissing(in)
	}
	c.in, c.unleased = in, in.unleased()
	return changed, err
}

// place records that rules are written to a site, and returns the tables that this process has made there.
func (c *Capture) place(at site) (made map[string]bool) {
	c.placed[at] = true
	if c.made[at] == nil {
		c.made[at] = make(map[string]bool)
	}
	return c.made[at]
}

// possible returns the variants of the rules of a family that this machine may support, and why not all: it
// leaves a table filter alone that iptables cannot read.
func possible(vs []variant, have saved) (left []variant, lacks error) {
	if t := have[filterTable]; t == nil || !t.unreadable || !vs[0].accepts {
		return vs, nil
	}
	left = slices.DeleteFunc(slices.Clone(vs), func(v variant) bool { return v.accepts })
	return left, fmt.Errorf("%w: table %q %w", errExtension, filterTable, errIncompatible)
}

// acceptable returns an error if no family is installed, a required one is missing, or anything
// is missing that this machine may support.
func (c Config) acceptable(in installed) error {
	var refused, passing []error
	for _, f := range families() {
		if err := in.missing[f]; err != nil {
			err = fmt.Errorf("capturing DNS over %s: %w", f, err)
			switch {
			case len(in.families) == 0 || c.Family(f) == On:
				refused = append(refused, err)
			case !unsupported(in.missing[f]):
				passing = append(passing, err)
			}
		}
		if err := in.reduced[f]; err != nil && !unsupported(err) {
			passing = append(passing, fmt.Errorf("DNS over %s is captured without %s: %w",
				f, strings.Join(in.families[f].without, ", "), err))
		}
	}
	switch {
	case len(refused) > 0:
		return errors.Join(refused...)
	case len(passing) > 0:
		return fmt.Errorf("%w: %w", ErrIncomplete, errors.Join(passing...))
	}
	return nil
}

// logMissing logs changes of what is missing.
func (c *Capture) logMissing(in installed) {
	for _, f := range families() {
		was, is := c.in.families[f], in.families[f]
		switch err, before := in.missing[f], c.in.missing[f]; {
		case err != nil && before == nil:
			c.log.Warn("DNS over one family is not captured", "family", f, "error", err)
		case err == nil && before != nil && len(is.rules.tables(f)) > 0:
			c.log.Info("DNS over a family that was missing is captured now", "family", f)
		}
		switch {
		case slices.Equal(is.without, was.without):
		case len(is.without) > 0:
			c.log.Warn("the capture rules leave out what this machine does not support",
				"family", f, "without", strings.Join(is.without, ", "), "error", in.reduced[f])
		case len(is.rules.tables(f)) > 0:
			c.log.Info("capture rules are complete now", "family", f)
		}
	}
}

// cleared records that nothing of nametap is in the families of a backend that could be read.
func (c *Capture) cleared(s *side) {
	for f := range s.saved {
		delete(c.placed, site{s.backend, f})
	}
}
