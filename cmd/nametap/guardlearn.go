package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
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
			recorded, err := readRecords(args)
			if err == nil && len(args) == 0 {
				var agent agent.GuardReport
				err = status.get(command.Context(), "/debug/guard", nil, &agent)
				recorded = agent.Names
			}
			if err != nil {
				return err
			}
			needs := slices.DeleteFunc(needsOf(recorded), func(n need) bool { return since > 0 && time.Since(n.Last) > since })
			policy := learn(needs)
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

// readRecords reads files with records.
func readRecords(files []string) (all []guard.Record, err error) {
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var records guard.Records // the output of `nametap guard status` has these keys, too
		if err = json.Unmarshal(text, &records); err == nil && records.Since.IsZero() {
			err = errors.New("it has no time since")
		}
		if err != nil {
			return nil, fmt.Errorf("%s: want %s of a state directory, or the output of nametap guard status --output json: %w", file, guard.RecordsFile, err)
		}
		all = append(all, records.Names...)
	}
	return all, nil
}

// A need is a name that a workload needs, or an address that it connects to without a name.
type need struct {
	guard.Record
	addr netip.Addr // valid if there is no name
	name wire.Name
}

// needsOf returns the needs in records of one or more agents, sorted by name. It leaves out names that do not exist and were
// not connected to, which come from search lists, and reverse lookups, which programs make for their logs.
func needsOf(records []guard.Record) (needs []need) {
	byName := map[string]guard.Record{}
	for _, r := range records {
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
	for _, text := range slices.Sorted(maps.Keys(byName)) {
		n := need{Record: byName[text]}
		var err error
		if n.addr, err = netip.ParseAddr(text); err != nil {
			n.name, err = wire.ParseHostname(text)
			if err != nil || !n.Exists && len(n.Ports) == 0 || strings.HasSuffix(text, ".arpa") {
				continue
			}
		}
		needs = append(needs, n)
	}
	return needs
}

// usage says how often, and when last, a name was used.
func (n need) usage() string {
	text := fmt.Sprintf("asked %d times", n.Asked)
	if n.Asked == 0 {
		text = "connected to"
	}
	since := time.Since(n.Last)
	if since > time.Minute {
		since = since.Truncate(time.Minute)
	}
	return fmt.Sprintf("%s, last %s ago", text, ago(since))
}

// leastFolded is how many names below one parent become a wildcard.
const leastFolded = 5

// A place is where a policy has a name: names with the same place may become one wildcard.
type place struct {
	parent string
	rest   string // the text of the rule behind its names
}

// learn returns a policy that allows needs; "" if there are none. It denies what a rule has denied, since a wildcard may have
// it now.
func learn(needs []need) string {
	allowed := map[place][]need{}
	var denied, direct, private []string
	for _, n := range needs {
		switch {
		case n.addr.IsValid():
			for _, port := range n.Ports {
				direct = append(direct, fmt.Sprintf("\n- %-42q  # %s", netip.AddrPortFrom(n.addr, port), n.usage()))
			}
		case n.Verdict == guard.VerdictDenied && n.Rule != "":
			denied = append(denied, fmt.Sprintf("\n  - %-40q  # %s", n.Name, n.usage()))
		default:
			_, parent, _ := strings.Cut(n.Name, ".")
			at := place{parent, n.rest()}
			if allowed[at] = append(allowed[at], n); n.Private {
				private = []string{fmt.Sprintf("\nprivate: allow  # %s leads to a private address", n.Name)}
			}
		}
	}
	if len(allowed)+len(direct) == 0 {
		return ""
	}
	text := []string{"# Written by nametap guard learn.\nmode: enforce\nallow:"}
	rules := foldNames(allowed)
	for _, rest := range slices.Sorted(maps.Keys(rules)) {
		text = slices.Concat(text, []string{"\n- names:"}, slices.Sorted(slices.Values(rules[rest])), []string{rest})
	}
	if len(denied) > 0 {
		text = append(text, "\ndeny:\n- names:")
	}
	if len(direct) > 0 {
		direct = slices.Insert(direct, 0, "\ndirect:")
	}
	return strings.Join(slices.Concat(text, denied, direct, private, []string{"\n"}), "")
}

// foldNames returns the lines of the names of each rule, by the text behind them. A parent has at most one wildcard.
func foldNames(allowed map[place][]need) map[string][]string {
	rules, folded := map[string][]string{}, ""
	for _, at := range slices.SortedFunc(maps.Keys(allowed), func(a, b place) int {
		return strings.Compare(a.parent+a.rest, b.parent+b.rest)
	}) {
		names, count := allowed[at], ""
		if len(names) >= leastFolded && at.parent != folded && strings.Contains(at.parent, ".") && !isPublicSuffix(at.parent) {
			folded, count = at.parent, fmt.Sprintf("%d names, ", len(names))
			all := need{Record: guard.Record{Name: "*." + at.parent}}
			for _, n := range names {
				all.Asked += n.Asked
				all.Last = slices.MaxFunc([]time.Time{all.Last, n.Last}, time.Time.Compare)
			}
			names = []need{all}
		}
		for _, n := range names {
			rules[at.rest] = append(rules[at.rest], fmt.Sprintf("\n  - %-40q  # %s%s", n.Name, count, n.usage()))
		}
	}
	return rules
}

// rest returns the text of a rule for the name that is behind its names: ports and types.
func (n need) rest() (text string) {
	if len(n.Ports) > 0 && !slices.Equal(n.Ports, []uint16{443}) {
		text = fmt.Sprintf("\n  ports: [%s]", portTexts(n.Ports))
	}
	if len(n.Types) > 0 {
		text += fmt.Sprintf("\n  types: [%s]", strings.Join(n.Types, ", "))
	}
	return text
}
