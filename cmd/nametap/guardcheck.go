package main

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/miekg/dns"
	"github.com/spf13/cobra"
	"golang.org/x/net/publicsuffix"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/wire"
)

func newGuardCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "guard",
		Short: "Learn, check and show which names clients may ask for and reach",
		Args:  usageArgs(cobra.NoArgs),
		RunE:  func(command *cobra.Command, _ []string) error { return command.Help() },
	}
	command.AddCommand(newGuardLearn(), newGuardCheck(), newGuardStatus())
	return command
}

func newGuardCheck() *cobra.Command {
	var (
		output  outputFormat
		against []string
	)
	command := &cobra.Command{
		Use:   "check FILE",
		Short: "Check a policy of the guard",
		Long: `Check a policy of the guard: whether an agent would use it, and what is legal and hardly meant,
such as a wildcard of a public suffix. With --against, also show what it would deny of what was
recorded.

The exit code is 0 without findings, 1 with some, 2 if a file cannot be read.`,
		Example: `  nametap guard check learned.yaml
  nametap guard check learned.yaml --against /var/lib/nametap/guard.json`,
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(command *cobra.Command, args []string) error {
			text, err := os.ReadFile(args[0])
			if err != nil {
				return usageError{err}
			}
			recorded, err := readRecords(against)
			if err != nil {
				return usageError{err}
			}
			check := struct {
				File     string   `json:"file"`
				Findings []string `json:"findings"` // what the policy should not have, and what it would deny
			}{args[0], []string{}}
			policy, err := guard.Parse(args[0], text)
			if err != nil {
				check.Findings = append(check.Findings, err.Error())
			} else {
				check.Findings = append(check.Findings, findings(policy, needsOf(recorded))...)
			}
			err = output.print(command.OutOrStdout(), check, func(w io.Writer) {
				printLines(w, "%s\n", check.Findings)
				if len(check.Findings) == 0 {
					fmt.Fprintf(w, "%s: no findings: mode %s, %d names in %d rules, sha256 %s\n",
						policy.File, policy.Mode, policy.CountNames(), len(policy.Rules), policy.Hash)
				}
			})
			if err == nil && len(check.Findings) > 0 {
				return exitError(exitFailed)
			}
			return err
		},
	}
	output.declare(command.Flags())
	command.Flags().StringSliceVar(&against, "against", nil,
		"`file` with records, guard.json of a state directory; may be repeated")
	return command
}

// findings looks for wildcards of public suffixes, for allowed names that are denied, too, and for needs that a policy denies.
// Each finding begins with FILE, or with FILE:LINE.
func findings(p *guard.Policy, needs []need) (found []string) {
	add := func(place, format string, args ...any) {
		found = append(found, place+": "+fmt.Sprintf(format, args...))
	}
	for _, r := range p.Rules {
		for _, text := range r.Names {
			name, err := wire.ParseName(text) // a wildcard is a name below its suffix
			if err != nil || r.Denies {
				continue // a name of a rule has no error
			}
			if suffix, wildcard := strings.CutPrefix(text, "*."); wildcard && isPublicSuffix(suffix) {
				add(r.String(), "%s: everybody may register names below the public suffix %s: want a longer suffix", text, suffix)
			}
			if verdict, rule := p.Judge(name, dns.TypeA); verdict == guard.Denied && rule != nil {
				add(r.String(), "%s: it is allowed in vain, since line %d denies it", text, rule.Line)
			}
		}
	}
	for _, n := range needs {
		n.denials(p, add)
	}
	return found
}

// denials calls add for all that a policy denies of a need.
func (n need) denials(p *guard.Policy, add func(place, format string, args ...any)) {
	var ports, types []uint16 // that the policy has
	place := p.File
	if !n.addr.IsValid() {
		verdict, rule := p.Judge(n.name, dns.TypeA)
		if verdict != guard.Carried {
			add(place, "%s would be denied (%s): %s", n.Name, n.usage(), p.Reason(verdict, rule))
			return
		}
		place, ports, types = rule.String(), rule.Ports, rule.Types
	}
	for _, port := range n.Ports {
		direct := slices.ContainsFunc(p.Direct, func(d guard.Direct) bool { return d.Has(netip.AddrPortFrom(n.addr, port)) })
		if !direct && !slices.Contains(ports, port) {
			add(place, "%s port %d would be refused: no rule has it (%s)", n.Name, port, n.usage())
		}
	}
	for _, text := range n.Types {
		if code, err := wire.ParseType(text); err == nil && !slices.Contains(types, code) {
			add(place, "%s %s would be denied: it is not among the types of the rule (%s)", n.Name, text, n.usage())
		}
	}
	if n.Private && !p.Private && !n.addr.IsValid() {
		add(p.File, "%s would be refused: it leads to a private address, and private is deny (%s)", n.Name, n.usage())
	}
}

// isPublicSuffix reports whether names below a suffix belong to different owners, as the public suffix list says.
func isPublicSuffix(suffix string) bool {
	public, icann := publicsuffix.PublicSuffix(suffix)
	return public == suffix && (icann || strings.Contains(suffix, ".")) // a last label that is not on the list is returned, too
}
