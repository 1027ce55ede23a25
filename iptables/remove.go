package iptables

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/conntrack"
)

// Remove takes out all that is ours, of both backends and families, whatever
// configuration put it there; others' rules stay as they are. Nothing of ours
// being there is no error. Where a backend can never be read, such as for want of a
// capability, c has put no rules there, and the kernel does not say that it is empty,
// Remove returns [ErrUnseen] after it has done the rest. Any other backend that cannot be
// read is a failure.
//
// No query is captured any more at once. If any was of late, our chains stay,
// with nothing that leads to them, until Config.Settle is over or ctx ends: with
// the last rule that needs it the kernel stops to track connections and to
// translate addresses, and replies that are on their way would be lost. An Apply
// in the meantime ends that. If ctx ends before that wait, Remove fails, and has
// to be called again. What fails for a reason that may pass is tried again for some
// seconds.
func (c *Capture) Remove(ctx context.Context) error {
	c.mu.Lock()
	c.wanted, c.in, c.leftovers, c.seen = false, installed{}, nil, fingerprint{}
	c.publish()
	c.mu.Unlock()
	limit := time.Now().Add(removePatience)
	var wait time.Duration
	err := c.persist(ctx, limit, func() (bool, error) {
		needed, again, err := c.unhook(ctx)
		wait = max(wait, needed)
		return again, err
	})
	if err != nil {
		return withoutCapability(err)
	}
	if wait > 0 {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
	return c.persist(ctx, limit, func() (bool, error) { return c.removeAll(context.WithoutCancel(ctx)) })
}

// removePatience is for how long Remove tries again what fails for a reason that may
// pass, such as a lock that another program holds for longer than a tool waits for it.
const removePatience = 15 * time.Second

// persist calls a function, with c.mu held, until it succeeds, says that it need not be
// called again, or rules are wanted again: at the latest until limit, or until ctx ends.
func (c *Capture) persist(ctx context.Context, limit time.Time, f func() (again bool, err error)) error {
	once := func() (again bool, err error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.wanted {
			return false, nil
		}
		return f()
	}
	for n := 0; ; n++ {
		again, err := once()
		if err == nil || !again || time.Now().After(limit) || !pause(ctx, n) {
			return err
		}
	}
}

// removeAll takes out all that is ours of both backends. Again says that what failed may
// succeed when it is tried again.
func (c *Capture) removeAll(ctx context.Context) (again bool, err error) {
	var failed, unseen error
	for _, s := range []*side{look(ctx, NFT), look(ctx, Legacy)} {
		_, err := removeSide(ctx, s, patient)
		if err == nil {
			c.cleared(s)
		}
		mayBe, unread := c.unread(s)
		again = again || mayPass(err) || mayPass(unread)
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

// unread tells what of a backend could not be read although there may be rules of ours:
// unseen, an [ErrUnseen], for lasting reasons where c has put none, and failed otherwise.
func (c *Capture) unread(s *side) (unseen, failed error) {
	failed = c.unreadPlaced(s)
	if failed == nil {
		unseen = s.unseen()
	}
	if mayPass(unseen) {
		return nil, unseen
	}
	return unseen, failed
}

// unreadPlaced returns an error if families of a backend could not be read that may have
// rules that c has put there.
func (c *Capture) unreadPlaced(s *side) error {
	var errs []error
	for f, err := range s.reason {
		if c.placed[site{s.backend, f}] && !nothingThere(s.backend, f, err) {
			errs = append(errs, fmt.Errorf("reading the rules of backend %s, %s: %w", s.backend, f, err))
		}
	}
	return errors.Join(errs...)
}

// unseen returns an error if the backend could not be read and may hold rules of ours: an
// [ErrUnseen] if that lasts.
func (s *side) unseen() error {
	for _, f := range families() {
		switch err := s.reason[f]; {
		case err == nil || nothingThere(s.backend, f, err):
		case mayPass(err):
			return fmt.Errorf("reading the rules of backend %s, %s: %w", s.backend, f, err)
		default:
			return fmt.Errorf("%w (backend %s, %s): run `nametap capture remove` as root, with the tools of that backend: %w", ErrUnseen, s.backend, f, err)
		}
	}
	return nil
}

// unhook ends the capture, and says how long to wait for replies that have to be
// translated, and whether what failed may succeed when it is tried again.
func (c *Capture) unhook(ctx context.Context) (wait time.Duration, again bool, err error) {
	var sides []*side
	var errs []error
	changed := false
	for _, b := range c.ownFirst() {
		s := look(ctx, b)
		sides = append(sides, s)
		err := c.unreadPlaced(s)
		again = again || mayPass(err)
		errs = append(errs, err)
		for f, saved := range s.saved {
			if !saved.ours() {
				continue
			}
			changed = true
			if inUse(f, saved) {
				wait = c.cfg.Settle
			}
			err := c.unhookFamily(ctx, s.place(f, patient), saved)
			again = again || mayPass(err)
			errs = append(errs, err)
		}
	}
	if a, b := sides[0], sides[1]; !a.usable() && !b.usable() {
		if a.unseen() == nil && b.unseen() == nil {
			return 0, false, nil
		}
		return 0, a.unclear() || b.unclear(), errors.Join(a.err(), b.err())
	}
	if err = errors.Join(errs...); changed && err == nil {
		c.log.Info("DNS is not captured any more")
	}
	return wait, again, err
}

// ownFirst returns both backends, the one that c has put rules into first: a tool of the
// other one may hang until there is no time left.
func (c *Capture) ownFirst() []Backend {
	if c.placed[site{Legacy, IPv4}] || c.placed[site{Legacy, IPv6}] {
		return []Backend{Legacy, NFT}
	}
	return []Backend{NFT, Legacy}
}

// unhookFamily ends the capture of one family in one backend, and drops the
// entries of conntrack that would still lead to the agent. With a zone those
// have been out of use since the zone came, and are dropped before it goes, when
// sockets would come back to them; without one they are in use until then.
func (c *Capture) unhookFamily(ctx context.Context, p place, have saved) error {
	s := sweep{ports: ports(have.redirections())}
	zoned := len(have["raw"].own()) > 0
	if zoned {
		c.drop(p.family, s.orphaned)
	}
	err := p.unhook(ctx)
	if !zoned {
		c.drop(p.family, s.orphaned)
	}
	return err
}

// inUse says whether any query was captured of late, or may have been.
func inUse(f Family, have saved) bool {
	s := sweep{ports: ports(have.redirections())}
	used := false
	err := conntrack.Dump(f.number(), func(e conntrack.Entry) {
		used = used || e.Original.Destination.Port() == dnsPort && s.redirected(e)
	}, conntrack.Filter{Protocol: unix.IPPROTO_UDP, DestinationPort: dnsPort},
		conntrack.Filter{Protocol: unix.IPPROTO_TCP, DestinationPort: dnsPort})
	return err != nil || used
}

// ports parses those that are ports.
func ports(texts []string) []uint16 {
	var ps []uint16
	for _, t := range texts {
		if p, err := strconv.ParseUint(t, 10, 16); err == nil {
			ps = append(ps, uint16(p))
		}
	}
	return ps
}

// removeSide takes what is ours out of one backend, as far as it can be used,
// and says whether there was anything.
func removeSide(ctx context.Context, s *side, attempts int) (bool, error) {
	changed := false
	var errs []error
	for _, f := range families() {
		if s.saved[f] == nil || !s.saved[f].ours() && !s.saved[f].marked() {
			continue
		}
		did, err := s.place(f, attempts).remove(ctx)
		changed = changed || did
		errs = append(errs, err)
	}
	return changed, errors.Join(errs...)
}
