package iptables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/conntrack"
)

// Capture puts the rules of a configuration into the kernel of its network
// namespace and takes them out. Its methods may be called at the same time; what
// changes rules is done one after the other.
type Capture struct {
	log *slog.Logger

	checks, repairs, failures atomic.Uint64

	mu       sync.Mutex
	cfg      Config
	variants []variant
	wanted   bool      // between Apply and Remove
	behind   bool      // what is in is not of cfg yet
	in       installed // what Apply has put in, zero before
	said     string    // the last failure of Run's that was logged

	levels    atomic.Pointer[map[Family]Level]
	placed    map[site]bool        // where rules were put and may still be
	leftovers map[string]time.Time // conntrack entries, by their keys, that are dropped later; when they were first seen
	saidDrop  map[Family]string    // the last failure of a sweep that was logged
	seed      maphash.Seed         // of fingerprints
	seen      fingerprint          // of the kernel when all was in place, zero if that is not known
	swept     fingerprint          // of the kernel at the last sweep
	unswept   bool                 // the last sweep failed
}

// A site is where rules of one family are.
type site struct {
	backend Backend
	family  Family
}

// cleared notes that the families of a backend that could be read have no rules of ours.
func (c *Capture) cleared(s *side) {
	for f := range s.saved {
		delete(c.placed, site{s.backend, f})
	}
}

// installed is what is in the kernel, as far as we did it.
type installed struct {
	backend  Backend
	reason   string // why this backend
	families map[Family]variant
	missing  map[Family]error // families that are wanted and not in
	lesser   map[Family]error // why those that are in have not the best variant
}

// complete reports whether everything is in that the configuration asks for.
func (in installed) complete() bool {
	return in.backend != "" && len(in.missing)+len(in.lesser) == 0
}

// New returns a Capture that has done nothing yet. A nil logger logs nothing.
func New(cfg Config, log *slog.Logger) (*Capture, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	c := &Capture{log: log, placed: make(map[site]bool), saidDrop: make(map[Family]string), seed: maphash.MakeSeed()}
	err := c.configure(cfg)
	if err == nil {
		c.publish()
	}
	return c, err
}

// configure takes over a configuration, or nothing if it is not valid.
func (c *Capture) configure(cfg Config) error {
	if cfg.Backend == "" {
		cfg.Backend = Auto
	}
	if cfg.Interval == 0 {
		cfg.Interval = DefaultConfig().Interval
	}
	if cfg.Settle == 0 {
		cfg.Settle = DefaultConfig().Settle
	}
	vs, err := variants(cfg)
	if err != nil {
		return err
	}
	c.cfg, c.variants = cfg, vs
	for _, server := range cfg.Servers {
		if passes(server) {
			c.log.Warn("queries to a link-local nameserver are not captured: the kernel cannot redirect them", "server", server)
		}
	}
	return nil
}

// Apply puts the rules in, in place of any others of ours, and takes them out of
// the backend in which they do not belong. It changes nothing if they are there
// already. From now on Run keeps them, even if Apply returns an error; call
// Remove to give up. Each family has all rules or none.
//
// What this machine lacks (a family, the zone) is done without, and logged. A failure
// that does not say so is retried for about 2 s; if it stays, rules that could be had
// are in, and Apply returns [ErrIncomplete]. After any other error the first Apply
// leaves no rules in.
func (c *Capture) Apply(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wanted = true
	changed, err := c.apply(ctx, patient)
	c.sayCaptured(changed, err)
	return withoutCapability(err)
}

// sayCaptured logs that rules were put in or exchanged.
func (c *Capture) sayCaptured(changed bool, err error) {
	if changed && err == nil {
		c.log.Info("DNS is captured", "port", c.cfg.Port, "backend", c.in.backend, "because", c.in.reason)
	}
}

// Reconfigure exchanges the configuration. If rules are in, the new ones take
// their place, and there is no moment in which queries are captured wrongly or
// not at all; with another port, replies that are on their way from the old one
// are lost. The interval is not exchanged in a Run that has begun.
func (c *Capture) Reconfigure(ctx context.Context, cfg Config) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.configure(cfg); err != nil || !c.wanted {
		return err
	}
	c.behind = true
	changed, err := c.apply(ctx, patient)
	c.sayCaptured(changed, err)
	return withoutCapability(err)
}

// apply puts the rules in with this many attempts, and says whether that changed
// anything. It is called with c.mu held, as all that follows.
func (c *Capture) apply(ctx context.Context, attempts int) (changed bool, err error) {
	defer c.publish()
	if err := checkMapped(c.cfg); err != nil {
		return false, err
	}
	nft, legacy := look(ctx, NFT), look(ctx, Legacy)
	chosen, reason, err := choose(c.cfg.Backend, nft, legacy, plainBackend(ctx))
	if err != nil {
		return false, err
	}
	rest := nft
	if chosen == nft {
		rest = legacy
	}
	changed, err = c.install(ctx, chosen, reason, attempts)
	if c.cfg.Backend == Auto && errors.Is(err, errNoTable) && !errors.Is(err, ErrIncomplete) && rest.usable() {
		chosen, rest = rest, chosen
		var err2 error
		changed, err2 = c.install(ctx, chosen, "the kernel has no tables for "+string(rest.backend), attempts)
		if err2 != nil {
			err2 = errors.Join(err2, err)
		}
		err = err2
	}
	if err != nil && !errors.Is(err, ErrIncomplete) {
		return changed, err
	}
	removed, restErr := removeSide(ctx, rest, attempts)
	changed = changed || removed
	if changed {
		c.sweep(true, true)
	}
	c.behind = c.behind && restErr != nil
	if restErr == nil {
		c.cleared(rest)
	}
	if restErr != nil {
		restErr = fmt.Errorf("%w: %w, %s: %w", ErrIncomplete, errElsewhere, rest.backend, restErr)
	}
	return changed, errors.Join(err, restErr)
}

// install puts the rules into one backend. If that fails and none were in
// before, none are in afterwards; else what could be kept is kept.
func (c *Capture) install(ctx context.Context, s *side, reason string, attempts int) (bool, error) {
	in := installed{backend: s.backend, reason: reason,
		families: make(map[Family]variant), missing: make(map[Family]error), lesser: make(map[Family]error)}
	changed := false
	for _, f := range families() {
		p := s.place(f, attempts)
		wanted := len(c.variants[0].rules.tables(f)) > 0
		var a applied
		var err error
		switch {
		case s.reason[f] != nil:
			if wanted {
				in.missing[f] = s.reason[f]
			}
			continue
		case !wanted:
			a.changed, err = p.remove(ctx)
		default:
			c.placed[site{s.backend, f}] = true
			if a, err = p.apply(ctx, s.saved[f], c.variants); err == nil {
				in.families[f] = a.variant
			}
		}
		changed = changed || a.changed
		switch {
		case err != nil:
			in.missing[f] = err
		case a.lesser != nil:
			in.lesser[f] = a.lesser
		}
	}
	err := c.acceptable(in)
	if err != nil && !errors.Is(err, ErrIncomplete) {
		if c.in.backend == "" {
			ctx := context.WithoutCancel(ctx)
			_, removeErr := removeSide(ctx, look(ctx, s.backend), brief)
			err = errors.Join(err, removeErr)
		}
		return changed, err
	}
	c.sayMissing(in)
	c.in = in
	return changed, err
}

// acceptable returns an error if a family is missing that cannot be done without, or if
// anything is for another reason than that this machine lacks it.
func (c *Capture) acceptable(in installed) error {
	var refused, passing []error
	for _, f := range families() {
		if err := in.missing[f]; err != nil {
			err = fmt.Errorf("capturing DNS over %s: %w", f, err)
			switch {
			case len(in.families) == 0 || f == IPv6 && c.cfg.IPv6 == On:
				refused = append(refused, err)
			case !lacks(in.missing[f]):
				passing = append(passing, err)
			}
		}
		if err := in.lesser[f]; err != nil && !lacks(err) {
			passing = append(passing, fmt.Errorf("DNS over %s is captured without %s: %w",
				f, strings.Join(in.families[f].without, ", "), err))
		}
	}
	switch {
	case len(refused) > 0:
		return errors.Join(refused...)
	case len(passing) > 0:
		return fmt.Errorf("%w: %w", ErrIncomplete, errors.Join(passing...))
	}
	return nil
}

// sayMissing logs what is done without, and what no longer is, once for as long as it is
// the same.
func (c *Capture) sayMissing(in installed) {
	for _, f := range families() {
		was, is := c.in.families[f], in.families[f]
		switch err, before := in.missing[f], c.in.missing[f]; {
		case err != nil && before == nil:
			c.log.Warn("DNS over one family is not captured", "family", f, "error", err)
		case err == nil && before != nil && len(in.families[f].rules.tables(f)) > 0:
			c.log.Info("DNS over this family is captured, too", "family", f)
		}
		switch {
		case slices.Equal(is.without, was.without):
		case len(is.without) > 0:
			c.log.Warn("capture rules lack something that this machine does not have",
				"family", f, "without", strings.Join(is.without, ", "), "error", in.lesser[f])
		case len(is.rules.tables(f)) > 0:
			c.log.Info("capture rules lack nothing any more", "family", f)
		}
	}
}

// sweep drops conntrack entries that keep queries off the agent, if rules have changed or
// may have. Leftovers are dropped when they have been there for the settle time. Without
// a zone other programs' entries look the same as ours that are stale, so the change must
// be certain. After a failure the next look does it again.
func (c *Capture) sweep(changed, maybe bool) {
	leftovers := make(map[string]time.Time)
	now := time.Now()
	changed = changed || c.unswept
	c.unswept = false
	for f, v := range c.in.families {
		if !changed && (v.zone == 0 || !maybe && len(c.leftovers) == 0) {
			continue
		}
		s := sweep{ports: []uint16{c.cfg.Port}, zone: v.zone}
		swept := c.drop(f, func(e conntrack.Entry) bool {
			if s.stale(e) {
				return true
			}
			if !s.leftover(e) {
				return false
			}
			seen, ok := c.leftovers[e.Key()]
			if !ok {
				seen = now
			}
			if now.Sub(seen) >= c.cfg.Settle {
				return true
			}
			leftovers[e.Key()] = seen
			return false
		})
		c.unswept = c.unswept || !swept
	}
	c.leftovers = leftovers
}

// drop drops the entries of a family that match, and logs a failure once. It
// reports whether it did.
func (c *Capture) drop(f Family, match func(conntrack.Entry) bool) bool {
	n, err := dropEntries(f, match)
	switch {
	case err == nil:
		delete(c.saidDrop, f)
	case c.saidDrop[f] != err.Error():
		c.saidDrop[f] = err.Error()
		c.log.Warn("sockets that have asked before may stay on their old path until they are closed",
			"family", f, "error", err)
	}
	if n > 0 {
		c.log.Debug("dropped conntrack entries", "family", f, "entries", n)
	}
	return err == nil
}

// publish makes what is in visible without the lock.
func (c *Capture) publish() {
	in, wanted := c.in, c.wanted
	levels := make(map[Family]Level)
	for _, f := range families() {
		v, ok := in.families[f]
		switch {
		case !wanted || len(c.variants[0].rules.tables(f)) == 0:
			levels[f] = LevelOff
		case !ok && lacks(in.missing[f]):
			levels[f] = LevelUnavailable
		case !ok:
			levels[f] = LevelFailed
		default:
			levels[f] = v.level()
		}
	}
	c.levels.Store(&levels)
}

// Levels returns what was last put in for each family. It does not look at the kernel,
// and never waits.
func (c *Capture) Levels() map[Family]Level { return *c.levels.Load() }
