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
	// made has the tables that this process has made, or has found with nametap's mark. It is needed because another
	// program may delete the mark. If made is nil, no table is recorded.
	made map[string]bool
	// spare is a table that is not written; "" for none.
	spare string
}

// How often rules are written until the kernel has them: other programs may change rules between reading and
// writing, and tools may fail for reasons that pass. With the pauses in between, patient takes about 2 s.
const (
	patient = 12
	brief   = 4 // for rules that are tried again after Config.Interval
)

// applied is the result of applying rules to one family.
type applied struct {
	variant variant // the rules that are installed
	have    saved   // what the kernel has now
	changed bool
	reduced error // why a better variant is not installed; nil for the best variant
}

// apply installs the first variant that works. before is what the kernel has. A variant is written up to p.attempts
// times. If the machine does not support a match, a target or a table of the variant, the next variant is tried.
// After an error that may pass, each further variant is tried once. Any other error ends the attempts. If no
// variant works, nametap's rules are removed, unless the kernel still has what it had before: a family has all of
// its rules or none.
func (p place) apply(ctx context.Context, before saved, vs []variant) (applied, error) {
	var a applied
	have := before
	for n, v := range vs {
		now, changed, err := p.converge(ctx, have, v.rules.sparing(p.spare))
		have = nil // the kernel may have changed
		a.changed = a.changed || changed
		if err == nil {
			a.variant, a.have = v, now.saved
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
	return a, errors.Join(a.reduced, p.rollBack(context.WithoutCancel(ctx), before))
}

// converge writes until the kernel has these rules. It records in p.made the tables that have the mark. It returns
// what the kernel has then, and whether it wrote anything.
func (p place) converge(ctx context.Context, have saved, rules Rules) (reading, bool, error) {
	return p.write(ctx, have, func(have saved) string {
		for name, t := range have {
			if p.made != nil && t.hasMark() {
				p.made[name] = true
			}
		}
		return rules.change(p.family, have, p.marks)
	})
}

// marks reports whether a table is to get the mark of nametap. Only tables of nft get it. A table that does not
// exist yet gets the mark, and marks records the table in p.made. A table in p.made gets the mark again if the mark
// is gone and no other program uses the table: then another program has deleted all chains, and the mark with them.
func (p place) marks(name string, have *savedTable) bool {
	if p.backend != NFT {
		return false
	}
	if have == nil && p.made != nil {
		p.made[name] = true
	}
	return have == nil || p.made[name] && !have.hasMark() && have.foreign() == 0
}

// write calls the function repair with what the kernel has, and writes the text that repair returns, until that text
// is empty. have is what the kernel had a moment ago. If have is nil, write first reads the kernel. write returns
// what the kernel has at the end, and whether it wrote anything.
func (p place) write(ctx context.Context, have saved, repair func(saved) string) (reading, bool, error) {
	var now reading
	var err error
	if have == nil {
		if have, err = p.tools.read(ctx); err != nil {
			return now, false, err
		}
	}
	failure := errors.New("another program changes the rules all the time")
	for n := 0; ; n++ {
		text := repair(have)
		switch {
		case text == "":
			return reading{saved: have}, n > 0, nil
		case n > 0 && n >= p.attempts:
			return now, true, fmt.Errorf("a change of the rules did not take effect: %w", failure)
		}
		generation, known := generationNow()
		writeErr := p.tools.write(ctx, text)
		after, stillKnown := generationNow()
		if have, err = p.tools.read(ctx); err != nil {
			return now, true, errors.Join(writeErr, err)
		}
		left := repair(have)
		switch {
		case left == "":
			return reading{have, after, stillKnown}, true, nil
		// Writing again would fail again. A lack of support only counts if no other program has changed rules meanwhile,
		// because such a change can cause the same error.
		case failsAgain(writeErr) && (left == text && known && stillKnown && generation == after || !unsupported(writeErr)):
			return now, n > 0 || left != text, writeErr
		case writeErr != nil:
			failure = writeErr
		}
		if !clock.Sleep(ctx, backOff(n)) {
			return now, true, fmt.Errorf("%w; previous error: %v", ctx.Err(), failure) //nolint:errorlint // the end of ctx is what counts
		}
		if have, err = p.tools.read(ctx); err != nil {
			return now, true, err
		}
	}
}

// A reading is what the kernel had at a generation of its nft rules, if the generation is known.
type reading struct {
	saved
	generation uint32
	known      bool
}

// readNow reads what the kernel has, and its generation.
func (p place) readNow(ctx context.Context) (now reading, err error) {
	generation, generationErr := nftGeneration()
	have, err := p.tools.read(ctx)
	return reading{have, generation, generationErr == nil}, err
}

// rollBack removes the rules of nametap unless the tables are as they were before.
func (p place) rollBack(ctx context.Context, before saved) error {
	now, err := p.tools.read(ctx)
	if err != nil {
		return err
	}
	for _, name := range tableNames() {
		if !now[name].equal(before[name]) {
			_, _, err := p.remove(ctx, now)
			return err
		}
	}
	return nil
}

// unhook deletes the jumps to the chains of nametap, and keeps the chains. have is what the kernel
// had a moment ago.
func (p place) unhook(ctx context.Context, have saved) error {
	_, _, err := p.write(ctx, have, unhookText)
	return err
}

// remove removes all rules and chains of nametap. It finds them by the names of the chains, whatever the settings.
// have is what the kernel had a moment ago. The result after is what the kernel has then, except that it may still
// list tables and marks that were deleted last. changed is true if there was anything to remove.
func (p place) remove(ctx context.Context, have saved) (after saved, changed bool, err error) {
	now, changed, err := p.converge(ctx, have, Rules{})
	if err != nil || !p.untidy(now.saved) {
		return now.saved, changed, err
	}
	return now.saved, true, p.tidy(ctx, now)
}

// tidy deletes the tables that nametap has made. It deletes all these tables at once or, if that fails, one by one.
// If other programs use such a table, it only removes nametap's mark.
func (p place) tidy(ctx context.Context, now reading) error {
	var err error
	if !now.known {
		if now, err = p.readNow(ctx); err != nil {
			return err
		}
	}
	var deletable []string
	for _, name := range tableNames() {
		if p.deletable(name, now.saved[name]) {
			deletable = append(deletable, name)
		}
	}
	if len(deletable) > 0 && now.known && deleteNFTTables(p.family, now.generation, deletable...) != nil {
		deletable = nil // another program has changed rules, or uses a table
	}
	for _, name := range tableNames() {
		marked := now.saved[name].hasMark()
		switch {
		case slices.Contains(deletable, name), !marked && !p.deletable(name, now.saved[name]):
			continue
		case p.deleteTable(ctx, name) == nil, !marked:
			continue
		}
		if err := p.tools.write(ctx, unmark(name)); err != nil {
			return err
		}
	}
	clear(p.made)
	return nil
}

// untidy reports whether s may have tables that nametap has made.
func (p place) untidy(s saved) bool {
	return s.hasMark() || slices.ContainsFunc(tableNames(), func(name string) bool { return s[name] != nil && p.made[name] })
}

// deletable reports whether nametap has made the table and no program uses it.
func (p place) deletable(name string, t *savedTable) bool {
	return t != nil && (t.hasMark() || p.made[name]) && t.foreign()+len(t.ownChains())+len(t.jumps()) == 0
}

// deleteTable deletes an nft table. It returns an error if the table has changed since it was read, or if other
// programs use the table.
func (p place) deleteTable(ctx context.Context, name string) error {
	now, err := p.readNow(ctx)
	switch {
	case err != nil:
		return err
	case !now.known || !p.deletable(name, now.saved[name]):
		return fmt.Errorf("other programs use table %s, or the generation of its rules is not known", name)
	}
	return deleteNFTTables(p.family, now.generation, name)
}
