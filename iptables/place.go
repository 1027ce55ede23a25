package iptables

import (
	"context"
	"errors"
	"fmt"
)

// place is where rules go: one family in one backend.
type place struct {
	backend  Backend
	family   Family
	tools    tools
	attempts int // to write, 1 or more
}

// How often rules are written until the kernel has them. Other programs change rules
// between reading and writing, and tools fail for reasons that pass. With the pauses
// between them, patient takes about 2 s.
const (
	patient = 12
	brief   = 4 // in Run, which tries again after the interval
)

// applied is what came of applying rules to one family.
type applied struct {
	variant variant // what is in
	changed bool
	lesser  error // why no better variant is in; nil for the best one
}

// apply puts in the first variant that can be had. before is what is there. Where an
// error does not say that the machine lacks something, the best variant is tried
// p.attempts times and the others once. If none can be had, what was there is taken out,
// unless it was not touched: all rules or none.
func (p place) apply(ctx context.Context, before saved, vs []variant) (applied, error) {
	var a applied
	have := before
	for n, v := range vs {
		changed, err := p.converge(ctx, have, v.rules)
		have = nil // it may have changed
		a.changed = a.changed || changed
		if err == nil {
			a.variant = v
			return a, nil
		}
		if n == 0 || lacks(a.lesser) && !lacks(err) {
			a.lesser = err
		}
		if lasts(err) && !is(err, errExtension, errNoTable) {
			break
		}
		if !lacks(err) {
			p.attempts = 1
		}
	}
	return a, errors.Join(a.lesser, p.rollBack(context.WithoutCancel(ctx), before))
}

// converge writes until the kernel has these rules, and says whether it had to.
func (p place) converge(ctx context.Context, have saved, rules Rules) (bool, error) {
	return p.write(ctx, have, func(have saved) string { return rules.change(p.family, have, p.backend == NFT) })
}

// write writes what change makes of what there is, until that is nothing. have is what
// there was a moment ago; nil, if it is to be read.
func (p place) write(ctx context.Context, have saved, change func(saved) string) (bool, error) {
	var err error
	if have == nil {
		if have, err = p.tools.read(ctx); err != nil {
			return false, err
		}
	}
	failure := errors.New("another program changes the rules all the time")
	for n := 0; ; n++ {
		text := change(have)
		switch {
		case text == "":
			return n > 0, nil
		case n > 0 && n >= p.attempts:
			return true, fmt.Errorf("the kernel does not have the capture rules as they were written, %q is missing: %w", text, failure)
		}
		generation, known := generationNow()
		writeErr := p.tools.write(ctx, text)
		after, stillKnown := generationNow()
		if have, err = p.tools.read(ctx); err != nil {
			return true, errors.Join(writeErr, err)
		}
		left := change(have)
		switch {
		case left == "":
			return true, nil
		// What fails while another program changes rules proves no lack.
		case lasts(writeErr) && (left == text && known && stillKnown && generation == after || !lacks(writeErr)):
			return n > 0 || left != text, writeErr
		case writeErr != nil:
			failure = writeErr
		}
		if !pause(ctx, n) {
			return true, fmt.Errorf("%w; before that: %v", ctx.Err(), failure) //nolint:errorlint // the end of ctx is what counts
		}
		if have, err = p.tools.read(ctx); err != nil {
			return true, err
		}
	}
}

// rollBack takes our rules out if they are not what they were before.
func (p place) rollBack(ctx context.Context, before saved) error {
	now, err := p.tools.read(ctx)
	if err != nil {
		return err
	}
	for _, name := range tableNames() {
		if !now[name].equal(before[name]) {
			_, err := p.remove(ctx)
			return err
		}
	}
	return nil
}

// unhook takes out the jumps to our chains, and leaves these where they are.
func (p place) unhook(ctx context.Context) error {
	_, err := p.write(ctx, nil, unhookText)
	return err
}

// remove takes out all that is ours, and says whether there was anything. It
// goes by names, not by rules or settings.
func (p place) remove(ctx context.Context) (bool, error) {
	changed, err := p.converge(ctx, nil, Rules{})
	if err != nil {
		return changed, err
	}
	tidied, err := p.tidy(ctx)
	return changed || tidied, err
}

// tidy deletes the tables that we made, or takes our mark out of those that
// others use by now. It says whether there were any.
func (p place) tidy(ctx context.Context) (bool, error) {
	have, err := p.tools.read(ctx)
	if err != nil {
		return false, err
	}
	tidied := false
	for _, name := range tableNames() {
		if !have[name].made() {
			continue
		}
		tidied = true
		if p.deleteTable(ctx, name) == nil {
			continue
		}
		if err := p.tools.write(ctx, unmark(name)); err != nil {
			return tidied, err
		}
	}
	return tidied, nil
}

// deleteTable deletes an nft table if it is still as it was read, or says why not.
func (p place) deleteTable(ctx context.Context, name string) error {
	generation, err := nftGeneration()
	if err != nil {
		return err
	}
	have, err := p.tools.read(ctx)
	if err != nil {
		return err
	}
	if !have[name].deletable() {
		return fmt.Errorf("table %s is in use by others", name)
	}
	return deleteNFTTable(p.family, name, generation)
}
