package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/iptables"
)

// redirectedTo returns the listeners to which the installed rules redirect queries.
func redirectedTo(ctx context.Context, status iptables.Status) (found []agent.Probe) {
	for _, f := range status.Families {
		if f.Port != 0 {
			found = append(found, agent.Listeners(ctx, f.Family, f.Port)...)
		}
	}
	return found
}

// checkedListeners returns the listeners to which the installed rules redirect queries. If there are no rules, or
// they cannot be read, it returns the listeners to which apply would redirect queries.
func (c *captureCommand) checkedListeners(ctx context.Context) (found []agent.Probe, installed bool) {
	if status, err := c.capture.Status(ctx); err == nil {
		found = redirectedTo(ctx, status)
	}
	if len(found) > 0 {
		return found, true
	}
	for _, f := range c.config.Config.Families() {
		found = append(found, agent.Listeners(ctx, f, c.config.Config.Port)...)
	}
	return found, false
}

// failing returns the listeners where no agent answers. Listeners of a family that the host lacks get no queries,
// so they count only if no agent answers at any listener.
func failing(listeners []agent.Probe) []agent.Probe {
	failed := slices.DeleteFunc(slices.Clone(listeners),
		func(l agent.Probe) bool { return l.State == agent.ProbeAgent })
	if len(failed) == len(listeners) {
		return failed
	}
	return slices.DeleteFunc(failed, func(l agent.Probe) bool { return l.State == agent.ProbeAbsent })
}

// unanswered returns an error if no agent answers at listeners to which installed rules redirect queries.
func unanswered(listeners []agent.Probe) error {
	failed := failing(listeners)
	if len(failed) == 0 {
		return nil
	}
	var addresses []string
	for _, l := range failed {
		addresses = append(addresses, l.Network+" "+l.To)
	}
	return fmt.Errorf("no agent answers where the rules redirect queries (%s): %s", strings.Join(addresses, ", "),
		agentAdvice)
}

// agentAdvice says what to do if rules are installed and no agent answers.
const agentAdvice = "start it (on a VM `systemctl restart nametap`, in a pod the log of its container says why it " +
	"does not run), or remove the rules with `nametap capture remove`"

// portAdvice says what to do about another program on the agent's port.
const portAdvice = "end that program, or set another port for the agent with --dns-addr (in a pod, in both " +
	"containers): Istio's agent listens on port 15053, and in a pod of Istio's ambient mode so does ztunnel's DNS proxy"

// fullTable returns a finding if conntrack is full or nearly full: then the kernel may drop probes of listeners.
func fullTable() (findings []iptables.Finding) {
	for _, p := range agent.ConntrackCondition().Problems {
		findings = append(findings, iptables.Finding{What: "conntrack", Detail: p.Evidence + ": " + p.Effect, Advice: p.Mend})
	}
	return findings
}

// listenerFindings returns what `nametap capture check` says about listeners. If no rules are installed, it leaves out
// addresses on which no program listens.
func (c *captureCommand) listenerFindings(listeners []agent.Probe, installed bool) (findings []iptables.Finding) {
	failed := failing(listeners)
	full := len(fullTable()) > 0
	for _, l := range listeners {
		finding := iptables.Finding{What: "agent at " + l.Network + " " + l.To, OK: l.State == agent.ProbeAgent,
			Needed: installed || c.config.Config.Needs(familyOf(l)), Detail: cmp.Or(l.Error, string(l.State))}
		other := l.State == agent.ProbeOther || l.State == agent.ProbeSilent || l.State == agent.ProbeUnsent
		switch {
		case finding.OK:
		case !slices.Contains(failed, l), !installed && !other:
			continue
		case full: // the full table explains the failure
		case other:
			finding.Advice = portAdvice
			for _, taken := range programsAt(l.To) {
				if taken.Program != "" && strings.HasPrefix(taken.Address, l.Network+" ") {
					finding.Detail += "; " + taken.Program + " listens at " + taken.Address
				}
			}
		default:
			finding.Advice = agentAdvice
		}
		findings = append(findings, finding)
	}
	return findings
}

// printListeners prints whether an agent answers at the listeners to which the rules redirect queries.
func printListeners(w io.Writer, listeners []agent.Probe) {
	failed, label := failing(listeners), "agent"
	for _, l := range failed {
		fmt.Fprintf(w, "%s\tdoes not answer at %s %s: %s\n", label, l.Network, l.To, l.Error)
		label = ""
	}
	if len(failed) == 0 && len(listeners) > 0 {
		fmt.Fprintf(w, "%s\tanswers where the rules redirect queries\n", label)
	}
}

// familyOf returns the family of the server that a probe was sent to.
func familyOf(p agent.Probe) family.Family { return family.Of(netip.MustParseAddrPort(p.To).Addr()) }

// notRedirected reports whether the result of a test query means that no rule redirects it.
func notRedirected(p agent.Probe) bool { return p.State != agent.ProbeAgent && p.Sent() }

// printRedirections prints what is captured by rules of another process, as test queries show.
func printRedirections(w io.Writer, redirected []agent.Probe) {
	label := "capture"
	for _, p := range redirected {
		state := map[bool]string{false: "redirected", true: "not redirected"}[notRedirected(p)]
		if !p.Sent() {
			state = "unknown"
		}
		fmt.Fprintf(w, "%s\t%s %s: %s a test query to %s\n", label, familyOf(p), state, p.State, p.To)
		label = ""
	}
}
