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
		Example: `  nametap guard learn > guard.yaml
  nametap guard learn --since 24h pod-1/guard.json pod-2/guard.json`,
		Args: usageArgs(cobra.ArbitraryArgs),
		RunE: func(command *cobra.Command, args []string) error {
			if since < 0 {
				return usageError{fmt.Errorf("--since=%v: want a time ago such as 24h", since)}
			}
			seen, err := readRecords(args)
			if err == nil && len(args) == 0 {
				var records guard.Records
				err = status.get(command.Context(), "/debug/guard", nil, &records)
				seen = records.Names
			}
			if err != nil {
				return err
			}
			if since > 0 {
				seen = slices.DeleteFunc(seen, func(r guard.Record) bool { return time.Since(r.Last) > since })
			}
			learned := learn(seen)
			if len(learned.names)+len(learned.direct) == 0 {
				return errors.New("nothing was recorded that a policy could allow: run the programs with a guard in mode audit first")
			}
			_, err = io.WriteString(command.OutOrStdout(), learned.text())
			return err
		},
	}
	status.declare(command.Flags())
	command.Flags().DurationVar(&since, "since", 0, "only names that were used in this last `duration`")
	return command
}

// mergeRecords returns one record for each name, sorted by name.
func mergeRecords(all []guard.Record) []guard.Record {
	merged := map[string]guard.Record{}
	for _, r := range all {
		m, found := merged[r.Name]
		if !found || r.Last.After(m.Last) {
			m.Name, m.Verdict, m.Rule, m.Last = r.Name, r.Verdict, r.Rule, r.Last
		}
		m.Asked += r.Asked
		m.Exists, m.Private = m.Exists || r.Exists, m.Private || r.Private
		m.Types = slices.Compact(slices.Sorted(slices.Values(slices.Concat(m.Types, r.Types))))
		m.Ports = maps.Clone(m.Ports)
		if m.Ports == nil {
			m.Ports = map[uint16]uint64{}
		}
		for port, n := range r.Ports {
			m.Ports[port] += n
		}
		merged[r.Name] = m
	}
	return slices.SortedFunc(maps.Values(merged), func(a, b guard.Record) int { return strings.Compare(a.Name, b.Name) })
}

// wanted reports whether a workload needs a name: it exists, or was connected to. Other names come from search lists.
// Reverse lookups are left out: programs make them for their logs.
func wanted(r guard.Record) bool {
	return (r.Exists || len(r.Ports) > 0) && !strings.HasSuffix(r.Name, ".arpa")
}

// ports returns the ports of connections, sorted.
func ports(r guard.Record) []uint16 { return slices.Sorted(maps.Keys(r.Ports)) }

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

// A learned is a name of a learned policy.
type learned struct {
	guard.Record
	wildcard bool     // Record.Name is the suffix
	names    int      // how many names it stands for
	ports    []uint16 // empty for the default port
}

// text returns the name as a policy has it.
func (l *learned) text() string {
	if l.wildcard {
		return "*." + l.Name
	}
	return l.Name
}

// like reports whether two names belong into one rule.
func (l *learned) like(other *learned) bool {
	return slices.Equal(l.ports, other.ports) && slices.Equal(l.Types, other.Types)
}

// add adds the use of a name that the wildcard l stands for.
func (l *learned) add(other *learned) {
	l.names += other.names
	l.Asked += other.Asked
	l.Private = l.Private || other.Private
	if other.Last.After(l.Last) {
		l.Last = other.Last
	}
}

// A learnedPolicy is a policy that allows what was recorded.
type learnedPolicy struct {
	names  []*learned // in the order of their rules
	direct []guard.Record
}

// leastFolded is how many names below one parent become a wildcard.
const leastFolded = 5

// learn returns the policy that allows what was recorded.
func learn(seen []guard.Record) (p learnedPolicy) {
	groups := map[string][]*learned{} // by parent, ports and types
	for _, r := range seen {
		if _, err := netip.ParseAddr(r.Name); err == nil {
			p.direct = append(p.direct, r)
			continue
		}
		_, err := wire.ParseHostname(r.Name)
		deniedByRule := r.Verdict == guard.VerdictDenied && r.Rule != ""
		if err != nil || !wanted(r) || deniedByRule {
			continue
		}
		l := &learned{Record: r, names: 1, ports: ports(r)}
		if slices.Equal(l.ports, []uint16{443}) {
			l.ports = nil
		}
		_, parent, _ := strings.Cut(r.Name, ".")
		key := fmt.Sprint(parent, l.ports, l.Types)
		groups[key] = append(groups[key], l)
	}
	wildcards := map[string]*learned{} // by suffix
	largestFirst := slices.SortedFunc(maps.Keys(groups), func(a, b string) int {
		return cmp.Or(len(groups[b])-len(groups[a]), strings.Compare(a, b))
	})
	for _, key := range largestFirst {
		group := groups[key]
		_, parent, _ := strings.Cut(group[0].Name, ".")
		if len(group) < leastFolded || !strings.Contains(parent, ".") || isPublicSuffix(parent) || wildcards[parent] != nil {
			p.names = append(p.names, group...)
			continue
		}
		w := &learned{wildcard: true, ports: group[0].ports}
		w.Name, w.Types = parent, group[0].Types
		for _, l := range group {
			w.add(l)
		}
		wildcards[parent] = w
		p.names = append(p.names, w)
	}
	p.names = slices.DeleteFunc(p.names, func(l *learned) bool { return l.joins(wildcards) })
	slices.SortFunc(p.names, func(a, b *learned) int {
		return cmp.Or(slices.Compare(a.ports, b.ports), slices.Compare(a.Types, b.Types), compareNames(a.text(), b.text()))
	})
	return p
}

// joins adds the use of a name to the wildcard with the longest suffix that has the name, if that belongs into the same
// rule. Then the policy does not need the name.
func (l *learned) joins(wildcards map[string]*learned) bool {
	for _, suffix, below := strings.Cut(l.Name, "."); below; _, suffix, below = strings.Cut(suffix, ".") {
		if w := wildcards[suffix]; w != nil {
			if !w.like(l) {
				return false
			}
			w.add(l)
			if l.wildcard {
				delete(wildcards, l.Name)
			}
			return true
		}
	}
	return false
}

// compareNames orders names by their labels, the last label first.
func compareNames(a, b string) int {
	first, second := strings.Split(a, "."), strings.Split(b, ".")
	slices.Reverse(first)
	slices.Reverse(second)
	return slices.Compare(first, second)
}

// text returns the text of the policy.
func (p *learnedPolicy) text() string {
	var text strings.Builder
	private := ""
	text.WriteString("# Written by nametap guard learn.\nmode: enforce\nallow:")
	for i, l := range p.names {
		if i == 0 || !p.names[i-1].like(l) {
			text.WriteString("\n- names:")
		}
		count := ""
		if l.wildcard {
			count = fmt.Sprintf("%d names, ", l.names)
		}
		fmt.Fprintf(&text, "\n  - %-40q  # %s%s", l.text(), count, usage(l.Record))
		if i == len(p.names)-1 || !p.names[i+1].like(l) {
			if len(l.ports) > 0 {
				fmt.Fprintf(&text, "\n  ports: [%s]", strings.ReplaceAll(strings.Trim(fmt.Sprint(l.ports), "[]"), " ", ", "))
			}
			if len(l.Types) > 0 {
				fmt.Fprintf(&text, "\n  types: [%s]", strings.Join(l.Types, ", "))
			}
		}
		if l.Private && private == "" {
			private = l.text()
		}
	}
	if len(p.names) == 0 {
		text.WriteString(" []")
	}
	if len(p.direct) > 0 {
		text.WriteString("\ndirect:")
	}
	for _, r := range p.direct {
		addr, _ := netip.ParseAddr(r.Name) // learn has checked it
		for _, port := range ports(r) {
			fmt.Fprintf(&text, "\n- %-42q  # %s", netip.AddrPortFrom(addr, port), usage(r))
		}
	}
	if private != "" {
		fmt.Fprintf(&text, "\nprivate: allow  # %s leads to a private address", private)
	}
	return text.String() + "\n"
}
