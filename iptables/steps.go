package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
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
		if cfg.Backend == Auto && !other.usable() { // why it was not chosen may say what confines this process
			err = errors.Join(err, other.err())
		}
		return changed, err
	}
	removed, otherErr := removeSide(ctx, other, attempts, c.made)
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
			p.made, p.spare = c.place(site{s.backend, f}), c.firewall.spare(f)
			supported, lacks := c.candidates(variants, site{s.backend, f}, s.saved[f])
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
			_, removeErr := removeSide(ctx, c.goal.Config.toolbox().inspect(ctx, s.backend), brief, c.made)
			err = errors.Join(err, removeErr)
		}
		return changed, err
	}
	if ctx.Err() == nil {
		c.logMissing(in)
	}
	c.noteLacks(in)
	c.in, c.unleased = in, in.unleased()
	return changed, err
}

// candidates returns the variants that the machine may support with have in the kernel, and why
// others are left out. Unsupported variants are tried again when they are due.
func (c *Capture) candidates(vs []variant, at site, have saved) (left []variant, lacks error) {
	left, lacks = possible(vs, have)
	if reduced := c.in.reduced[at.family]; reduced != nil && at.backend == c.in.backend && !c.retryDue() {
		return c.in.families[at.family].orLess(left), reduced
	}
	return left, lacks
}

// noteLacks sets when to try again what this machine does not support, after an attempt if that was due.
func (c *Capture) noteLacks(in installed) {
	switch {
	case in.complete() || in.failed():
		c.lacks = 0
	case c.lacks == 0 || c.retryDue():
		c.lacks = min(max(2*c.lacks, c.goal.Config.Interval), quietInterval)
		c.lacksDue = time.Now().Add(c.lacks)
	}
}

// retryDue reports whether to try again what is missing: at each check what has failed for a reason that may pass,
// and ever more rarely what this machine does not support. Each attempt writes rules to one table, and may not to
// the next one, so queries pass through until the rules are as before.
func (c *Capture) retryDue() bool {
	return !c.in.complete() && (c.lacks == 0 || !time.Now().Before(c.lacksDue))
}

// failed reports whether anything is missing that this machine may support.
func (in installed) failed() bool {
	for _, f := range families() {
		if err := cmp.Or(in.missing[f], in.reduced[f]); err != nil && !unsupported(err) {
			return true
		}
	}
	return false
}

// orLess returns the variants that are not better than v.
func (v variant) orLess(vs []variant) []variant {
	better := slices.IndexFunc(vs, func(other variant) bool { return slices.Equal(other.without, v.without) })
	return vs[max(better, 0):]
}

// place records that rules are written to a site, and returns the tables that this process has made there.
func (c *Capture) place(at site) (made map[string]bool) {
	c.placed[at] = true
	if c.made[at] == nil {
		c.made[at] = make(map[string]bool)
	}
	return c.made[at]
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

// check compares the kernel with what was installed, repairs what differs, and tries again what
// is missing.
func (c *Capture) check(ctx context.Context) error {
	c.checks.Add(1)
	now, err := c.fingerprint() // before the rules are read, or a change in between would be missed
	known := err == nil
	c.firewall.look(c.lastChange())
	if begins := c.begins.Swap(false); begins || c.entries.pending() {
		c.entries.sweep(c.goal.Config, c.in, begins)
	}
	if known && c.in.complete() && now == c.seen && !c.firewall.due() {
		return nil
	}
	c.seen = fingerprint{}
	same, err := c.repair(ctx)
	if same && known {
		c.seen = now
	}
	return err
}

// repair reads the rules and repairs what differs, except for a table that is left to a later check. same reports
// that nothing differs.
func (c *Capture) repair(ctx context.Context) (same bool, err error) {
	m := c.goal.Config.toolbox().inspectAll(ctx)
	drifts, err := c.drifted(m)
	if err != nil || len(drifts) == 0 && !c.retryDue() {
		c.firewall.note(m, c.in)
		return err == nil, err
	}
	changed, err := c.apply(ctx, m, brief)
	c.firewall.note(m, c.in)
	switch {
	case err != nil && (!errors.Is(err, ErrIncomplete) || errors.Is(err, errElsewhere)):
	case len(drifts) > 0:
		c.log.Warn("capture rules had drifted and were repaired", "drift", drifts)
		text := strings.Join(drifts, "; ")
		c.drift.Store(&text)
		c.repairs.Add(1)
	default:
		c.logCaptured(changed, nil)
	}
	return false, err
}

// A fingerprint tells whether rules may have changed in the kernel. If two are equal, no rule
// changed between them, except for changes of legacy's rules that were undone.
type fingerprint struct {
	generation uint32 // of nft
	legacy     uint64 // a hash
}

// fingerprint takes a fingerprint, which costs far less than reading the rules.
func (c *Capture) fingerprint() (fingerprint, error) {
	generation, err := nftGeneration()
	if err != nil && !isAny(err, unix.EOPNOTSUPP, unix.EINVAL, unix.EPROTONOSUPPORT) { // no nft
		return fingerprint{}, err
	}
	var hash maphash.Hash
	hash.SetSeed(c.seed)
	for _, f := range families() {
		if err := legacyPrint(&hash, f); err != nil {
			return fingerprint{}, err
		}
	}
	return fingerprint{generation, hash.Sum64()}, nil
}

// drifted lists how the kernel differs from what was installed, without a table that is left to a later check; empty
// if it does not.
func (c *Capture) drifted(m machine) ([]string, error) {
	s, other := m.side(c.in.backend), m.side(c.in.backend.other())
	var drifts []string
	var errs []error
	for _, f := range families() {
		v, ok := c.in.families[f]
		if ok && s.reason[f] != nil {
			errs = append(errs, s.reason[f])
			continue
		}
		if err := other.reason[f]; temporary(err) {
			errs = append(errs, err)
		}
		if ok || c.in.missing[f] == nil {
			for _, d := range v.rules.sparing(c.firewall.spare(f)).drift(f, s.saved[f]) {
				drifts = append(drifts, fmt.Sprintf("%s: %s", f, d))
			}
		}
		if other.saved[f].hasOwn() {
			drifts = append(drifts, fmt.Sprintf("%s: backend %s has rules of nametap too", f, other.backend))
		}
	}
	return drifts, errors.Join(errs...)
}

// unhookAll is the step unhook. It keeps chains that replies in flight need for the settle
// time.
func (c *Capture) unhookAll(ctx context.Context) error {
	c.in, c.entries.leftovers, c.seen, c.firewall = installed{}, nil, fingerprint{}, firewall{}
	for _, f := range families() {
		if err := c.lease.end(f); err != nil {
			c.log.Warn("the capture ends with the removal of the rules", "error", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, c.goal.Config.Patience)
	defer cancel()
	used, again, err := c.unhook(ctx)
	if used {
		c.settle = c.goal.Config.Settle
	}
	if err = withoutCapability(err); err == nil {
		c.phase, c.due, c.openSince = unhooked, time.Now().Add(c.settle), time.Time{}
		c.retries.n, c.retries.failure = 0, nil
		return nil
	}
	if c.onlyOthers(err) {
		return c.allRemoved(err)
	}
	return c.failed(err, again)
}

// unhook deletes the jumps to nametap's chains in both backends. It reports whether queries
// were captured recently, so that replies may be in flight, and whether what failed may
// succeed soon.
func (c *Capture) unhook(ctx context.Context) (used, again bool, err error) {
	var sides []*side
	var errs []error
	changed := false
	for _, b := range c.ownFirst() {
		s := c.goal.Config.toolbox().inspect(ctx, b)
		sides = append(sides, s)
		c.bare[b] = s.bare()
		err := c.unreadPlaced(s)
		again = again || temporary(err)
		errs = append(errs, err)
		for f, saved := range s.saved {
			if !saved.hasOwn() {
				continue
			}
			changed = true
			used = used || inUse(f, saved)
			err := c.unhookFamily(ctx, s.place(f, patient), saved)
			again = again || temporary(err)
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
		c.log.Info("DNS is no longer captured")
	}
	return used, again, err
}

// ownFirst returns both backends, the one in which c has installed rules first: a tool of the
// other one may hang until there is no time left.
func (c *Capture) ownFirst() []Backend {
	if c.placed[site{Legacy, IPv4}] || c.placed[site{Legacy, IPv6}] {
		return []Backend{Legacy, NFT}
	}
	return []Backend{NFT, Legacy}
}

// unhookFamily deletes the jumps of one family in one backend, and drops the conntrack entries
// that would still redirect to the agent. With a zone, no UDP socket uses these entries, and they
// are dropped before the zone is removed, because sockets would use them again. Without a
// zone, and over TCP, sockets use them until the jumps are deleted.
func (c *Capture) unhookFamily(ctx context.Context, p place, have saved) error {
	s := sweep{ports: ports(have.redirections())}
	if len(have["raw"].ownChains()) > 0 {
		c.entries.drop(p.family, s.orphans())
	}
	err := p.unhook(ctx, have)
	c.entries.drop(p.family, s.orphans())
	return err
}

// removeAll is the step remove.
func (c *Capture) removeAll(ctx context.Context) error {
	again, err := c.removeSides(context.WithoutCancel(ctx))
	if err == nil || c.onlyOthers(err) {
		return c.allRemoved(err)
	}
	return c.failed(err, again)
}

// removeSides removes everything of nametap in both backends, except where unhook has just found
// nothing: each tool takes long on a busy machine. again is true if what failed may succeed
// soon.
func (c *Capture) removeSides(ctx context.Context) (again bool, err error) {
	var failed, unseen error
	for _, b := range []Backend{NFT, Legacy} {
		if c.bare[b] && !c.hasMade(b) {
			continue
		}
		s := c.goal.Config.toolbox().inspect(ctx, b)
		_, err := removeSide(ctx, s, patient, c.made)
		if err == nil {
			c.cleared(s)
		}
		mayBe, unread := c.unread(s)
		again = again || temporary(err) || temporary(unread)
		failed, unseen = errors.Join(failed, err, unread), errors.Join(unseen, mayBe)
	}
	if failed != nil && unseen != nil {
		failed = fmt.Errorf("%w\n%v", failed, unseen) //nolint:errorlint // the failure is what counts
	}
	if failed != nil {
		return again, failed
	}
	return false, unseen
}

// hasMade reports whether this process has made tables in a backend.
func (c *Capture) hasMade(b Backend) bool {
	return slices.ContainsFunc(families(), func(f Family) bool { return len(c.made[site{b, f}]) > 0 })
}

// unread returns an error if a backend that may have rules of nametap could not be read: an
// [ErrUnseen] if that is permanent and c has installed none there, otherwise a failure.
func (c *Capture) unread(s *side) (unseen, failed error) {
	failed = c.unreadPlaced(s)
	if failed == nil {
		unseen = s.unseen()
	}
	if temporary(unseen) {
		return nil, unseen
	}
	return unseen, failed
}

// unreadPlaced returns an error if families of a backend could not be read in which c has
// installed rules.
func (c *Capture) unreadPlaced(s *side) error {
	var errs []error
	for f, err := range s.reason {
		if c.placed[site{s.backend, f}] && !knownEmpty(s.backend, f, err) {
			errs = append(errs, fmt.Errorf("reading the rules of backend %s, %s: %w", s.backend, f, err))
		}
	}
	return errors.Join(errs...)
}

// allRemoved records the end of a removal, and returns its error.
func (c *Capture) allRemoved(unseen error) error {
	c.phase, c.captured, c.settle, c.retries, c.openSince = removed, false, 0, retries{}, time.Time{}
	return unseen
}

// onlyOthers reports whether the error of a removal says only that rules of another process
// may remain.
func (c *Capture) onlyOthers(err error) bool {
	return errors.Is(err, ErrUnseen) || errors.Is(err, ErrCapability) && len(c.placed) == 0
}

// logRemoval logs the failure of a step of a removal. had is true if this process had
// rules installed.
func (c *Capture) logRemoval(had bool, err error) {
	switch {
	case err == nil:
	case !c.onlyOthers(err):
		c.log.Error("the capture rules cannot be removed; retrying", "error", err)
	case had:
		c.log.Info("removed the capture rules of this agent; others may remain", "error", err)
	default:
		c.log.Warn("capture rules of an earlier agent may remain", "error", err)
	}
}

// retries are the retries of a removal.
type retries struct {
	n        int       // failures since
	since    time.Time // the first of them
	failure  error     // the last one; nil if the last step did not fail
	reported error     // the last one that was reported; nil after the removal or an apply
}

// failed postpones a step of a removal that has failed, and returns the error if it is to be
// reported now. again is true if the step may succeed soon.
func (c *Capture) failed(err error, again bool) error {
	r, now := &c.retries, time.Now()
	if r.n == 0 {
		r.since = now
	}
	r.failure = err
	if again && now.Sub(r.since) < c.goal.Config.Patience {
		c.due = now.Add(backOff(r.n))
		r.n++
		return nil
	}
	r.n, r.reported = 0, err
	c.due = r.since.Add(c.goal.Config.Patience)
	return err
}
