package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy/guard"
)

// shownRecords is how many names `nametap guard status` shows without --all.
const shownRecords = 20

func newGuardStatus() *cobra.Command {
	var (
		c   agentCommand
		all bool
	)
	command := &cobra.Command{
		Use:   "status",
		Short: "Show the policy, what it denies, and whether the kernel enforces it",
		Long: fmt.Sprintf(`Show the policy of the running agent's guard, whether the kernel refuses what it does not
allow, and the names that were used, each with the client that was the first to ask: first the
names that were denied, then the others, the last used ones first. Without --all there are %d.
nametap tail --denied shows denied names as they are asked for.`, shownRecords),
		Args: usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error {
			var status agent.GuardReport
			if err := c.status.get(command.Context(), "/debug/guard", nil, &status); err != nil {
				return err
			}
			return c.output.print(command.OutOrStdout(), status, func(w io.Writer) { printGuard(w, status, all) })
		},
	}
	c.declare(command.Flags())
	command.Flags().BoolVar(&all, "all", false, "show all names")
	return command
}

func printGuard(w io.Writer, status agent.GuardReport, all bool) {
	fmt.Fprintf(w, "mode\t%s, since %s\n", status.Mode, timeOfDay(status.InUse))
	fmt.Fprintf(w, "policy\t%s: %d names in %d rules, sha256 %s\n", status.File, status.PolicyNames, status.PolicyRules, status.Hash)
	if len(status.Direct) > 0 {
		fmt.Fprintf(w, "direct\t%s\n", strings.Join(status.Direct, ", "))
	}
	fmt.Fprintf(w, "private addresses\t%s\n", map[bool]string{true: "allowed", false: "refused"}[status.Private])
	fmt.Fprintf(w, "kernel\t%s\n", describeKernel(&status.GuardStatus))
	counts := func(what string, n guard.Counts) {
		fmt.Fprintf(w, "%s\t%d allowed by the policy, %d not, since the agent started\n", what, n.Allowed, n.Denied)
	}
	counts("queries", status.Queries)
	counts("connections", status.Connections)
	for _, r := range status.Refused {
		fmt.Fprintf(w, "refused\t%d for %s, last %s: %s\n", r.Count, r.Reason, timeOfDay(r.Last), oneLine(r.Error))
	}
	records := slices.Clone(status.Names)
	slices.SortStableFunc(records, func(a, b guard.Record) int {
		return cmp.Or(strings.Compare(b.Verdict, a.Verdict), b.Last.Compare(a.Last)) // denied first
	})
	fmt.Fprintf(w, "recorded\t%d names since %s\n", len(records), timeOfDay(status.Since))
	if len(records) > shownRecords && !all {
		records = records[:shownRecords]
	}
	if len(records) == 0 {
		return
	}
	fmt.Fprintln(w, "\nNAME\tVERDICT\tASKED\tFIRST BY\tPORTS\tLAST\tRULE")
	for _, r := range records {
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\t%s\t%s\n", r.Name, r.Verdict, r.Asked, cmp.Or(r.Client, "-"), portTexts(r.Ports), timeOfDay(r.Last.Truncate(time.Second)), cmp.Or(r.Rule, "-"))
	}
}

// describeKernel says whether the kernel enforces the policy.
func describeKernel(status *agent.GuardStatus) string {
	if status.Mode != guard.Enforce {
		return "refuses nothing in mode " + string(status.Mode)
	}
	texts := []string{map[bool]string{true: "enforces the policy", false: "is not known to enforce the policy"}[status.Enforced]}
	for _, r := range status.Kernel {
		texts = append(texts, strings.TrimSuffix(fmt.Sprintf("packets over %s to %s: %s, %s", r.Family, r.To.Addr(), r.State, r.Error), ", "))
	}
	return strings.Join(texts, "; ")
}

// portTexts returns ports as a text of a list.
func portTexts(ports []uint16) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(ports), "[]"), " ", ", ")
}
