package iptables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"

	"golang.org/x/sys/unix"
)

// check compares the kernel with what was installed, repairs what differs, and tries again what
// is missing.
func (c *Capture) check(ctx context.Context) error {
	c.checks.Add(1)
	now, err := c.fingerprint() // before the rules are read, or a change in between would be missed
	known := err == nil
	if begins := c.begins.Swap(false); begins || c.entries.pending() {
		c.entries.sweep(c.goal.Config, c.in, begins)
	}
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

// repair reads the rules and repairs what differs. same reports that nothing did.
func (c *Capture) repair(ctx context.Context) (same bool, err error) {
	m := c.goal.Config.toolbox().inspectAll(ctx)
	drifts, err := c.drifted(m)
	if err != nil || len(drifts) == 0 && c.in.complete() {
		return err == nil, err
	}
	changed, err := c.apply(ctx, m, brief)
	switch {
	case err != nil && (!errors.Is(err, ErrIncomplete) || errors.Is(err, errElsewhere)):
	case len(drifts) > 0:
		c.log.Warn("capture rules had drifted and were repaired", "drift", drifts)
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

// drifted lists how the kernel differs from what was installed; empty if it does not.
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
			for _, d := range v.rules.drift(f, s.saved[f]) {
				drifts = append(drifts, fmt.Sprintf("%s: %s", f, d))
			}
		}
		if other.saved[f].hasOwn() {
			drifts = append(drifts, fmt.Sprintf("%s: backend %s has rules of nametap too", f, other.backend))
		}
	}
	return drifts, errors.Join(errs...)
}
