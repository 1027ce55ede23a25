package iptables

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/nametap/nametap/internal/family"
)

// installed is what this process has put into the kernel.
type installed struct {
	backend  Backend
	reason   string // why this backend
	families map[family.Family]variant
	missing  map[family.Family]error // why families that are wanted are not installed
	reduced  map[family.Family]error // why installed families do not have the best variant
}

// complete reports whether everything that the configuration asks for is installed.
func (in installed) complete() bool {
	return in.backend != "" && len(in.missing)+len(in.reduced) == 0
}

// failed reports whether something that this machine may support is missing.
func (in installed) failed() bool {
	for _, f := range family.All() {
		if err := cmp.Or(in.missing[f], in.reduced[f]); err != nil && !unsupported(err) {
			return true
		}
	}
	return false
}

// unleased reports whether the rules of any family capture without an agent.
func (in installed) unleased() bool {
	for _, v := range in.families {
		if !v.lease {
			return true
		}
	}
	return false
}

// acceptable returns an error if no wanted family is installed, or [ErrIncomplete] if something that this machine
// may support is missing.
func (in installed) acceptable() error {
	var refused, passing []error
	for _, f := range family.All() {
		if err := in.missing[f]; err != nil {
			err = fmt.Errorf("capturing DNS over %s: %w", f, err)
			switch {
			case len(in.families) == 0:
				refused = append(refused, err)
			case !unsupported(in.missing[f]):
				passing = append(passing, err)
			}
		}
		if err := in.reduced[f]; err != nil && !unsupported(err) {
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
