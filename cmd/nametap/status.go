package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/nds"
)

func newStatusCommand() *cobra.Command {
	var (
		c    agentCommand
		wait time.Duration
	)
	command := &cobra.Command{
		Use:   "status",
		Short: "Show the agent's connection, table, nameservers and capture",
		Long: `Show the agent's connection, table, nameservers and capture.

With --wait the command first waits until the agent is ready: it has a table, or has waited
for one for 3 s in a pod, or 30 s elsewhere. If it is not ready in time, the exit code is 1. This is for
the start of a pod, as a postStart hook of the agent's container.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error {
			var status agent.Status
			if err := c.status.await(command.Context(), wait); err != nil {
				return err
			}
			if err := c.status.get(command.Context(), "/debug/status", nil, &status); err != nil {
				return err
			}
			return c.output.print(command.OutOrStdout(), status, func(w io.Writer) { printAgentStatus(w, status) })
		},
	}
	c.declare(command.Flags())
	command.Flags().DurationVar(&wait, "wait", 0, "wait up to this `duration` until the agent is ready")
	return command
}

func printAgentStatus(w io.Writer, status agent.Status) {
	ready := "yes"
	if !status.Ready {
		ready = "no: " + status.Reason
	}
	listeners := make([]string, 0, len(status.DNS))
	for _, addr := range status.DNS {
		listeners = append(listeners, addr.Network+" "+addr.Address)
	}
	fmt.Fprintf(w, "ready\t%s\n", ready)
	fmt.Fprintf(w, "up for\t%s\n", seconds(status.Uptime))
	fmt.Fprintf(w, "DNS\t%s\n", strings.Join(listeners, ", "))
	printProblems(w, condition.Judge(status.Conditions))
	printSettings(w, status.Settings)
	printUpstreams(w, status.Upstreams)
	fmt.Fprintf(w, "hosts\t%d\n", status.Hosts)
	printXDS(w, status)
	printCapture(w, status.Capture)
	if path := status.OnlyNameserverOf; path != "" {
		fmt.Fprintf(w, "capture\tno rules are needed: the agent is the only nameserver of %s\n", path)
	}
	printRedirections(w, status.Redirected)
	printEgress(w, status.Egress)
	if g := status.Guard; g != nil {
		fmt.Fprintf(w, "guard\t%s of %s; the kernel %s\n", g.Mode, g.File, describeKernel(g))
	}
}

// printProblems prints a line for each problem, and one for each suspected problem, which has not lasted long
// enough yet.
func printProblems(w io.Writer, report condition.Report) {
	print := func(p condition.Problem, label string) {
		fmt.Fprintf(w, "%s\t%s, since %s: %s\n", label, clip.Line(p.What), timeOfDay(p.Since), oneLine(p.Evidence))
	}
	for _, p := range report.Problems {
		print(p, string(p.Severity))
	}
	for _, p := range report.Suspected {
		print(p, "suspected")
	}
}

// oneLine returns text in one line, for a terminal.
func oneLine(text string) string { return clip.Line(strings.ReplaceAll(text, "\n", "; ")) }

// printSettings prints a line for each setting, in the order of their names.
func printSettings(w io.Writer, settings map[string][]string) {
	label := "settings"
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(w, "%s\t%s: %s\n", label, name, strings.Join(settings[name], ", "))
		label = ""
	}
}

// printUpstreams prints a line for each nameserver.
func printUpstreams(w io.Writer, upstreams []agent.Upstream) {
	label := "nameservers"
	if len(upstreams) == 0 {
		fmt.Fprintf(w, "%s\tnone\n", label)
	}
	for _, u := range upstreams {
		fmt.Fprintf(w, "%s\t%s: %s\n", label, u.Server, describeUpstream(u))
		label = ""
	}
}

// describeUpstream describes the state of a nameserver.
func describeUpstream(u agent.Upstream) string {
	if u.State == "self" {
		return "left out, it is this agent"
	}
	texts := []string{u.State}
	if u.State == "unknown" {
		texts[0] = "not known, no reply so far"
	} else if ago := time.Since(u.LastReplyAt).Round(time.Second); !u.LastReplyAt.IsZero() && ago > condition.Lasting {
		texts = append(texts, fmt.Sprintf("last reply %v ago", ago))
	}
	if u.RTT > 0 {
		texts = append(texts, seconds(u.RTT).String())
	}
	texts = append(texts, fmt.Sprintf("%d queries", u.Requests), fmt.Sprintf("%d failed", u.Failures))
	for _, code := range slices.Sorted(maps.Keys(u.Responses)) {
		if code != "NOERROR" && code != "NXDOMAIN" { // these two are answers
			texts = append(texts, fmt.Sprintf("%d %s", u.Responses[code], code))
		}
	}
	if u.LastError != "" {
		texts = append(texts, fmt.Sprintf("last error %s ago: %s", time.Since(u.LastErrorAt).Round(time.Second), oneLine(u.LastError)))
	}
	return strings.Join(texts, ", ")
}

// printXDS prints the connection to the control plane, and the table.
func printXDS(w io.Writer, status agent.Status) {
	xds := status.XDS
	connection := "connected to " + xds.Address + ", " + xds.Variant
	switch {
	case xds.Connected:
	case xds.Open:
		connection = "connected to " + xds.Address + ", " + xds.Variant + ", no push so far"
	default:
		connection = "not connected to " + xds.Address
	}
	fmt.Fprintf(w, "control plane\t%s\n", connection)
	if xds.LastError != "" {
		fmt.Fprintf(w, "last error\t%s\n", oneLine(xds.LastError))
	}
	if !xds.CertificateExpires.IsZero() {
		fmt.Fprintf(w, "certificate\texpires %s\n", xds.CertificateExpires.Format(time.RFC3339))
	}
	if xds.CertificateError != "" {
		fmt.Fprintf(w, "certificate error\t%s\n", oneLine(xds.CertificateError))
	}
	if !xds.Loaded {
		fmt.Fprintf(w, "table\tnone yet\n")
		return
	}
	sent := "sent "
	if xds.Stale {
		sent = "of the snapshot until the control plane sends one, sent "
	}
	fmt.Fprintf(w, "table\t%s%s%v ago\n", versionText(xds.Version), sent, time.Duration(xds.TableAge)*time.Second)
	fmt.Fprintf(w, "pushes\t%d, %d rejected\n", xds.Pushes, xds.Rejected)
	mode := "the control plane sends whole tables"
	if xds.Mode == nds.ModeNamed {
		mode = "the control plane sends the parts that change, checksum " + xds.Digest
	}
	fmt.Fprintf(w, "mode\t%s: %s\n", xds.Mode, mode)
}

// versionText describes the version of a table, which may be empty, for text that follows.
func versionText(version string) string {
	if version == "" {
		return "" // where each resource has its own
	}
	return fmt.Sprintf("version %q, ", version)
}

// printEgress prints the connections to automatic VIPs.
func printEgress(w io.Writer, status *egress.Status) {
	if status == nil {
		return
	}
	fmt.Fprintf(w, "egress\t%d of %d connections open\n", status.Open, status.Max)
	for _, h := range status.Hosts {
		name := h.Name
		if h.Host != h.Name {
			name += " of " + h.Host
		}
		unknown := ""
		if h.PortsUnknown {
			unknown = ", ports not known"
		}
		fmt.Fprintf(w, "\t%s: %s to %s, %d open of %d, %d bytes sent, %d received%s\n", name, h.VIP, h.Address, h.Open,
			h.Total, h.Sent, h.Received, unknown)
	}
	for _, r := range status.Refused {
		fmt.Fprintf(w, "\trefused, %s: %d, last %s: %s\n", r.Reason, r.Count, r.Last.Format(time.RFC3339), oneLine(r.Error))
	}
}

// printCapture prints the state of capture, and of the rules that the agent keeps.
func printCapture(w io.Writer, capture *agent.CaptureStatus) {
	if capture != nil && capture.Remaining != "" {
		fmt.Fprintf(w, "capture\trules cannot be removed; retrying: %s\n", capture.Remaining)
	}
	switch {
	case capture == nil:
		return
	case capture.Error != "":
		fmt.Fprintf(w, "capture\t%s; the rules cannot be read: %s\n", onOff(capture.On, capture.Because), capture.Error)
		return
	}
	fmt.Fprintf(w, "capture\t%s, %d repairs\n", onOff(capture.On, capture.Because), capture.Repairs)
	for _, other := range capture.Others {
		fmt.Fprintf(w, "\tanother agent wants to capture here: %s\n", other)
	}
	printRules(w, *capture.Rules)
	for _, way := range capture.Ways {
		if way.Detail != "" { // clients' queries to this nameserver do not reach the agent, or may not
			fmt.Fprintf(w, "\tqueries to %s: %s: %s\n", way.Subject(), way.State, way.Detail)
		}
	}
	for _, lapse := range capture.Lapses {
		fmt.Fprintf(w, "\tinterrupted %d times, last %s: %s\n", lapse.Count, timeOfDay(lapse.Last), lapse.Cause)
	}
	printResolved(w, capture.Resolved)
}
