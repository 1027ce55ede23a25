package iptables

import (
	"context"
	"errors"
	"slices"
)

// State says how the rules of a family are.
type State string

// The states of a family.
const (
	InPlace     State = "in place"
	Absent      State = "absent"
	Drifted     State = "drifted"
	NotWanted   State = "not wanted" // and absent
	Unavailable State = "unavailable"
)

// Status is what is in the kernel now, whoever put it there.
type Status struct {
	// Backend is where the rules are, or where Apply would put them, and
	// Because says why there.
	Backend  Backend        `json:"backend"`
	Because  string         `json:"because"`
	Families []FamilyStatus `json:"families"`
}

// FamilyStatus is one family of a Status.
type FamilyStatus struct {
	Family Family `json:"family"`
	State  State  `json:"state"`
	// Zone says whether captured queries have a conntrack zone of their own.
	Zone bool `json:"zone"`
	// Without is what the rules lack, in words.
	Without []string `json:"without,omitempty"`
	// Passes names queries that rules cannot capture, and that go past them.
	Passes []string `json:"passes,omitempty"`
	// Unserved names queries that are captured and that the kernel cannot deliver.
	Unserved []string `json:"unserved,omitempty"`
	// Others describes rules of other programs that capture port 53, too.
	Others []string `json:"others,omitempty"`
	// Drift is how the rules differ from the configuration's.
	Drift []string `json:"drift,omitempty"`
	// OtherBackend says that rules of ours are in the other backend too.
	OtherBackend bool `json:"otherBackend,omitempty"`
	// Error is why the family is unavailable, or not captured, or captured with lesser rules.
	Error string `json:"error,omitempty"`
}

// Status reads both backends and changes nothing.
func (c *Capture) Status(ctx context.Context) (Status, error) {
	r := c.report.Load()
	s, rest, reason, err := r.sides(ctx)
	if err != nil {
		return Status{}, withoutCapability(err)
	}
	status := Status{Backend: s.backend, Because: reason}
	for _, f := range families() {
		fs := FamilyStatus{Family: f, OtherBackend: rest.saved[f].ours(),
			Others: slices.Concat(s.saved[f].istio(), rest.saved[f].istio())}
		if err := s.reason[f]; err != nil {
			fs.State, fs.Error = Unavailable, err.Error()
		} else {
			r.state(&fs, s.saved[f])
		}
		status.Families = append(status.Families, fs)
	}
	return status, nil
}

// sides looks at both backends: that of the rules first.
func (r *report) sides(ctx context.Context) (chosen, rest *side, reason string, err error) {
	nft, legacy := look(ctx, NFT), look(ctx, Legacy)
	if r.in.backend != "" {
		chosen, reason = nft, r.in.reason
		if r.in.backend == Legacy {
			chosen = legacy
		}
	} else if chosen, reason, err = choose(r.goal.Config.Backend, nft, legacy, plainBackend(ctx)); err != nil {
		return nil, nil, "", err
	}
	if chosen == nft {
		return nft, legacy, reason, nil
	}
	return legacy, nft, reason, nil
}

// state compares what is saved with what Apply put in; if this Capture has not,
// with all that it may have put in, since a machine without zones stays one.
func (r *report) state(fs *FamilyStatus, s saved) {
	f, vs := fs.Family, r.goal.variants
	if v, ok := r.in.families[f]; ok && !r.outdated {
		vs = []variant{v}
	}
	wanted := len(vs[0].rules.tables(f)) > 0
	for _, err := range []error{r.in.missing[f], r.in.lesser[f]} {
		if err != nil && wanted {
			fs.Error = err.Error()
		}
	}
	if !s.ours() {
		fs.State = NotWanted
		if wanted {
			fs.State = Absent
		}
		return
	}
	for _, v := range vs {
		if wanted && len(v.rules.drift(f, s)) == 0 {
			fs.State, fs.Zone, fs.Without = InPlace, v.rules.zoned(f), v.without
			fs.Unserved = []string{"queries of sockets that are bound to a device (SO_BINDTODEVICE, VRF): let them pass by --capture-exclude-interface, --capture-exclude-uid or --capture-exclude-gid"}
			if f == IPv6 {
				fs.Passes = []string{"queries to link-local nameservers (" + linkLocal + ")"}
			}
			return
		}
	}
	fs.State, fs.Zone, fs.Drift = Drifted, len(s["raw"].own()) > 0, vs[0].rules.drift(f, s)
}

// Step is a text that Apply gives to a program.
type Step struct {
	Program string `json:"program"`
	Text    string `json:"text"`
}

// Plan returns the texts that Apply would restore now, in order, and does nothing.
// It is empty if all is in place. Where this machine lacks something (see Check),
// Apply goes on to texts without it.
func (c *Capture) Plan(ctx context.Context) ([]Step, error) {
	r := c.report.Load()
	s, rest, _, err := r.sides(ctx)
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
			add(s.tools[f], r.goal.variants[0].rules.change(f, have, s.backend == NFT))
		}
	}
	for _, f := range families() {
		add(rest.tools[f], Rules{}.change(f, rest.saved[f], false))
	}
	if len(s.saved) == 0 {
		return nil, errors.Join(s.reason[IPv4], s.reason[IPv6])
	}
	return steps, nil
}
