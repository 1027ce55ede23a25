package iptables

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nametap/nametap/internal/conntrack"
)

// retries are the retries of a removal.
type retries struct {
	n        int       // failures since
	since    time.Time // the first of them
	failure  error     // the last one; nil if the last step did not fail
	reported error     // the last one that was reported; nil after the removal or an apply
}

// failed postpones a step of a removal that has failed, and returns the error if it is to be
// reported now. again says that the step may succeed soon.
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

// unhookAll is the step unhook. It keeps chains that replies in flight need for the settle
// time.
func (c *Capture) unhookAll(ctx context.Context) error {
	c.in, c.entries.leftovers, c.seen = installed{}, nil, fingerprint{}
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

// removeAll is the step remove.
func (c *Capture) removeAll(ctx context.Context) error {
	again, err := c.removeSides(context.WithoutCancel(ctx))
	if err == nil || c.onlyOthers(err) {
		return c.allRemoved(err)
	}
	return c.failed(err, again)
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

// logRemoval logs the failure of a step of a removal. had says that this process had rules
// installed.
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

// removeSides removes everything of nametap in both backends, except where unhook has just found
// nothing: each tool takes long on a busy machine. again says that what failed may
// succeed soon.
func (c *Capture) removeSides(ctx context.Context) (again bool, err error) {
	var failed, unseen error
	for _, b := range []Backend{NFT, Legacy} {
		if c.bare[b] {
			continue
		}
		s := c.goal.Config.toolbox().inspect(ctx, b)
		_, err := removeSide(ctx, s, patient)
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

// unseen returns an error if the backend could not be read and may have rules of nametap: an
// [ErrUnseen] if that is permanent.
func (s *side) unseen() error {
	for _, f := range families() {
		switch err := s.reason[f]; {
		case err == nil || knownEmpty(s.backend, f, err):
		case temporary(err):
			return fmt.Errorf("reading the rules of backend %s, %s: %w", s.backend, f, err)
		default:
			return fmt.Errorf("%w (backend %s, %s): run `nametap capture remove` as root, with the tools of that backend: %w", ErrUnseen, s.backend, f, err)
		}
	}
	return nil
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

// inUse reports whether queries were captured recently. It is true if that cannot be read.
func inUse(f Family, have saved) bool {
	s := sweep{ports: ports(have.redirections())}
	used := false
	every := func(conntrack.Entry) bool { return true }
	err := s.captured(every).visit(f, func(conntrack.Entry) { used = true })
	return err != nil || used
}

// ports parses ports, and leaves out what is not a port.
func ports(texts []string) []uint16 {
	var ps []uint16
	for _, t := range texts {
		if p, err := strconv.ParseUint(t, 10, 16); err == nil {
			ps = append(ps, uint16(p))
		}
	}
	return ps
}

// removeSide removes everything of nametap in one backend, as far as it can be read, and
// reports whether there was anything.
func removeSide(ctx context.Context, s *side, attempts int) (bool, error) {
	changed := false
	var errs []error
	for _, f := range families() {
		if s.saved[f] == nil || !s.saved[f].hasOwn() && !s.saved[f].hasMark() {
			continue
		}
		after, did, err := s.place(f, attempts).remove(ctx, s.saved[f])
		changed = changed || did
		errs = append(errs, err)
		if err == nil {
			s.saved[f] = after
		}
	}
	return changed, errors.Join(errs...)
}
