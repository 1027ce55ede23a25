package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// writeAttempts is how often we write again when another program changes the
// rules between our reading and our writing.
const writeAttempts = 3

// variant is what a configuration becomes where something is missing.
type variant struct {
	rules   Rules
	without []string // what it lacks, in words for a log; nothing if all is there
	zone    uint16
}

// variants returns the rules for a configuration, best first: as configured,
// without the conntrack zone, without comments, without either.
func variants(cfg Config) ([]variant, error) {
	const zone, comments = "conntrack zone (target CT)", "comments (match comment)"
	noZone, noComments, bare := cfg, cfg, cfg
	noZone.Zone, bare.Zone = 0, 0
	noComments.NoComments, bare.NoComments = true, true
	var vs []variant
	for _, v := range []struct {
		cfg     Config
		without []string
	}{{cfg, nil}, {noZone, []string{zone}}, {noComments, []string{comments}}, {bare, []string{zone, comments}}} {
		rules, err := Build(v.cfg)
		if err != nil {
			return nil, err
		}
		lacksZone, lacksComments := slices.Contains(v.without, zone), slices.Contains(v.without, comments)
		if lacksZone && cfg.Zone == 0 || lacksComments && cfg.NoComments {
			continue // it was not asked for
		}
		vs = append(vs, variant{rules: rules, without: v.without, zone: v.cfg.Zone})
	}
	return vs, nil
}

// place is where rules go: one family in one backend.
type place struct {
	backend Backend
	family  Family
	tools   tools
}

// apply puts the first variant in that kernel and tools take, and says whether
// that changed anything. before is what is there. If none is taken, what was there is
// taken out, unless it was not touched: all rules or none.
func (p place) apply(ctx context.Context, before saved, vs []variant) (variant, bool, error) {
	var first error
	have := before
	for _, v := range vs {
		changed, err := p.converge(ctx, have, v.rules)
		have = nil // it may have changed
		if err == nil {
			return v, changed, nil
		}
		if first == nil {
			first = err
		}
		if !lacking(err) {
			break
		}
	}
	return variant{}, false, errors.Join(first, p.rollBack(context.WithoutCancel(ctx), before))
}

// lacking says whether an error may mean that something is missing which other
// rules do without.
func lacking(err error) bool {
	for _, other := range []error{errTool, errLocked, errPermission, context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, other) {
			return false
		}
	}
	return true
}

// converge writes until the kernel has these rules, and says whether it had to.
func (p place) converge(ctx context.Context, have saved, rules Rules) (bool, error) {
	return p.write(ctx, have, func(have saved) string { return rules.change(p.family, have, p.backend == NFT) })
}

// write writes what change makes of what there is, until that is nothing. have is what
// there was a moment ago; nil, if it is to be read.
func (p place) write(ctx context.Context, have saved, change func(saved) string) (bool, error) {
	for n := 0; ; n++ {
		if have == nil || n > 0 {
			var err error
			if have, err = p.tools.read(ctx); err != nil {
				return n > 0, err
			}
		}
		text := change(have)
		if text == "" {
			return n > 0, nil
		}
		if n == writeAttempts {
			return true, fmt.Errorf("capture rules were written %d times, and this would still be to write: %q", n, text)
		}
		if err := p.tools.write(ctx, text); err != nil {
			// Only a text that was made of rules which have changed since is
			// worth another try.
			have, readErr := p.tools.read(ctx)
			if !lacking(err) || readErr != nil || change(have) == text {
				return n > 0, err
			}
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
	_, err := p.write(ctx, nil, unhook)
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
