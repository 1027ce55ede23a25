package iptables

import (
	"context"
	"errors"

	"github.com/nametap/nametap/internal/family"
)

// Status describes the rules that are in the kernel now, whatever program installed them.
type Status struct {
	// Backend is where the rules are, or where Apply would install them; Because says
	// why.
	Backend  Backend        `json:"backend"`
	Because  string         `json:"because"`
	Families []FamilyStatus `json:"families"`
}

// FamilyStatus is one family of a Status.
type FamilyStatus struct {
	Family family.Family `json:"family"`
	State  State         `json:"state"`
	// Port is the port of this host to which the rules redirect queries; 0 without such rules.
	Port uint16 `json:"port,omitempty"`
	// Lease is the state of the lease of the rules, which capture only while the lease has time left. It is "" if
	// the rules have no lease.
	Lease LeaseState `json:"lease,omitempty"`
	// Guard says what the rules of a guard do; "" without such rules. In an audit, Guarded has how many packets of each
	// protocol were not in the policy.
	Guard   GuardState        `json:"guard,omitempty"`
	Guarded map[string]uint64 `json:"guarded,omitempty"`
	// Without describes what the rules lack.
	Without []string `json:"without,omitempty"`
	// Others describes rules of Istio that capture port 53 too.
	Others []string `json:"others,omitempty"`
	// Drift lists how the rules differ from the configuration.
	Drift []string `json:"drift,omitempty"`
	// OtherBackend is true if rules of nametap are in the other backend, too.
	OtherBackend bool `json:"otherBackend,omitempty"`
	// Error says why the family is unavailable, not captured, or captured with reduced
	// rules.
	Error string `json:"error,omitempty"`
}

// State is the state of the rules of a family.
type State string

// The states of a family.
const (
	InPlace     State = "in place"
	Absent      State = "absent"
	Drifted     State = "drifted"
	NotWanted   State = "not wanted" // absent, as configured
	Unavailable State = "unavailable"
)

// LeaseState is the state of the lease of rules.
type LeaseState string

// The states of a lease. An agent renews the lease as long as the agent answers.
const (
	LeaseAlive LeaseState = "alive"
	LeaseEnded LeaseState = "ended" // the rules capture nothing
	// LeaseUnknown means that a firewall drops packets to loopback. It may drop the packets that renew
	// the lease, too.
	LeaseUnknown LeaseState = "unknown"
)

// leaseState reads the state of the lease of a family.
func leaseState(f family.Family) LeaseState {
	switch alive, err := Leased(f); {
	case err != nil:
		return LeaseUnknown
	case !alive:
		return LeaseEnded
	}
	return LeaseAlive
}

// A report is the state of a Capture, as other goroutines see it. It never changes.
type report struct {
	goal      *target
	inst      installation
	backend   Backend
	reason    string
	outdated  bool // the rules of goal may not be installed
	captured  bool
	remaining string
}

// level returns how much of a family is captured.
func (r *report) level(f family.Family) Level {
	v, ok := r.inst.families[f]
	switch {
	case !r.goal.On || !r.goal.captures(f) && r.inst.missing[f] == nil:
		return LevelOff
	case !ok && errors.Is(r.inst.missing[f], errMissing):
		return LevelUnavailable
	case !ok:
		return LevelFailed
	}
	return v.level()
}

// status returns the status of m, the rules in the kernel.
func (r *report) status(ctx context.Context, m machine) (Status, error) {
	s, other, reason, err := r.sides(m)
	if err != nil {
		return Status{}, withoutCapability(err)
	}
	status := Status{Backend: s.backend, Because: reason}
	for _, f := range family.All() {
		fs := FamilyStatus{Family: f, OtherBackend: other.saved[f].hasOwn(), Others: istioRules(f, m)}
		if err := s.reason[f]; err != nil {
			fs.State, fs.Error = Unavailable, err.Error()
		} else {
			r.state(&fs, s.saved[f])
			if fs.Guard = s.saved[f].guardState(); fs.Guard == GuardAudits {
				counted, _ := s.tools[f].read(ctx, "-c") // was readable a moment ago
				fs.Guarded = counted.guardCounts()
			}
		}
		status.Families = append(status.Families, fs)
	}
	return status, nil
}

// sides returns both backends. The result chosen is the backend that this process has chosen or, before that, the backend
// that it would choose.
func (r *report) sides(m machine) (chosen, other *side, reason string, err error) {
	if r.backend != "" {
		chosen, reason = m.side(r.backend), r.reason
	} else if chosen, reason, err = m.choose(r.goal.Config.Backend); err != nil {
		return nil, nil, "", err
	}
	return chosen, m.side(chosen.backend.other()), reason, nil
}

// state compares the saved rules with the rules that this process installed. If this process has installed none,
// state compares them with all variants, because this machine may support only some of them.
func (r *report) state(fs *FamilyStatus, s saved) {
	f, vs := fs.Family, r.goal.variantsFor(fs.Family, s)
	if v, ok := r.inst.families[f]; ok && !r.outdated {
		vs = []variant{v}
	}
	wanted := r.goal.wants(f)
	for _, err := range []error{r.inst.missing[f], r.inst.reduced[f]} {
		if err != nil && wanted {
			fs.Error = err.Error()
		}
	}
	if !s.hasOwn() {
		fs.State = NotWanted
		if wanted {
			fs.State = Absent
		}
		return
	}
	fs.Port = s.port()
	for _, v := range vs {
		if wanted && len(v.rules.drift(f, s)) == 0 {
			fs.State, fs.Without = InPlace, v.omitted
			if v.lease {
				fs.Lease = leaseState(f)
			}
			return
		}
	}
	fs.State, fs.Drift = Drifted, vs[0].rules.drift(f, s)
}
