package iptables

import (
	"reflect"
	"time"

	"github.com/nametap/nametap/internal/family"
)

// Desired says whether DNS is to be captured, and how.
type Desired struct {
	On bool
	// Because says why capture is on or off, for the log.
	Because string
	// Config says what is captured. A removal uses only its fields Settle, Patience and ToolDir.
	Config Config
}

// A target is a desired value and the variants of its rules. A target never changes.
type target struct {
	Desired
	set      bool // false before the first Set: there is nothing to do
	variants []variant
}

// wants reports whether there are rules for a family.
func (t *target) wants(f family.Family) bool { return len(t.variants[0].rules.tables(f)) > 0 }

// captures reports whether there are rules that capture the queries of a family.
func (t *target) captures(f family.Family) bool {
	return len(t.variants[0].rules.table(f, "nat").chains) > 0
}

// sameRules reports whether t asks for the same rules as other.
func (t *target) sameRules(other *target) bool {
	return t.set == other.set && t.On == other.On && reflect.DeepEqual(t.Config, other.Config)
}

// variantsFor returns the variants of the rules of a family, best first. inKernel has the rules in the kernel. If they
// have a lease, an agent may be renewing it, so the variants have a lease, too. They have none if the configuration
// wants rules that stay (FailClosed).
func (t *target) variantsFor(f family.Family, inKernel saved) []variant {
	vs := t.variants
	if inKernel.leased(f) && !t.Config.FailClosed {
		leased := t.Config
		leased.Lease = true
		vs, _ = variants(leased) // valid, as t.Config is
	}
	if inKernel[filterTable].unreadable && t.Config.Guard == nil {
		return withoutFilter(vs)
	}
	return vs
}

// A phase is what a Capture knows of the kernel.
type phase int

const (
	phaseUntouched phase = iota // no step was taken
	phaseCaptured               // the rules of the goal are installed, as far as this machine supports them
	phaseOutdated               // other rules are installed, or may be
	phaseUnhooked               // nothing is captured; chains stay for replies in flight
	phaseRemoved                // nothing of nametap is left
)

// An Ending says what Keep does with the rules at its end.
type Ending int32

const (
	// Settle removes the rules, and waits for replies in flight: the zero value.
	Settle Ending = iota
	// Soon removes the rules, and waits only soonSettle for replies in flight.
	Soon
	// Leave leaves the rules to another process.
	Leave
)

// soonSettle is the settle time of Soon. Nearby nameservers have replied by then.
const soonSettle = 100 * time.Millisecond
