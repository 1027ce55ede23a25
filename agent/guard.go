package agent

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/iptables"
)

// WithPolicy returns a configuration of rules with those for the policy of a guard. Without a policy, it returns cfg.
func WithPolicy(cfg iptables.Config, p *guard.Policy) iptables.Config {
	if p == nil {
		return cfg
	}
	cfg.Guard = &iptables.Guard{Audit: !p.Enforces()}
	for _, d := range p.Direct {
		cfg.Guard.Direct = append(cfg.Guard.Direct, iptables.Direct(d))
	}
	for _, r := range guard.VIPs() {
		if !slices.ContainsFunc(cfg.VIPs, func(p netip.Prefix) bool { return p.Overlaps(r) }) {
			cfg.VIPs = append(slices.Clip(cfg.VIPs), r)
		}
	}
	return cfg
}

// observeGuard finds out whether the kernel refuses what the policy does not allow, if the policy is enforced.
func (c *core) observeGuard(ctx context.Context) {
	var found []probe.Refusal
	if p := c.config.Guard.Policy(); p.Enforces() {
		found = Refusals(ctx, p)
	}
	if c.refusals.Store(&found); c.capture != nil && len(c.refusalsIn(probe.Passed)) > 0 {
		c.capture.kernel.Look() // legacy announces no change
	}
}

// Refusals tries whether the kernel refuses what a policy does not allow, over each family.
func Refusals(ctx context.Context, p *guard.Policy) []probe.Refusal {
	found := make([]probe.Refusal, len(family.All()))
	var trying sync.WaitGroup
	for i, f := range family.All() {
		trying.Go(func() { found[i] = refusal(ctx, f, p) })
	}
	trying.Wait()
	return found
}

// refusal tries whether the kernel refuses packets over a family. Packets to what is in direct of the policy say nothing.
func refusal(ctx context.Context, f family.Family, p *guard.Policy) probe.Refusal {
	to := probe.Unlisted(f)
	if slices.ContainsFunc(p.Direct, func(d guard.Direct) bool { return d.Has(to) }) {
		return probe.Refusal{Family: f, To: to, State: probe.Untested, Error: "direct of the policy has the address"}
	}
	return probe.Guarded(ctx, f)
}

// enforced reports whether the kernel enforces the policy: it has refused the last packets over a family at least, and over
// none has it let them pass.
func (c *core) enforced() bool {
	passed, refused := c.refusalsIn(probe.Passed), c.refusalsIn(probe.Refused)
	return len(passed) == 0 && len(refused) > 0
}

// refusalsIn returns what was observed last, of one state.
func (c *core) refusalsIn(state probe.RefusalState) (found []probe.Refusal) {
	if all := c.refusals.Load(); all != nil {
		found = slices.DeleteFunc(slices.Clone(*all), func(r probe.Refusal) bool { return r.State != state })
	}
	return found
}

// guardConditions says whether the kernel enforces the policy, if there is a guard.
func (c *core) guardConditions() []condition.Condition {
	p := c.config.Guard.Policy()
	if p == nil {
		return nil
	}
	open := condition.Condition{Code: "guard_open", Title: "the kernel refuses what the policy of the guard does not allow"}
	switch {
	case !p.Enforces():
		open.Unknown = "the policy is not enforced"
	case !c.enforced():
		open.Unknown = "not tried yet, or this host has no route"
	}
	for _, r := range c.refusalsIn(probe.Passed) {
		open.Unknown = ""
		open.Problems = append(open.Problems, condition.Problem{
			Severity: condition.Severe, Subject: r.Family.String(), What: fmt.Sprintf("the kernel does not enforce the policy of the guard over %s", r.Family),
			Evidence: fmt.Sprintf("packets to %s are not refused", r.To), Effect: "programs reach any address, without a name",
			Mend: "nametap capture status; run the agent with --capture or, in a pod, nametap capture apply in an init step", Rows: []string{"G9"},
		})
	}
	return []condition.Condition{open}
}
