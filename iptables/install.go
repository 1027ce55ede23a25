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

// An installer installs and removes the rules of both families in both backends. It knows what this process has
// installed. It belongs to the goroutine that changes rules.
type installer struct {
	log       *slog.Logger
	goal      *target                  // the target that the steps are for
	inst      installation             // what this process has installed
	unleased  bool                     // the installed rules of at least one family have no lease
	changes   bool                     // rules were installed or changed since the last report
	placed    map[site]bool            // where rules were written and may still be
	ownTables map[site]map[string]bool // the tables that this process has made
	bare      map[Backend]bool         // the backends in which the last unhook has found nothing
	entries   entries
	firewall  filterRepair
	lacks     time.Duration // the pause before rules that this machine does not support are tried again; 0 for no pause
	lacksDue  time.Time     // when this pause ends
}

func newInstaller(log *slog.Logger) installer {
	return installer{
		log:       log,
		placed:    make(map[site]bool),
		ownTables: make(map[site]map[string]bool),
		bare:      make(map[Backend]bool),
		entries:   newEntries(log),
	}
}

// apply installs the rules of the goal, and reports whether that changed anything. m has the rules that were in the
// kernel a moment ago. The parameter attempts is how often rules may be written until the kernel has them.
func (i *installer) apply(ctx context.Context, m machine, attempts int) (changed bool, err error) {
	defer func() { i.changes = i.changes || changed }()
	cfg := i.goal.Config
	if err := checkMapped(cfg); err != nil {
		return false, err
	}
	chosen, reason, err := m.choose(cfg.Backend)
	if err != nil {
		return false, err
	}
	other := m.side(chosen.backend.other())
	changed, err = i.install(ctx, chosen, reason, attempts)
	if cfg.Backend == Auto && errors.Is(err, errNoTable) && !errors.Is(err, ErrIncomplete) && other.usable() {
		chosen, other = other, chosen
		first := err
		if changed, err = i.install(ctx, chosen, "the kernel has no tables for "+string(other.backend), attempts); err != nil {
			err = errors.Join(err, first)
		}
	}
	if err != nil && !errors.Is(err, ErrIncomplete) {
		if cfg.Backend == Auto && !other.usable() { // why it cannot be used may explain the failure
			err = errors.Join(err, other.err())
		}
		return changed, err
	}
	removed, otherErr := other.remove(ctx, attempts, i.ownTables)
	changed = changed || removed
	if changed && i.unleased { // otherwise the rules match only when the lease begins anew
		i.entries.sweep(cfg, i.inst, true)
	}
	if otherErr == nil {
		i.recordCleared(other)
		return changed, err
	}
	otherErr = fmt.Errorf("%w: %w, %s: %w", ErrIncomplete, errElsewhere, other.backend, otherErr)
	return changed, errors.Join(err, otherErr)
}

// install installs the rules in one backend. If the rules of one family fail, it keeps the rules of the other
// family. If both fail, each has the rules that it had before, or none.
func (i *installer) install(ctx context.Context, s *side, reason string, attempts int) (changed bool, err error) {
	inst := installation{backend: s.backend, reason: reason,
		families: make(map[family.Family]variant), missing: make(map[family.Family]error), reduced: make(map[family.Family]error)}
	for _, f := range family.All() {
		variants := i.goal.variantsFor(f, s.saved[f])
		p := s.place(f, attempts)
		wanted := len(variants[0].rules.tables(f)) > 0
		var a applied
		var err error
		switch {
		case s.reason[f] != nil:
			if wanted {
				inst.missing[f] = s.reason[f]
			}
			continue
		case !wanted:
			a.inKernel, a.changed, err = p.remove(ctx, s.saved[f])
		default:
			p.ownTables, p.spare = i.place(site{s.backend, f}), i.firewall.spare(f)
			supported, lacks := i.candidates(variants, site{s.backend, f}, s.saved[f])
			if a, err = p.apply(ctx, s.saved[f], supported); err == nil {
				inst.families[f] = a.variant
				a.reduced = cmp.Or(a.reduced, lacks)
			}
		}
		changed = changed || a.changed
		if err != nil {
			inst.missing[f] = err
			continue
		}
		s.saved[f] = a.inKernel
		if a.reduced != nil {
			inst.reduced[f] = a.reduced
		}
	}
	err = inst.validate()
	if err != nil && !errors.Is(err, ErrIncomplete) {
		return changed, err
	}
	if ctx.Err() == nil {
		i.logMissing(inst)
	}
	i.noteLacks(inst)
	i.inst, i.unleased = inst, inst.unleased()
	return changed, err
}

// candidates returns the variants of vs that this machine may support, and why the other variants are left out.
// inKernel has the rules in the kernel. Unsupported variants are left out until it is time to try them again.
func (i *installer) candidates(vs []variant, s site, inKernel saved) (supported []variant, lacks error) {
	supported, lacks = possibleVariants(vs, inKernel)
	if reduced := i.inst.reduced[s.family]; reduced != nil && s.backend == i.inst.backend && !i.retryDue() {
		return i.inst.families[s.family].orLess(supported), reduced
	}
	return supported, lacks
}

// noteLacks sets when rules that this machine does not support are tried again. inst is what was just installed.
func (i *installer) noteLacks(inst installation) {
	switch {
	case inst.complete() || inst.failed():
		i.lacks = 0
	case i.lacks == 0 || i.retryDue():
		i.lacks = min(max(2*i.lacks, i.goal.Config.Interval), quietInterval)
		i.lacksDue = time.Now().Add(i.lacks)
	}
}

// quietInterval is the time between checks if the rules are complete and the kernel announces their changes (nft).
const quietInterval = time.Hour

// retryDue reports whether it is time to try again to install rules that are missing. If they may be missing for a
// reason that passes, each check tries. If this machine does not support them, checks try ever more rarely: an
// attempt may write rules to one table and fail at the next table, and then queries pass through until the rules are
// as before.
func (i *installer) retryDue() bool {
	return !i.inst.complete() && (i.lacks == 0 || !time.Now().Before(i.lacksDue))
}

// place records that rules are written to a site, and returns the tables that this process has made there.
func (i *installer) place(s site) (ownTables map[string]bool) {
	i.placed[s] = true
	if i.ownTables[s] == nil {
		i.ownTables[s] = make(map[string]bool)
	}
	return i.ownTables[s]
}

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

// recordCleared records that nametap has no rules left in the families of a backend that could be read.
func (i *installer) recordCleared(s *side) {
	for f := range s.saved {
		delete(i.placed, site{s.backend, f})
	}
}

// drifts lists how the kernel differs from what was installed. It ignores a table whose repair is left to a later
// check (see [filterRepair]). The list is empty if nothing differs.
func (i *installer) drifts(m machine) ([]string, error) {
	s, other := m.side(i.inst.backend), m.side(i.inst.backend.other())
	var drifts []string
	var errs []error
	for _, f := range family.All() {
		v, ok := i.inst.families[f]
		if ok && s.reason[f] != nil {
			errs = append(errs, s.reason[f])
			continue
		}
		if err := other.reason[f]; temporary(err) {
			errs = append(errs, err)
		}
		if ok || i.inst.missing[f] == nil {
			for _, d := range v.rules.sparing(i.firewall.spare(f)).drift(f, s.saved[f]) {
				drifts = append(drifts, fmt.Sprintf("%s: %s", f, d))
			}
		}
		if other.saved[f].hasOwn() {
			drifts = append(drifts, fmt.Sprintf("%s: backend %s has rules of nametap too", f, other.backend))
		}
	}
	return drifts, errors.Join(errs...)
}

// unhook deletes the jumps to nametap's chains in both backends. used is true if queries were captured recently, so
// replies may be in flight. retry is true if what failed may succeed soon.
func (i *installer) unhook(ctx context.Context) (used, retry bool, err error) {
	var sides []*side
	var errs []error
	changed := false
	for _, b := range i.ownFirst() {
		s := inspect(ctx, i.goal.Config, b)
		sides = append(sides, s)
		i.bare[b] = s.bare()
		err := i.unreadPlaced(s)
		retry = retry || temporary(err)
		errs = append(errs, err)
		for f, saved := range s.saved {
			if !saved.hasOwn() {
				continue
			}
			changed = true
			used = used || inUse(f, saved)
			err := i.unhookFamily(ctx, s.place(f, patient), saved)
			retry = retry || temporary(err)
			errs = append(errs, err)
		}
	}
	if a, b := sides[0], sides[1]; !a.usable() && !b.usable() {
		if a.unseen() == nil && b.unseen() == nil {
			return false, false, nil
		}
		return false, a.unclear() || b.unclear(), errors.Join(a.err(), b.err())
	}
	if err = errors.Join(errs...); changed && err == nil {
		i.log.Info("DNS is no longer captured")
	}
	return used, retry, err
}

// ownFirst returns both backends, first the backend in which this process has installed rules: a tool of the other
// backend may hang until no time is left.
func (i *installer) ownFirst() []Backend {
	if i.placed[site{Legacy, family.IPv4}] || i.placed[site{Legacy, family.IPv6}] {
		return []Backend{Legacy, NFT}
	}
	return []Backend{NFT, Legacy}
}

// unhookFamily deletes the jumps of one family in one backend. It drops the conntrack entries that would still
// redirect packets to the agent: before it deletes the jumps, and again after that. The first time is for rules that
// put queries into a conntrack zone. UDP sockets do not use the entries outside the zone yet, but would use them as
// soon as the jumps are deleted. The second time is for the other entries, of TCP and of UDP without a zone. Sockets
// use these entries, and make new ones, until the jumps are deleted.
func (i *installer) unhookFamily(ctx context.Context, p place, inKernel saved) error {
	s := sweep{ports: inKernel.redirections()}
	if len(inKernel["raw"].ownChains()) > 0 {
		i.entries.drop(p.family, s.orphans())
	}
	err := p.unhook(ctx, inKernel)
	i.entries.drop(p.family, s.orphans())
	return err
}

// removeSides removes everything of nametap in both backends. It skips a backend if unhook has just found nothing
// there and this process has made no table there, because each tool takes long on a busy machine. retry is true if
// what failed may succeed soon.
func (i *installer) removeSides(ctx context.Context) (retry bool, err error) {
	var failed, unseen error
	for _, b := range []Backend{NFT, Legacy} {
		if i.bare[b] && !i.hasMade(b) {
			continue
		}
		s := inspect(ctx, i.goal.Config, b)
		_, err := s.remove(ctx, patient, i.ownTables)
		if err == nil {
			i.recordCleared(s)
		}
		mayBe, unread := i.unread(s)
		retry = retry || temporary(err) || temporary(unread)
		failed, unseen = errors.Join(failed, err, unread), errors.Join(unseen, mayBe)
	}
	if failed != nil && unseen != nil {
		failed = fmt.Errorf("%w\n%v", failed, unseen) //nolint:errorlint // the failure is what counts
	}
	if failed != nil {
		return retry, failed
	}
	return false, unseen
}

// hasMade reports whether this process has made tables in a backend.
func (i *installer) hasMade(b Backend) bool {
	return slices.ContainsFunc(family.All(), func(f family.Family) bool { return len(i.ownTables[site{b, f}]) > 0 })
}

// unread returns an error if a backend that may have rules of nametap could not be read. If the backend can never be
// read and this process has installed no rules there, the result unseen is an [ErrUnseen]. In all other cases the
// result failed is the error.
func (i *installer) unread(s *side) (unseen, failed error) {
	failed = i.unreadPlaced(s)
	if failed == nil {
		unseen = s.unseen()
	}
	if temporary(unseen) {
		return nil, unseen
	}
	return unseen, failed
}

// unreadPlaced returns an error if a family in which this process has installed rules could not be read, unless the
// kernel says that the family is empty.
func (i *installer) unreadPlaced(s *side) error {
	var errs []error
	for f, err := range s.reason {
		if i.placed[site{s.backend, f}] && !knownEmpty(s.backend, f, err) {
			errs = append(errs, fmt.Errorf("reading the rules of backend %s, %s: %w", s.backend, f, err))
		}
	}
	return errors.Join(errs...)
}

// onlyOthers reports whether the error of a removal says only that rules of another process
// may remain.
func (i *installer) onlyOthers(err error) bool {
	return errors.Is(err, ErrUnseen) || errors.Is(err, ErrCapability) && len(i.placed) == 0
}
