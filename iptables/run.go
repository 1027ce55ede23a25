package iptables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"
)

// Stats counts what Run has done.
type Stats struct {
	Checks   uint64 // looks at the rules
	Repairs  uint64 // drifts that were mended
	Failures uint64 // looks or repairs that failed
}

// Stats returns the counts so far.
func (c *Capture) Stats() Stats {
	return Stats{Checks: c.checks.Load(), Repairs: c.repairs.Load(), Failures: c.failures.Load()}
}

// Run looks at the rules every Config.Interval and mends what differs, as long
// as they are wanted: from Apply to Remove. Each repair is counted and logged,
// with all that had drifted. Run returns nil when ctx ends, and leaves the rules in.
func (c *Capture) Run(ctx context.Context) error {
	c.mu.Lock()
	ticker := time.NewTicker(c.cfg.Interval)
	c.mu.Unlock()
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			c.reconcile(ctx)
		}
	}
}

// reconcile is one look, and the repair that it calls for. While something is missing it
// is tried again.
func (c *Capture) reconcile(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.wanted {
		return
	}
	c.checks.Add(1)
	now, err := c.fingerprint() // before the look, which may miss what comes after it
	known, settled := err == nil, c.in.complete() && !c.behind
	// Rules that differed for a while, shorter than the interval, have left entries.
	// Legacy has no number that counts changes, so there they may always have.
	c.sweep(known && now != c.swept, c.in.backend == Legacy)
	c.swept = now
	if known && settled && now == c.seen {
		return
	}
	c.seen = fingerprint{}
	same, err := c.look(ctx)
	if ctx.Err() != nil {
		return
	}
	if same && known {
		c.seen = now
	}
	c.sayFailure(err)
}

// look looks at the rules themselves and repairs what differs. It reports whether
// nothing did.
func (c *Capture) look(ctx context.Context) (same bool, err error) {
	drifts, err := c.drifted(ctx)
	if err != nil || len(drifts) == 0 && c.in.complete() {
		return err == nil, err
	}
	changed, err := c.apply(ctx, brief)
	switch {
	case err != nil && (!errors.Is(err, ErrIncomplete) || errors.Is(err, errElsewhere)):
	case len(drifts) > 0:
		c.log.Warn("capture rules had drifted and are mended", "drift", drifts)
		c.repairs.Add(1)
	case changed:
		c.sayCaptured(true, nil)
	}
	return false, err
}

// A fingerprint tells whether rules may have changed in the kernel. Two that are equal
// were taken with nothing changed in between, but for changes of legacy's rules that were
// undone.
type fingerprint struct {
	generation uint32 // of nft
	legacy     uint64 // a hash
}

// fingerprint takes it, which costs far less than a look at the rules.
func (c *Capture) fingerprint() (fingerprint, error) {
	generation, err := nftGeneration()
	if err != nil && !is(err, unix.EOPNOTSUPP, unix.EINVAL, unix.EPROTONOSUPPORT) { // no nft
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

// sayFailure counts a failure, and logs it if it is not the same as before.
func (c *Capture) sayFailure(err error) {
	if err == nil {
		c.said = ""
		return
	}
	c.failures.Add(1)
	if text := err.Error(); text != c.said {
		c.said = text
		c.log.LogAttrs(context.Background(), slog.LevelError, "capture rules cannot be kept", slog.Any("error", err))
	}
}

// drifted returns in how far the kernel differs from what Apply has put in.
func (c *Capture) drifted(ctx context.Context) ([]string, error) {
	if c.in.backend == "" {
		return []string{"the rules are not in yet"}, nil
	}
	if c.behind {
		return []string{"the rules are those of the configuration before"}, nil
	}
	s, rest := look(ctx, c.in.backend), look(ctx, c.in.backend.other())
	var drifts []string
	var errs []error
	for _, f := range families() {
		v, ok := c.in.families[f]
		if ok && s.reason[f] != nil {
			errs = append(errs, s.reason[f])
			continue
		}
		if err := rest.reason[f]; mayPass(err) {
			errs = append(errs, err)
		}
		if ok || c.in.missing[f] == nil {
			for _, d := range v.rules.drift(f, s.saved[f]) {
				drifts = append(drifts, fmt.Sprintf("%s: %s", f, d))
			}
		}
		if rest.saved[f].ours() {
			drifts = append(drifts, fmt.Sprintf("%s: rules of ours are in backend %s too", f, rest.backend))
		}
	}
	return drifts, errors.Join(errs...)
}
