package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/internal/family"
)

// An installer installs the rules of both families in one backend, which it chooses once, and removes the rules of both
// backends. It knows what this process has installed. It belongs to the goroutine that changes rules.
type installer struct {
	log      *slog.Logger
	goal     *target                // the target that the steps are for
	backend  Backend                // the backend of the rules of this process; "" before the choice
	reason   string                 // why this backend
	inst     installation           // what this process has installed
	placed   map[family.Family]bool // where rules were written and may still be
	changes  bool                   // rules were installed or changed since the last report
	entries  entries
	firewall filterRepair
	lacksDue time.Time // when rules that this machine does not support are tried again
}

func newInstaller(log *slog.Logger) installer {
	return installer{log: log, placed: make(map[family.Family]bool), entries: newEntries(log)}
}

// apply installs the rules of the goal, and reports whether that changed anything. The first time, it chooses the
// backend, and removes the rules of nametap in the other backend. captured says whether the rules captured before.
func (i *installer) apply(ctx context.Context, captured bool) (changed bool, err error) {
	if i.backend == "" {
		changed, err = i.choose(ctx)
	} else {
		changed, err = i.install(ctx, inspect(ctx, i.goal.Config, i.backend))
		if i.inst.elsewhere != nil && i.inst.backend != "" {
			cleared, otherErr := i.clear(ctx, inspect(ctx, i.goal.Config, i.backend.other()))
			changed, err = changed || cleared, errors.Join(err, otherErr)
		}
	}
	// The first rules with a lease match when the lease begins, and then a check sweeps.
	if i.changes = i.changes || changed; changed && i.inst.backend != "" && (captured || i.inst.unleased()) {
		i.entries.sweep(i.goal.Config, i.inst, true)
	}
	return changed, err
}

// choose chooses the backend and installs the rules in it. If this machine lacks what the rules need in the backend that it
// would prefer, it takes the other one.
func (i *installer) choose(ctx context.Context) (changed bool, err error) {
	cfg := i.goal.Config
	m := inspectAll(ctx, cfg)
	chosen, reason, err := m.choose(cfg.Backend)
	if err != nil {
		return false, err
	}
	other := m.side(chosen.backend.other())
	i.reason = reason
	changed, err = i.install(ctx, chosen)
	if cfg.Backend == Auto && errors.Is(err, errMissing) && !errors.Is(err, ErrIncomplete) && other.usable() {
		chosen, other = other, chosen
		first := err
		i.reason = "this machine lacks what the rules need in " + string(other.backend)
		if changed, err = i.install(ctx, chosen); err != nil {
			err = errors.Join(err, first)
		}
	}
	if err != nil && !errors.Is(err, ErrIncomplete) {
		if cfg.Backend == Auto && !other.usable() { // why it cannot be used may explain the failure
			err = errors.Join(err, other.err())
		}
		return changed, err
	}
	i.backend = chosen.backend
	cleared, otherErr := i.clear(ctx, other)
	return changed || cleared, errors.Join(err, otherErr)
}

// clear removes the rules of nametap in the other backend. After a failure, apply tries again.
func (i *installer) clear(ctx context.Context, other *side) (changed bool, err error) {
	var errs []error
	for f, inKernel := range other.saved {
		if inKernel.hasOwn() {
			changed = true
			_, _, err := other.place(f).converge(ctx, inKernel, Rules{})
			errs = append(errs, err)
		}
	}
	if i.inst.elsewhere = errors.Join(errs...); i.inst.elsewhere != nil {
		err = fmt.Errorf("%w: rules of nametap remain in the other backend, %s: %w", ErrIncomplete, other.backend, i.inst.elsewhere)
	}
	return changed, err
}

// install installs the rules in one backend. If the rules of one family fail, it keeps the rules of the other
// family. If both fail, each has the rules that it had before, or none.
func (i *installer) install(ctx context.Context, s *side) (changed bool, err error) {
	inst := installation{backend: s.backend, elsewhere: i.inst.elsewhere,
		families: make(map[family.Family]variant), missing: make(map[family.Family]error), reduced: make(map[family.Family]error)}
	for _, f := range family.All() {
		did, err := false, s.reason[f]
		if err == nil {
			did, err = i.installFamily(ctx, s, s.place(f), inst)
		}
		changed = changed || did
		if err != nil && (s.reason[f] == nil || i.goal.wants(f)) {
			inst.missing[f] = err
		}
	}
	err = cmp.Or(inst.unguarded(i.goal.Config), inst.validate())
	if err != nil && !errors.Is(err, ErrIncomplete) {
		return changed, err
	}
	if ctx.Err() == nil {
		i.logMissing(inst)
	}
	if !time.Now().Before(i.lacksDue) {
		i.lacksDue = time.Now().Add(lackPauses * i.goal.Config.Interval)
	}
	i.firewall.record(s, inst)
	i.inst = inst
	return changed, err
}

// installFamily installs the rules of a family, and records in inst which.
func (i *installer) installFamily(ctx context.Context, s *side, p place, inst installation) (changed bool, err error) {
	f := p.family
	if !i.goal.wants(f) {
		_, changed, err = p.converge(ctx, s.saved[f], Rules{})
		return changed, err
	}
	guarded := i.goal.Config.Guard != nil
	if guarded && s.saved[f][filterTable].unreadable {
		return false, fmt.Errorf("%w: the guard cannot be installed: table filter %s", errRefused, errIncompatible)
	}
	variants := i.goal.variantsFor(f, s.saved[f])
	i.placed[f], p.spare = true, i.firewall.spare()
	lacks := i.inst.reduced[f]
	if lacks != nil && time.Now().Before(i.lacksDue) {
		variants = variants[len(variants)-1:]
	} else {
		lacks = nil
	}
	a, err := p.apply(ctx, s.saved[f], variants)
	if guarded && errors.Is(err, errMissing) {
		if names := lacking(ctx, f, p.tools.tryHere); len(names) > 0 {
			err = fmt.Errorf("%w: %w", errLacks(names), err)
		}
	}
	if err != nil {
		return a.changed, err
	}
	inst.families[f], s.saved[f] = a.variant, a.inKernel
	if lacks = cmp.Or(a.reduced, lacks); lacks != nil {
		inst.reduced[f] = lacks
	}
	return a.changed, nil
}

// quietInterval is the time between checks if the rules are complete and the kernel announces their changes (nft).
const quietInterval = time.Hour

// retryDue reports whether it is time to try again to install rules that are missing. If they may be missing for a
// reason that passes, each check tries. If this machine does not support them, a check tries when lackPauses intervals have
// passed: an attempt may write rules to one table and fail at the next table, and then queries pass through until the rules
// are as before.
func (i *installer) retryDue() bool {
	return i.inst.failed() || !i.inst.complete() && !time.Now().Before(i.lacksDue)
}

// lackPauses is how many intervals pass before what this machine does not support is tried again: ten minutes, if
// Config.Interval is 5 s.
const lackPauses = 120

// logMissing logs what is newly missing in the installed rules, and what is no longer missing. inst is what was just
// installed.
func (i *installer) logMissing(inst installation) {
	for _, f := range family.All() {
		was, is := i.inst.families[f], inst.families[f]
		switch err, before := inst.missing[f], i.inst.missing[f]; {
		case err != nil && before == nil:
			i.log.Warn("DNS over one family is not captured", "family", f, "error", err)
		case err == nil && before != nil && len(is.rules.tables(f)) > 0:
			i.log.Info("DNS over a family that was missing is captured now", "family", f)
		}
		switch {
		case slices.Equal(is.omitted, was.omitted):
		case len(is.omitted) > 0:
			i.log.Warn("the capture rules leave out what this machine does not support",
				"family", f, "without", strings.Join(is.omitted, ", "), "error", inst.reduced[f])
		case len(is.rules.tables(f)) > 0:
			i.log.Info("capture rules are complete now", "family", f)
		}
	}
}

// drifts lists how the kernel differs from what was installed. It ignores a table whose repair is left to a later
// check (see [filterRepair]). The list is empty if nothing differs.
func (i *installer) drifts(s *side) (drifts []string, err error) {
	var errs []error
	for _, f := range family.All() {
		v, ok := i.inst.families[f]
		if ok && s.reason[f] != nil {
			errs = append(errs, s.reason[f])
		} else if ok || i.inst.missing[f] == nil {
			for _, d := range v.rules.sparing(i.firewall.spare()).drift(f, s.saved[f]) {
				drifts = append(drifts, fmt.Sprintf("%s: %s", f, d))
			}
			if v.rules.spare != "" && !s.saved[f][v.rules.spare].unreadable {
				drifts = append(drifts, fmt.Sprintf("%s: %s can be read again", f, v.rules.spare))
			}
		}
	}
	return drifts, errors.Join(errs...)
}

// eachOwn calls the function do for each family that has rules of nametap, in both backends: first in the backend of this
// process, because a tool of the other one may hang until no time is left. failed says what could not be read or done, for a
// reason that may pass or although this process has installed rules there. unseen is an [ErrUnseen] about rules that
// another process may have installed where this one can never read or remove them.
func (i *installer) eachOwn(ctx context.Context, do func(place, saved) error) (found bool, unseen, failed error) {
	first := cmp.Or(i.backend, NFT)
	for _, b := range []Backend{first, first.other()} {
		s := inspect(ctx, i.goal.Config, b)
		for _, f := range family.All() {
			err := s.reason[f]
			if s.saved[f].hasOwn() {
				found = true
				err = do(s.place(f), s.saved[f])
			}
			switch {
			case err == nil || s.reason[f] != nil && knownEmpty(b, f):
			case temporary(err) || b == i.backend && i.placed[f]:
				failed = errors.Join(failed, fmt.Errorf("removing the rules of backend %s, %s: %w", b, f, err))
			default:
				unseen = errors.Join(unseen, fmt.Errorf("%w (backend %s, %s): run `nametap capture remove` as root, with the tools of that backend: %w", ErrUnseen, b, f, err))
			}
		}
	}
	return found, unseen, failed
}

// unhook deletes the jumps of one family in one backend. used is true if queries were captured recently, so replies may
// be in flight. unhook drops the conntrack entries that would still redirect packets to the agent: before it deletes the
// jumps, and again after that. The first time is for rules that put queries into a conntrack zone. UDP sockets do not use
// the entries outside the zone yet, but would use them as soon as the jumps are deleted. The second time is for the other
// entries, of TCP and of UDP without a zone. Sockets use these entries, and make new ones, until the jumps are deleted.
func (i *installer) unhook(ctx context.Context, p place, inKernel saved) (used bool, err error) {
	s := sweep{ports: inKernel.redirections()}
	used = inUse(p.family, inKernel)
	if len(inKernel["raw"].ownChains()) > 0 {
		i.entries.drop(p.family, s.orphan)
	}
	_, _, err = p.write(ctx, inKernel, unhookText)
	i.entries.drop(p.family, s.orphan)
	return used, err
}
