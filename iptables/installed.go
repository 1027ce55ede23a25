package iptables

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/nametap/nametap/internal/family"
)

// An installation is what this process has put into the kernel.
type installation struct {
	backend  Backend
	reason   string // why this backend
	families map[family.Family]variant
	missing  map[family.Family]error // why families that are wanted are not installed
	reduced  map[family.Family]error // why installed families do not have the best variant
}

// complete reports whether everything that the configuration asks for is installed.
func (inst installation) complete() bool {
	return inst.backend != "" && len(inst.missing)+len(inst.reduced) == 0
}

// failed reports whether something that this machine may support is missing.
func (inst installation) failed() bool {
	for _, f := range family.All() {
		if err := cmp.Or(inst.missing[f], inst.reduced[f]); err != nil && !unsupported(err) {
			return true
		}
	}
	return false
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

// validate returns an error if no wanted family is installed, or [ErrIncomplete] if something that this machine may
// support is missing.
func (inst installation) validate() error {
	var refused, passing []error
	for _, f := range family.All() {
		if err := inst.missing[f]; err != nil {
			err = fmt.Errorf("capturing DNS over %s: %w", f, err)
			switch {
			case len(inst.families) == 0:
				refused = append(refused, err)
			case !unsupported(inst.missing[f]):
				passing = append(passing, err)
			}
		}
		if err := inst.reduced[f]; err != nil && !unsupported(err) {
			passing = append(passing, fmt.Errorf("DNS over %s is captured without %s: %w",
				f, strings.Join(inst.families[f].omitted, ", "), err))
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
