package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/family"
)

// place is where rules are written to: one family in one backend.
type place struct {
	backend  Backend
	family   family.Family
	tools    tools
	attempts int // how often to write, 1 or more
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
			a.variant, a.inKernel = v, r
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

// converge writes until the kernel has these rules. It returns what the kernel has then, and whether it wrote anything.
func (p place) converge(ctx context.Context, inKernel saved, rules Rules) (saved, bool, error) {
	return p.write(ctx, inKernel, func(inKernel saved) string { return rules.change(p.family, inKernel) })
}

// write calls the function repair with the rules in the kernel, and writes the text that repair returns, until that
// text is empty. inKernel has the rules of a moment ago; if it is nil, write first reads the kernel. write returns
// what the kernel has at the end, and whether it wrote anything.
//
// A failure that means that the attempt would fail again counts only if it occurs twice in a row for the same text,
// because a change by another program can cause the same message.
func (p place) write(ctx context.Context, inKernel saved, repair func(saved) string) (_ saved, changed bool, err error) {
	if inKernel == nil {
		if inKernel, err = p.tools.read(ctx); err != nil {
			return nil, false, err
		}
	}
	overwritten := errors.New("a change of the rules did not take effect: another program changes the rules all the time")
	again := 0
	for n := 0; ; n++ {
		text := repair(inKernel)
		if text == "" {
			return inKernel, n > 0, nil
		}
		if n >= p.attempts || again > 1 {
			return nil, changed, err
		}
		if n > 0 && !clock.Sleep(ctx, backOff(n)) {
			return nil, true, fmt.Errorf("%w; previous error: %v", ctx.Err(), err) //nolint:errorlint // the end of ctx is what counts
		}
		err = cmp.Or(p.tools.write(ctx, text), overwritten)
		var readErr error
		if inKernel, readErr = p.tools.read(ctx); readErr != nil {
			return nil, true, errors.Join(err, readErr)
		}
		same := repair(inKernel) == text
		changed = changed || !same
		if again++; !same || !failsAgain(err) {
			again = 0
		}
	}
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
// Tables that nametap has made stay, without rules. inKernel has the rules that were in the kernel a moment ago.
// remaining has the rules that are left. changed is true if there was anything to remove.
func (p place) remove(ctx context.Context, inKernel saved) (remaining saved, changed bool, err error) {
	return p.converge(ctx, inKernel, Rules{})
}
