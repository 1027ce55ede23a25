package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
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
	sweepAt  time.Time // when entries that had to wait are dropped, zero if none
	said     string    // the last failure of Run's that was logged
}

// installed is what is in the kernel, as far as we did it.
type installed struct {
	backend  Backend
	reason   string // why this backend
	families map[Family]variant
	missing  map[Family]error // families that are done without
}

// New returns a Capture that has done nothing yet. A nil logger logs nothing.
func New(cfg Config, log *slog.Logger) (*Capture, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	c := &Capture{log: log}
	return c, c.configure(cfg)
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
	return nil
}

// Apply puts the rules in, in place of any others of ours, and takes them out of
// the backend in which they do not belong. It changes nothing if they are there
// already. From now on Run keeps them, even if Apply returns an error; call
// Remove to give up. Each family has all rules or none; an error in the first
// Apply leaves none in any, unless it is that the other backend cannot be cleared.
// What Apply does without (a family, the zone) is logged.
func (c *Capture) Apply(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wanted = true
	changed, err := c.apply(ctx)
	c.sayCaptured(changed, err)
	return err
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
	changed, err := c.apply(ctx)
	c.sayCaptured(changed, err)
	return err
}

// apply says whether it had to change anything. It is called with c.mu held, as all
// that follows.
func (c *Capture) apply(ctx context.Context) (changed bool, err error) {
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
	changed, err = c.install(ctx, chosen, reason)
	if c.cfg.Backend == Auto && errors.Is(err, errNoTable) && rest.usable() {
		chosen, rest = rest, chosen
		var err2 error
		changed, err2 = c.install(ctx, chosen, "the kernel has no tables for "+string(rest.backend))
		if err2 != nil {
			err2 = errors.Join(err, err2)
		}
		err = err2
	}
	if err != nil {
		return changed, err
	}
	removed, err := removeSide(ctx, rest)
	changed = changed || removed
	if changed {
		c.sweep(false)
		c.sweepAt = time.Now().Add(c.cfg.Settle)
	}
	c.behind = c.behind && err != nil
	return changed, err
}

// install puts the rules into one backend. If that fails and none were in
// before, none are in afterwards; else what could be kept is kept.
func (c *Capture) install(ctx context.Context, s *side, reason string) (bool, error) {
	in := installed{backend: s.backend, reason: reason,
		families: make(map[Family]variant), missing: make(map[Family]error)}
	changed := false
	for _, f := range families() {
		p := place{s.backend, f, s.tools[f]}
		wanted := len(c.variants[0].rules.tables(f)) > 0
		var did bool
		var err error
		switch {
		case s.reason[f] != nil:
			if wanted {
				in.missing[f] = s.reason[f]
			}
			continue
		case !wanted:
			did, err = p.remove(ctx)
		default:
			in.families[f], did, err = p.apply(ctx, s.saved[f], c.variants)
		}
		changed = changed || did
		if err != nil {
			delete(in.families, f)
			in.missing[f] = err
		}
	}
	if err := c.acceptable(in); err != nil {
		if c.in.backend == "" {
			_, removeErr := removeSide(context.WithoutCancel(ctx), look(context.WithoutCancel(ctx), s.backend))
			err = errors.Join(err, removeErr)
		}
		return changed, err
	}
	c.sayMissing(in)
	c.in = in
	return changed, nil
}

// acceptable returns an error if a family is missing that cannot be done without.
func (c *Capture) acceptable(in installed) error {
	var errs []error
	for _, f := range families() {
		err := in.missing[f]
		if err == nil {
			continue
		}
		unavailable := errors.Is(err, errTool) || lacking(err)
		if len(in.families) == 0 || !unavailable || f == IPv6 && c.cfg.IPv6 == On {
			errs = append(errs, fmt.Errorf("capturing DNS over %s: %w", f, err))
		}
	}
	return errors.Join(errs...)
}

// sayMissing logs what is done without, once for as long as it is the same.
func (c *Capture) sayMissing(in installed) {
	for _, f := range families() {
		if err := in.missing[f]; err != nil && c.in.missing[f] == nil {
			c.log.Warn("DNS over one family is not captured", "family", f, "error", err)
		}
		if v := in.families[f]; len(v.without) > 0 && !slices.Equal(v.without, c.in.families[f].without) {
			c.log.Warn("capture rules lack something that this machine does not have",
				"family", f, "without", strings.Join(v.without, ", "))
		}
	}
}

// sweep drops conntrack entries that keep queries off the agent.
func (c *Capture) sweep(late bool) {
	for f, v := range c.in.families {
		s := sweep{ports: []uint16{c.cfg.Port}, zone: v.zone, late: late}
		c.drop(f, s.stale)
	}
}

func (c *Capture) drop(f Family, stale func(flow) bool) {
	n, err := dropFlows(f, stale)
	if err != nil {
		c.log.Warn("sockets that have asked before may stay on their old path until they are closed",
			"family", f, "error", err)
	} else if n > 0 {
		c.log.Debug("dropped conntrack entries", "family", f, "entries", n)
	}
}
