package iptables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"

	"golang.org/x/sys/unix"
)

// check looks whether the rules are as they were put in, and repairs what differs. What
// is missing is tried again.
func (c *Capture) check(ctx context.Context) error {
	c.checks.Add(1)
	now, err := c.fingerprint() // before the look, which may miss what comes after it
	known := err == nil
	// Rules that differed for a while, shorter than the interval, have left entries.
	// Legacy has no number that counts changes, so there they may always have.
	c.entries.sweep(c.goal.Config, c.in, known && now != c.entries.swept, c.in.backend == Legacy)
	c.entries.swept = now
	if known && c.in.complete() && now == c.seen {
		return nil
	}
	c.seen = fingerprint{}
	same, err := c.repair(ctx)
	if same && known {
		c.seen = now
	}
	return err
}

// repair reads the rules and repairs what differs. It reports whether nothing did.
func (c *Capture) repair(ctx context.Context) (same bool, err error) {
	drifts, err := c.drifted(ctx)
	if err != nil || len(drifts) == 0 && c.in.complete() {
		return err == nil, err
	}
	changed, err := c.apply(ctx, brief)
	switch {
	case err != nil && (!errors.Is(err, ErrIncomplete) || errors.Is(err, errElsewhere)):
	case len(drifts) > 0:
		c.log.Warn("capture rules had drifted and were repaired", "drift", drifts)
		c.repairs.Add(1)
	default:
		c.sayCaptured(changed, nil)
	}
	return false, err
}

// A fingerprint tells whether rules may have changed in the kernel. Two that are equal
// were taken with nothing changed in between, except changes of legacy's rules that were
// undone.
type fingerprint struct {
	generation uint32 // of nft
	legacy     uint64 // a hash
}

// fingerprint takes it, which costs far less than to read the rules.
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

// drifted lists how the kernel differs from what was put in; empty if it does not.
func (c *Capture) drifted(ctx context.Context) ([]string, error) {
	s, other := look(ctx, c.in.backend), look(ctx, c.in.backend.other())
	var drifts []string
	var errs []error
	for _, f := range families() {
		v, ok := c.in.families[f]
		if ok && s.reason[f] != nil {
			errs = append(errs, s.reason[f])
			continue
		}
		if err := other.reason[f]; mayPass(err) {
			errs = append(errs, err)
		}
		if ok || c.in.missing[f] == nil {
			for _, d := range v.rules.drift(f, s.saved[f]) {
				drifts = append(drifts, fmt.Sprintf("%s: %s", f, d))
			}
		}
		if other.saved[f].ours() {
			drifts = append(drifts, fmt.Sprintf("%s: backend %s has rules of nametap too", f, other.backend))
		}
	}
	return drifts, errors.Join(errs...)
}
