package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/iptables"
)

// redirectedTo queries the listeners to which the installed rules redirect queries.
func redirectedTo(ctx context.Context, status iptables.Status) []probe.Result {
	var listeners []dnsproxy.Addr
	for _, f := range status.Families {
		if f.Port != 0 {
			listeners = append(listeners, probe.At(f.Port, f.Family)...)
		}
	}
	return probe.Listeners(ctx, listeners...)
}

// checkedListeners queries the listeners to which the installed rules redirect queries. If there are no rules, or
// they cannot be read, it queries the listeners to which apply would redirect queries.
func (c *captureCommand) checkedListeners(ctx context.Context) (found []probe.Result, installed bool) {
	if status, err := c.capture.Status(ctx); err == nil {
		found = redirectedTo(ctx, status)
	}
	if len(found) > 0 {
		return found, true
	}
	return probe.Listeners(ctx, probe.At(c.config.Config.Port, c.config.Config.Families()...)...), false
}

// failing returns the listeners where no agent answers. Listeners of a family that the host lacks get no queries,
// so they count only if no agent answers at any listener.
func failing(listeners []probe.Result) []probe.Result {
	failed := slices.DeleteFunc(slices.Clone(listeners), func(l probe.Result) bool { return l.State == probe.Agent })
	if len(failed) == len(listeners) {
		return failed
	}
	return slices.DeleteFunc(failed, func(l probe.Result) bool { return l.State == probe.Absent })
}

// unanswered returns an error if no agent answers at listeners to which installed rules redirect queries.
func unanswered(listeners []probe.Result) error {
	var addresses []string
	for _, l := range failing(listeners) {
		addresses = append(addresses, l.Network+" "+l.To)
	}
	if len(addresses) == 0 {
		return nil
	}
	return fmt.Errorf("no agent answers where the rules redirect queries (%s): %s", strings.Join(addresses, ", "), agentAdvice)
}

// agentAdvice says what to do if rules are installed and no agent answers.
const agentAdvice = "start it (on a VM `systemctl restart nametap`, in a pod the log of its container says why it " +
	"does not run), or remove the rules with `nametap capture remove`, which also opens a guard"

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
func (c *captureCommand) listenerFindings(listeners []probe.Result, installed bool) (findings []iptables.Finding) {
	failed, full := failing(listeners), len(fullTable()) > 0
	for _, l := range listeners {
		finding := iptables.Finding{What: "agent at " + l.Network + " " + l.To, OK: l.State == probe.Agent,
			Needed: installed || c.config.Config.Needs(l.Family()), Detail: cmp.Or(l.Error, string(l.State))}
		taken := l.State != probe.Closed && l.State != probe.Absent
		switch {
		case finding.OK:
		case !slices.Contains(failed, l), !installed && !taken:
			continue
		case full: // the full table explains the failure
		case taken:
			finding.Advice = portAdvice
			for _, holder := range programsAt(l.To) {
				if holder.Program != "" && strings.HasPrefix(holder.Address, l.Network+" ") {
					finding.Detail += "; " + holder.Program + " listens at " + holder.Address
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
func printListeners(w io.Writer, listeners []probe.Result) {
	failed, label := failing(listeners), "agent"
	for _, l := range failed {
		fmt.Fprintf(w, "%s\tdoes not answer at %s %s: %s\n", label, l.Network, l.To, l.Error)
		label = ""
	}
	if len(failed) == 0 && len(listeners) > 0 {
		fmt.Fprintf(w, "%s\tanswers where the rules redirect queries\n", label)
	}
}

// notRedirected reports whether the result of a test query means that no rule redirects it.
func notRedirected(r probe.Result) bool { return r.State != probe.Agent && r.Sent() }

// printRedirections prints what is captured by rules of another process, as test queries show.
func printRedirections(w io.Writer, redirected []probe.Result) {
	label := "capture"
	for _, r := range redirected {
		state := map[bool]string{false: "redirected", true: "not redirected"}[notRedirected(r)]
		if !r.Sent() {
			state = "unknown"
		}
		fmt.Fprintf(w, "%s\t%s %s: %s a test query to %s\n", label, r.Family(), state, r.State, r.To)
		label = ""
	}
}
