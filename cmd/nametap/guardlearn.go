package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/wire"
)

func newGuardLearn() *cobra.Command {
	var (
		status statusClient
		since  time.Duration
	)
	command := &cobra.Command{
		Use:   "learn [FILE...]",
		Short: "Print a policy that allows what was recorded",
		Long: `Print a policy that allows what the guard of the running agent has recorded, or what
FILEs have: guard.json of state directories, for example of several pods. In mode audit the
guard denies nothing, and records everything.

Names that do not exist are left out, and so are reverse lookups and names that a rule denies.
Five or more names below one parent become a wildcard, unless the parent is a public suffix.`,
		Example: `  nametap guard learn > learned.yaml
  nametap guard learn --since 24h pod-1/guard.json pod-2/guard.json > learned.yaml`,
		Args: usageArgs(cobra.ArbitraryArgs),
		RunE: func(command *cobra.Command, args []string) error {
			if since < 0 {
				return usageError{fmt.Errorf("--since=%v: want a time ago such as 24h", since)}
			}
			seen, err := readRecords(args)
			if err == nil && len(args) == 0 {
				var agent agent.GuardReport
				err = status.get(command.Context(), "/debug/guard", nil, &agent)
				seen = agent.Names
			}
			if err != nil {
				return err
			}
			if since > 0 {
				seen = slices.DeleteFunc(seen, func(r guard.Record) bool { return time.Since(r.Last) > since })
			}
			policy := learn(seen)
			if policy == "" {
				return errors.New("nothing was recorded that a policy could allow: run the programs with a guard in mode audit first")
			}
			_, err = io.WriteString(command.OutOrStdout(), policy)
			return err
		},
	}
	status.declare(command.Flags())
	command.Flags().DurationVar(&since, "since", 0, "only names that were used in this last `duration`")
	return command
}

// mergeRecords returns one record for each name, sorted by name.
func mergeRecords(all []guard.Record) []guard.Record {
	byName := map[string]guard.Record{}
	for _, r := range all {
		m := byName[r.Name]
		r.Asked += m.Asked
		r.Exists, r.Private = r.Exists || m.Exists, r.Private || m.Private
		r.Types = slices.Compact(slices.Sorted(slices.Values(slices.Concat(r.Types, m.Types))))
		r.Ports = slices.Compact(slices.Sorted(slices.Values(slices.Concat(r.Ports, m.Ports))))
		if m.Last.After(r.Last) {
			r.Verdict, r.Rule, r.Last = m.Verdict, m.Rule, m.Last
		}
		byName[r.Name] = r
	}
	return slices.SortedFunc(maps.Values(byName), func(a, b guard.Record) int { return strings.Compare(a.Name, b.Name) })
}

// wanted reports whether a workload needs a name: it exists, or was connected to. Other names come from search lists.
// Reverse lookups are left out: programs make them for their logs.
func wanted(r guard.Record) bool {
	return (r.Exists || len(r.Ports) > 0) && !strings.HasSuffix(r.Name, ".arpa")
}

// usage says how often, and when last, a name was used.
func usage(r guard.Record) string {
	text := fmt.Sprintf("asked %d times", r.Asked)
	if r.Asked == 0 {
		text = "connected to"
	}
	since := time.Since(r.Last)
	if since > time.Minute {
		since = since.Truncate(time.Minute)
	}
	return fmt.Sprintf("%s, last %s ago", text, ago(since))
}

// leastFolded is how many names below one parent become a wildcard.
const leastFolded = 5

// learn returns a policy that allows what was recorded; "" if there is nothing. It denies what a rule has denied, since a
// wildcard may have it now.
func learn(seen []guard.Record) string {
	byPlace := map[place][]guard.Record{}
	var denied, direct, private strings.Builder
	for _, r := range seen {
		addr, noAddr := netip.ParseAddr(r.Name)
		_, noName := wire.ParseHostname(r.Name)
		switch {
		case noAddr == nil:
			for _, port := range r.Ports {
				fmt.Fprintf(&direct, "\n- %-42q  # %s", netip.AddrPortFrom(addr, port), usage(r))
			}
		case noName != nil || !wanted(r):
		case r.Verdict == guard.VerdictDenied && r.Rule != "":
			fmt.Fprintf(&denied, "\n  - %-40q  # %s", r.Name, usage(r))
		default:
			at := placeOf(r)
			byPlace[at] = append(byPlace[at], r)
			if r.Private {
				private.Reset()
				fmt.Fprintf(&private, "\nprivate: allow  # %s leads to a private address", r.Name)
			}
		}
	}
	var text strings.Builder
	rules := learnRules(byPlace)
	for _, rest := range slices.Sorted(maps.Keys(rules)) {
		text.WriteString("\n- names:" + strings.Join(slices.Sorted(slices.Values(rules[rest])), "") + rest)
	}
	if text.Len()+direct.Len() == 0 {
		return ""
	}
	if denied.Len() > 0 {
		text.WriteString("\ndeny:\n- names:" + denied.String())
	}
	if direct.Len() > 0 {
		text.WriteString("\ndirect:" + direct.String())
	}
	return "# Written by nametap guard learn.\nmode: enforce\nallow:" + text.String() + private.String() + "\n"
}

// A place is where a policy has a name: names with the same place may become one wildcard.
type place struct {
	parent string
	rest   string // the text of the rule behind its names: ports and types
}

func placeOf(r guard.Record) place {
	_, parent, _ := strings.Cut(r.Name, ".")
	at := place{parent: parent}
	if len(r.Ports) > 0 && !slices.Equal(r.Ports, []uint16{443}) {
		at.rest = fmt.Sprintf("\n  ports: [%s]", portTexts(r.Ports))
	}
	if len(r.Types) > 0 {
		at.rest += fmt.Sprintf("\n  types: [%s]", strings.Join(r.Types, ", "))
	}
	return at
}

// learnRules returns the lines of the names of each rule, by the text behind them. A parent has at most one wildcard.
func learnRules(byPlace map[place][]guard.Record) map[string][]string {
	rules, folded := map[string][]string{}, ""
	for _, at := range slices.SortedFunc(maps.Keys(byPlace), func(a, b place) int {
		return cmp.Or(strings.Compare(a.parent, b.parent), strings.Compare(a.rest, b.rest))
	}) {
		names, count := byPlace[at], ""
		if len(names) >= leastFolded && at.parent != folded && strings.Contains(at.parent, ".") && !isPublicSuffix(at.parent) {
			folded, count = at.parent, fmt.Sprintf("%d names, ", len(names))
			all := guard.Record{Name: "*." + at.parent}
			for _, r := range names {
				all.Asked += r.Asked
				all.Last = slices.MaxFunc([]time.Time{all.Last, r.Last}, time.Time.Compare)
			}
			names = []guard.Record{all}
		}
		for _, r := range names {
			rules[at.rest] = append(rules[at.rest], fmt.Sprintf("\n  - %-40q  # %s%s", r.Name, count, usage(r)))
		}
	}
	return rules
}
