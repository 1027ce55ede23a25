package iptables

import (
	"context"
	"errors"
	"slices"
)

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

// Status describes the rules that are in the kernel now, whatever program installed them.
type Status struct {
	// Backend is where the rules are, or where Apply would install them; Because says
	// why.
	Backend  Backend        `json:"backend"`
	Because  string         `json:"because"`
	Families []FamilyStatus `json:"families"`
}

// LeaseState is the state of the lease of rules.
type LeaseState string

// The states of a lease. An agent renews it as long as it answers.
const (
	LeaseAlive LeaseState = "alive"
	LeaseEnded LeaseState = "ended" // the rules capture nothing
	// LeaseUnknown means that a firewall drops packets to loopback. It may drop the packets that renew
	// the lease, too.
	LeaseUnknown LeaseState = "unknown"
)

// leaseState reads the state of the lease of a family.
func leaseState(f Family) LeaseState {
	switch alive, err := Leased(f); {
	case err != nil:
		return LeaseUnknown
	case !alive:
		return LeaseEnded
	}
	return LeaseAlive
}

// FamilyStatus is one family of a Status.
type FamilyStatus struct {
	Family Family `json:"family"`
	State  State  `json:"state"`
	// Port is the port of this host to which the rules redirect queries; 0 without such rules.
	Port uint16 `json:"port,omitempty"`
	// Zone reports whether captured queries have a conntrack zone of their own.
	Zone bool `json:"zone"`
	// Lease tells whether the rules capture now, if the kernel ends the capture without an agent; ""
	// if it does not.
	Lease LeaseState `json:"lease,omitempty"`
	// Without describes what the rules lack.
	Without []string `json:"without,omitempty"`
	// Passes describes queries that pass through because rules cannot capture them.
	Passes []string `json:"passes,omitempty"`
	// Unserved describes queries that are captured but that the kernel cannot deliver.
	Unserved []string `json:"unserved,omitempty"`
	// Others describes rules of other programs that capture port 53 too.
	Others []string `json:"others,omitempty"`
	// Drift lists how the rules differ from the configuration.
	Drift []string `json:"drift,omitempty"`
	// OtherBackend reports that rules of nametap are in the other backend too.
	OtherBackend bool `json:"otherBackend,omitempty"`
	// Error says why the family is unavailable, not captured, or captured with reduced
	// rules.
	Error string `json:"error,omitempty"`
}

// A report is the state of a Capture for other goroutines. It never changes.
type report struct {
	goal      *target
	in        installed
	outdated  bool // what is installed is not of goal
	unleased  bool // rules were installed that capture without an agent
	captured  bool
	remaining string
	levels    map[Family]Level
}

// publish makes the state visible to other goroutines.
func (c *Capture) publish() {
	r := &report{goal: c.goal, in: c.in, outdated: c.phase != captured, unleased: c.unleased, captured: c.captured, levels: make(map[Family]Level)}
	if c.retries.reported != nil {
		r.remaining = c.retries.reported.Error()
	}
	for _, f := range families() {
		r.levels[f] = c.level(f)
	}
	c.report.Store(r)
	if c.changes {
		c.changes = false
		wake(c.installed)
	}
}

// level returns the level of a family.
func (i *installer) level(f Family) Level {
	v, ok := i.in.families[f]
	switch {
	case !i.goal.On || len(i.goal.variants[0].rules.tables(f)) == 0:
		return LevelOff
	case !ok && unsupported(i.in.missing[f]):
		return LevelUnavailable
	case !ok:
		return LevelFailed
	}
	return v.level()
}

// Levels returns how much of each family is captured, as the last step left it. It does not
// read the kernel.
func (c *Capture) Levels() map[Family]Level { return c.report.Load().levels }

// Missing reports whether the last attempt to install the rules of a family has failed.
func (c *Capture) Missing(f Family) bool { return c.Failure(f) != nil }

// Failure returns why the last attempt to install the rules of a family has failed, nil if it has not.
func (c *Capture) Failure(f Family) error { return c.report.Load().in.missing[f] }

// Captured reports whether rules were installed and not removed since.
func (c *Capture) Captured() bool { return c.report.Load().captured }

// Active reports whether queries are captured: rules are installed, and match.
func (c *Capture) Active() bool {
	r := c.report.Load()
	active := len(r.in.families) == 0 && !r.outdated // no nameserver can be captured
	for f, v := range r.in.families {
		active = active || !v.lease || c.lease.alive(f)
	}
	return r.captured && (active || r.unleased && r.outdated) // a removal may have failed
}

// Leased reports whether the rules that are installed have a lease: the kernel ends the capture when no
// agent renews it.
func (c *Capture) Leased() bool {
	in := c.report.Load().in
	for _, v := range in.families {
		if !v.lease {
			return false
		}
	}
	return len(in.families) > 0
}

// Remaining says why rules that are to be removed are or may be still there. It is "" if no
// removal has failed.
func (c *Capture) Remaining() string { return c.report.Load().remaining }

// Stats counts what Keep has done.
type Stats struct {
	Checks   uint64 // checks of the rules
	Repairs  uint64 // drifts that were repaired
	Failures uint64 // checks, repairs and retries that failed
	Drift    string // that was repaired last
}

// Stats returns the counts so far.
func (c *Capture) Stats() Stats {
	stats := Stats{Checks: c.checks.Load(), Repairs: c.repairs.Load(), Failures: c.failures.Load()}
	if drift := c.drift.Load(); drift != nil {
		stats.Drift = *drift
	}
	return stats
}

// Status reads both backends. It changes nothing and does not wait for Keep.
func (c *Capture) Status(ctx context.Context) (Status, error) {
	r := c.report.Load()
	return r.status(inspectAll(ctx, r.goal.Config))
}

// Applied is Status as the last [Capture.Apply] has left the rules. It reads nothing, and must not be called while
// rules are changed.
func (c *Capture) Applied() (Status, error) { return c.report.Load().status(c.applied) }

// status returns the status of what the kernel has.
func (r *report) status(m machine) (Status, error) {
	s, other, reason, err := r.sides(m)
	if err != nil {
		return Status{}, withoutCapability(err)
	}
	status := Status{Backend: s.backend, Because: reason}
	for _, f := range families() {
		fs := FamilyStatus{Family: f, OtherBackend: other.saved[f].hasOwn(),
			Others: others(f, s, other)}
		if err := s.reason[f]; err != nil {
			fs.State, fs.Error = Unavailable, err.Error()
		} else {
			r.state(&fs, s.saved[f])
		}
		status.Families = append(status.Families, fs)
	}
	return status, nil
}

// EndsByItself reports whether all rules of nametap in the kernel have a lease: they capture nothing when no
// agent renews it.
func (c *Capture) EndsByItself(ctx context.Context) bool {
	return inspectAll(ctx, c.goal.Config).endsByItself()
}

// sides returns both backends, the one for the rules first.
func (r *report) sides(m machine) (chosen, other *side, reason string, err error) {
	if r.in.backend != "" {
		chosen, reason = m.side(r.in.backend), r.in.reason
	} else if chosen, reason, err = m.choose(r.goal.Config.Backend); err != nil {
		return nil, nil, "", err
	}
	return chosen, m.side(chosen.backend.other()), reason, nil
}

// state compares the saved rules with the rules that this process installed. If it
// installed none, it compares them with all variants, because this machine may support no
// better one.
func (r *report) state(fs *FamilyStatus, s saved) {
	f, vs := fs.Family, r.goal.variantsFor(fs.Family, s)
	if v, ok := r.in.families[f]; ok && !r.outdated {
		vs = []variant{v}
	}
	wanted := len(vs[0].rules.tables(f)) > 0
	for _, err := range []error{r.in.missing[f], r.in.reduced[f]} {
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
			fs.State, fs.Zone, fs.Without = InPlace, v.zone != 0, v.without
			fs.Unserved = []string{"queries of sockets that are bound to a device (SO_BINDTODEVICE, VRF): exclude them with --capture-exclude-interface, --capture-exclude-uid or --capture-exclude-gid"}
			if v.lease {
				fs.Lease = leaseState(f)
			}
			if f == IPv6 {
				fs.Passes = []string{"queries to link-local nameservers (" + linkLocal + ")"}
			}
			return
		}
	}
	fs.State, fs.Zone, fs.Drift = Drifted, slices.Contains(s["raw"].ownChains(), outputChain), vs[0].rules.drift(f, s)
}

// Step is a text that Apply passes to a program.
type Step struct {
	Program string `json:"program"`
	Text    string `json:"text"`
}

// Plan returns the texts that Apply would restore now, in order, and changes nothing. It is
// empty if all rules are installed. If this machine lacks something (see Check), Apply goes on
// to texts without it.
func (c *Capture) Plan(ctx context.Context) ([]Step, error) {
	r := c.report.Load()
	return r.plan(inspectAll(ctx, r.goal.Config))
}

// plan returns the texts that turn what the kernel has into the rules of the goal.
func (r *report) plan(m machine) ([]Step, error) {
	s, other, _, err := r.sides(m)
	if err != nil {
		return nil, err
	}
	var steps []Step
	add := func(t tools, text string) {
		if text != "" {
			steps = append(steps, Step{Program: t.restore + " --noflush -w " + lockWait, Text: text})
		}
	}
	for _, f := range families() {
		if have, ok := s.saved[f]; ok {
			add(s.tools[f], r.goal.variantsFor(f, have)[0].rules.change(f, have, s.place(f, 1).marks))
		}
	}
	for _, f := range families() {
		add(other.tools[f], Rules{}.change(f, other.saved[f], noMark))
	}
	if len(s.saved) == 0 {
		return nil, errors.Join(s.reason[IPv4], s.reason[IPv6])
	}
	return steps, nil
}
