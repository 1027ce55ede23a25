package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/family"
)

// place is where rules are written to: one family in one backend.
type place struct {
	family family.Family
	tools  tools
	spare  string // a table that is not written; "" for none
}

// attempts is how often rules are written until the kernel has them. One attempt may not be enough, because other programs
// may change rules between reading and writing, and tools may fail for reasons that pass. With the pauses between them, all
// attempts take about 2 s.
const attempts = 12

// applied is the result of applying rules to one family.
type applied struct {
	variant  variant // the rules that are installed
	inKernel saved   // the rules in the kernel after that
	changed  bool
	reduced  error // why a better variant is not installed; nil for the best variant
}

// apply installs the first variant that works. original has the rules in the kernel. If the machine does not support
// something that a variant needs, the next variant is tried. If no variant works, nametap's rules are removed, unless the
// original rules are still in the kernel: a family has all of its rules or none. But those of a guard stay.
func (p place) apply(ctx context.Context, original saved, vs []variant) (a applied, err error) {
	inKernel := original
	for _, v := range vs {
		changed := false
		a.inKernel, changed, err = p.converge(ctx, inKernel, v.rules.sparing(p.spare))
		inKernel = nil // the kernel may have changed
		a.changed = a.changed || changed
		if err == nil {
			a.variant = v
			return a, nil
		}
		a.reduced = cmp.Or(a.reduced, err)
		if !errors.Is(err, errMissing) {
			break
		}
	}
	return a, errors.Join(err, p.rollBack(context.WithoutCancel(ctx), original, vs[len(vs)-1].rules.guardOnly()))
}

// converge writes until the kernel has these rules. It returns what the kernel has then, and whether it changed anything.
func (p place) converge(ctx context.Context, inKernel saved, rules Rules) (saved, bool, error) {
	return p.write(ctx, inKernel, func(inKernel saved) string { return rules.change(p.family, inKernel) })
}

// write calls the function repair with the rules in the kernel, and writes the text that repair returns, until that
// text is empty. inKernel has the rules of a moment ago; if it is nil, write first reads the kernel. write returns
// what the kernel has at the end, and whether it changed anything.
//
// A lack of support, or a refusal, counts only if it occurs twice in a row for the same text, because a change by
// another program can cause the same message.
func (p place) write(ctx context.Context, inKernel saved, repair func(saved) string) (_ saved, changed bool, err error) {
	if inKernel == nil {
		if inKernel, err = p.tools.read(ctx); err != nil {
			return nil, false, err
		}
	}
	overwritten := errors.New("a change of the rules did not take effect: another program changes the rules all the time")
	began, lasting := time.Now(), 0
	for n := 0; ; n++ {
		text := repair(inKernel)
		switch {
		case text == "":
			return inKernel, n > 0, nil
		case n >= attempts || lasting > 1 || n > 0 && time.Since(began) >= p.tools.limit: // a tool may have waited for a lock
			return nil, changed, err
		case n > 0 && !clock.Sleep(ctx, backOff(n)):
			return nil, true, fmt.Errorf("%w; previous error: %v", ctx.Err(), err) //nolint:errorlint // the end of ctx is what counts
		}
		err = cmp.Or(p.tools.write(ctx, text), overwritten)
		var unread error
		if inKernel, unread = p.tools.read(ctx); unread != nil {
			return nil, true, errors.Join(err, unread)
		}
		same := repair(inKernel) == text
		changed = changed || !same
		if lasting++; !same || temporary(err) {
			lasting = 0
		}
	}
}

// rollBack removes the rules of nametap, but not those of a guard, unless the tables have their original rules.
func (p place) rollBack(ctx context.Context, original saved, guard Rules) error {
	inKernel, err := p.tools.read(ctx)
	if err != nil {
		return err
	}
	for _, name := range tableNames() {
		if !inKernel[name].equal(original[name]) {
			_, _, err := p.converge(ctx, inKernel, guard)
			return err
		}
	}
	return nil
}
