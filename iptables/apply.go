package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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
// that changed anything. If none is taken, what was there is taken out, unless
// it was not touched: all rules or none.
func (p place) apply(ctx context.Context, vs []variant) (variant, bool, error) {
	before, err := p.tools.read(ctx)
	if err != nil {
		return variant{}, false, err
	}
	var first error
	for _, v := range vs {
		changed, err := p.converge(ctx, v.rules)
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
func (p place) converge(ctx context.Context, rules Rules) (bool, error) {
	var last string
	for n := 0; ; n++ {
		have, err := p.tools.read(ctx)
		if err != nil {
			return n > 0, err
		}
		text := rules.change(p.family, have, p.backend == NFT)
		if text == "" {
			return n > 0, nil
		}
		if n == writeAttempts {
			return true, fmt.Errorf("capture rules were written %d times, and still: %s",
				n, strings.Join(rules.drift(p.family, have), "; "))
		}
		if err := p.tools.write(ctx, text); err != nil {
			// Only a text that was made from rules which have changed since is
			// worth another try.
			if text == last || !lacking(err) || p.unchanged(ctx, rules, text) {
				return n > 0, err
			}
		}
		last = text
	}
}

// unchanged says whether the same text would be written again.
func (p place) unchanged(ctx context.Context, rules Rules, text string) bool {
	have, err := p.tools.read(ctx)
	return err != nil || rules.change(p.family, have, p.backend == NFT) == text
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

// remove takes out all that is ours, and says whether there was anything.
func (p place) remove(ctx context.Context) (bool, error) {
	changed := false
	for _, name := range tableNames() {
		for n := 0; ; n++ {
			have, err := p.tools.read(ctx)
			if err != nil {
				return changed, err
			}
			text := removal(name, have[name])
			if text == "" {
				break
			}
			changed = true
			if have[name].deletable() && p.deleteTable(ctx, name) == nil {
				break
			}
			if err := p.tools.write(ctx, text); err != nil && (n == writeAttempts || !lacking(err)) {
				return changed, fmt.Errorf("removing capture rules from table %s: %w", name, err)
			}
		}
	}
	return changed, nil
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
