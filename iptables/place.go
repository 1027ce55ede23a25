package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/family"
)

// place is where rules are written to: one family in one backend.
type place struct {
	backend  Backend
	family   family.Family
	tools    tools
	attempts int // how often to write, 1 or more
	// ownTables are the tables that this process has made, or has found with nametap's mark. The map is needed because
	// another program may delete the mark. If the map is nil, no table is recorded.
	ownTables map[string]bool
	// spare is a table that is not written; "" for none.
	spare string
}

// Values of place.attempts. One attempt may not be enough, because other programs may change rules between
// reading and writing, and tools may fail for reasons that pass. With the pauses between them, all attempts
// of patient take about 2 s.
const (
	patient = 12
	brief   = 4 // for rules that are tried again after Config.Interval
)

// applied is the result of applying rules to one family.
type applied struct {
	variant  variant // the rules that are installed
	inKernel saved   // the rules in the kernel after that
	changed  bool
	reduced  error // why a better variant is not installed; nil for the best variant
}

// apply installs the first variant that works. original has the rules in the kernel. A variant is written up to
// p.attempts times. If the machine does not support a match, a target or a table of the variant, the next variant is
// tried. After an error that may pass, each further variant is tried once. Any other error ends the attempts. If no
// variant works, nametap's rules are removed, unless the original rules are still in the kernel: a family has all of
// its rules or none.
func (p place) apply(ctx context.Context, original saved, vs []variant) (applied, error) {
	var a applied
	inKernel := original
	for n, v := range vs {
		r, changed, err := p.converge(ctx, inKernel, v.rules.sparing(p.spare))
		inKernel = nil // the kernel may have changed
		a.changed = a.changed || changed
		if err == nil {
			a.variant, a.inKernel = v, r.saved
			return a, nil
		}
		if n == 0 || unsupported(a.reduced) && !unsupported(err) {
			a.reduced = err
		}
		if failsAgain(err) && !isAny(err, errExtension, errNoTable) {
			break
		}
		if !unsupported(err) {
			p.attempts = 1
		}
	}
	return a, errors.Join(a.reduced, p.rollBack(context.WithoutCancel(ctx), original))
}

// converge writes until the kernel has these rules. It records in p.ownTables the tables that have the mark. It
// returns what the kernel has then, and whether it wrote anything.
func (p place) converge(ctx context.Context, inKernel saved, rules Rules) (reading, bool, error) {
	return p.write(ctx, inKernel, func(inKernel saved) string {
		for name, t := range inKernel {
			if p.ownTables != nil && t.hasMark() {
				p.ownTables[name] = true
			}
		}
		return rules.change(p.family, inKernel, p.needsMark)
	})
}

// needsMark reports whether a table is to get the mark of nametap. Only tables of nft get it. A table that does not
// exist yet gets the mark, and needsMark records the table in p.ownTables. A table in p.ownTables gets the mark again
// if the mark is gone and no other program uses the table: then another program has deleted all chains, and the mark
// with them.
func (p place) needsMark(name string, inKernel *savedTable) bool {
	if p.backend != NFT {
		return false
	}
	if inKernel == nil && p.ownTables != nil {
		p.ownTables[name] = true
	}
	return inKernel == nil || p.ownTables[name] && !inKernel.hasMark() && inKernel.foreign() == 0
}

// write calls the function repair with the rules in the kernel, and writes the text that repair returns, until that
// text is empty. inKernel has the rules of a moment ago; if it is nil, write first reads the kernel. write returns
// what the kernel has at the end, and whether it wrote anything.
func (p place) write(ctx context.Context, inKernel saved, repair func(saved) string) (reading, bool, error) {
	var r reading
	var err error
	if inKernel == nil {
		if inKernel, err = p.tools.read(ctx); err != nil {
			return r, false, err
		}
	}
	failure := errors.New("another program changes the rules all the time")
	for n := 0; ; n++ {
		text := repair(inKernel)
		switch {
		case text == "":
			return reading{saved: inKernel}, n > 0, nil
		case n > 0 && n >= p.attempts:
			return r, true, fmt.Errorf("a change of the rules did not take effect: %w", failure)
		}
		generation, known := currentGeneration()
		writeErr := p.tools.write(ctx, text)
		after, stillKnown := currentGeneration()
		if inKernel, err = p.tools.read(ctx); err != nil {
			return r, true, errors.Join(writeErr, err)
		}
		left := repair(inKernel)
		switch {
		case left == "":
			return reading{inKernel, after, stillKnown}, true, nil
		// Writing again would fail again. A lack of support only counts if no other program has changed rules meanwhile,
		// because such a change can cause the same error.
		case failsAgain(writeErr) && (left == text && known && stillKnown && generation == after || !unsupported(writeErr)):
			return r, n > 0 || left != text, writeErr
		case writeErr != nil:
			failure = writeErr
		}
		if !clock.Sleep(ctx, backOff(n)) {
			return r, true, fmt.Errorf("%w; previous error: %v", ctx.Err(), failure) //nolint:errorlint // the end of ctx is what counts
		}
		if inKernel, err = p.tools.read(ctx); err != nil {
			return r, true, err
		}
	}
}

// A reading has the rules that were read from the kernel and, if it is known, the generation of the nft rules at
// that time (see [nftGeneration]).
type reading struct {
	saved
	generation uint32
	known      bool
}

// takeReading reads the rules in the kernel, and their generation.
func (p place) takeReading(ctx context.Context) (r reading, err error) {
	generation, generationErr := nftGeneration()
	inKernel, err := p.tools.read(ctx)
	return reading{inKernel, generation, generationErr == nil}, err
}

// rollBack removes the rules of nametap unless the tables have their original rules.
func (p place) rollBack(ctx context.Context, original saved) error {
	inKernel, err := p.tools.read(ctx)
	if err != nil {
		return err
	}
	for _, name := range tableNames() {
		if !inKernel[name].equal(original[name]) {
			_, _, err := p.remove(ctx, inKernel)
			return err
		}
	}
	return nil
}

// unhook deletes the jumps to the chains of nametap, and keeps the chains. inKernel has the rules that were in the
// kernel a moment ago.
func (p place) unhook(ctx context.Context, inKernel saved) error {
	_, _, err := p.write(ctx, inKernel, unhookText)
	return err
}

// remove removes all rules and chains of nametap. It finds them by the names of the chains, whatever the settings.
// inKernel has the rules that were in the kernel a moment ago. remaining has the rules that are left. It may still
// list tables and marks that remove has just deleted. changed is true if there was anything to remove.
func (p place) remove(ctx context.Context, inKernel saved) (remaining saved, changed bool, err error) {
	r, changed, err := p.converge(ctx, inKernel, Rules{})
	if err != nil || !p.untidy(r.saved) {
		return r.saved, changed, err
	}
	return r.saved, true, p.tidy(ctx, r)
}

// tidy deletes the tables that nametap has made. It deletes all these tables at once or, if that fails, one by one.
// If other programs use such a table, it only removes nametap's mark.
func (p place) tidy(ctx context.Context, r reading) error {
	var err error
	if !r.known {
		if r, err = p.takeReading(ctx); err != nil {
			return err
		}
	}
	var deletable []string
	for _, name := range tableNames() {
		if p.deletable(name, r.saved[name]) {
			deletable = append(deletable, name)
		}
	}
	if len(deletable) > 0 && r.known && deleteNFTTables(p.family, r.generation, deletable...) != nil {
		deletable = nil // another program has changed rules, or uses a table
	}
	for _, name := range tableNames() {
		marked := r.saved[name].hasMark()
		switch {
		case slices.Contains(deletable, name), !marked && !p.deletable(name, r.saved[name]):
			continue
		case p.deleteTable(ctx, name) == nil, !marked:
			continue
		}
		if err := p.tools.write(ctx, unmark(name)); err != nil {
			return err
		}
	}
	clear(p.ownTables)
	return nil
}

// untidy reports whether s may have tables that nametap has made.
func (p place) untidy(s saved) bool {
	return s.hasMark() || slices.ContainsFunc(tableNames(), func(name string) bool { return s[name] != nil && p.ownTables[name] })
}

// deletable reports whether nametap has made the table and no program uses it.
func (p place) deletable(name string, t *savedTable) bool {
	return t != nil && (t.hasMark() || p.ownTables[name]) && t.foreign()+len(t.ownChains())+len(t.jumps()) == 0
}

// deleteTable deletes an nft table. It returns an error if the table has changed since it was read, or if other
// programs use the table.
func (p place) deleteTable(ctx context.Context, name string) error {
	r, err := p.takeReading(ctx)
	switch {
	case err != nil:
		return err
	case !r.known || !p.deletable(name, r.saved[name]):
		return fmt.Errorf("other programs use table %s, or the generation of its rules is not known", name)
	}
	return deleteNFTTables(p.family, r.generation, name)
}
