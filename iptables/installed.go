package iptables

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/nametap/nametap/internal/family"
)

// An installation is what this process has put into the kernel.
type installation struct {
	backend   Backend // "" if nothing is installed
	families  map[family.Family]variant
	missing   map[family.Family]error // why families that are wanted are not installed
	reduced   map[family.Family]error // why installed families do not have the best variant
	elsewhere error                   // why rules of nametap remain in the other backend
}

// complete reports whether everything that the configuration asks for is installed.
func (inst installation) complete() bool {
	return inst.backend != "" && len(inst.missing)+len(inst.reduced) == 0 && inst.elsewhere == nil
}

// failed reports whether something that this machine may support is missing, or is to be removed.
func (inst installation) failed() bool {
	for _, f := range family.All() {
		if err := cmp.Or(inst.missing[f], inst.reduced[f]); err != nil && !errors.Is(err, errMissing) {
			return true
		}
	}
	return inst.elsewhere != nil
}

// unleased reports whether the rules of any family capture without an agent.
func (inst installation) unleased() bool {
	for _, v := range inst.families {
		if !v.lease {
			return true
		}
	}
	return false
}

// unguarded returns an error if the configuration has a guard and this machine does not support its rules for a family that
// the kernel has: then what the guard is to refuse would leave over that family.
func (inst installation) unguarded(cfg Config) error {
	for _, f := range family.All() {
		if err := inst.missing[f]; cfg.Guard != nil && errors.Is(err, errMissing) && !lacksFamily(f) {
			return fmt.Errorf("guarding %s: %w", f, err)
		}
	}
	return nil
}

// validate returns an error if no wanted family is installed, or [ErrIncomplete] if a family that this machine may
// support is missing.
func (inst installation) validate() error {
	var errs []error
	for _, f := range family.All() {
		if err := inst.missing[f]; err != nil && (len(inst.families) == 0 || !errors.Is(err, errMissing)) {
			errs = append(errs, fmt.Errorf("capturing DNS over %s: %w", f, err))
		}
	}
	switch err := errors.Join(errs...); {
	case err == nil || len(inst.families) == 0:
		return err
	default:
		return fmt.Errorf("%w: %w", ErrIncomplete, err)
	}
}
