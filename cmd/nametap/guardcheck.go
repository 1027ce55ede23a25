package main

import (
	"encoding/json"
	"errors"
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

// A policyCheck is the result of `nametap guard check`.
type policyCheck struct {
	File string `json:"file"`
	// Findings has what the policy should not have, and what it would deny, each with the line if there is one.
	Findings []string `json:"findings"`

	policy *guard.Policy // nil if it cannot be used
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
			seen, err := readRecords(against)
			if err != nil {
				return usageError{err}
			}
			check := policyCheck{File: args[0], Findings: []string{}}
			if check.policy, err = guard.Parse(args[0], text); err != nil {
				check.Findings = append(check.Findings, err.Error())
			} else {
				check.checkRules()
				check.checkDirect()
				check.checkAgainst(seen)
			}
			if err := output.print(command.OutOrStdout(), check, check.print); err != nil {
				return err
			}
			if len(check.Findings) > 0 {
				return exitError(exitFailed)
			}
			return nil
		},
	}
	output.declare(command.Flags())
	command.Flags().StringSliceVar(&against, "against", nil,
		"`file` with records, guard.json of a state directory; may be repeated")
	return command
}

// add adds a finding about the policy or, if line is not 0, about the rule in that line.
func (c *policyCheck) add(line int, format string, args ...any) {
	place := c.File
	if line > 0 {
		place += fmt.Sprintf(":%d", line)
	}
	c.Findings = append(c.Findings, place+": "+fmt.Sprintf(format, args...))
}

// checkRules looks for wildcards of public suffixes, and for allowed names that are denied, too.
func (c *policyCheck) checkRules() {
	for _, r := range c.policy.Rules {
		for _, text := range r.Names {
			name, err := wire.ParseName(text) // a wildcard is a name below its suffix
			if err != nil || r.Denies {
				continue // a name of a rule has no error
			}
			if suffix, wildcard := strings.CutPrefix(text, "*."); wildcard && isPublicSuffix(suffix) {
				c.add(r.Line, "%s: everybody may register names below the public suffix %s: want a longer suffix", text, suffix)
			}
			if verdict, rule := c.policy.Judge(name, dns.TypeA); verdict == guard.Denied && rule != nil {
				c.add(r.Line, "%s: it is allowed in vain, since line %d denies it", text, rule.Line)
			}
		}
	}
}

// isPublicSuffix reports whether names below a suffix belong to different owners, as the public suffix list says.
func isPublicSuffix(suffix string) bool {
	public, icann := publicsuffix.PublicSuffix(suffix)
	return public == suffix && (icann || strings.Contains(suffix, ".")) // a last label that is not on the list is returned, too
}

// checkDirect looks for networks that clients are hardly meant to reach without a name.
func (c *policyCheck) checkDirect() {
	metadata := []netip.Addr{netip.MustParseAddr("169.254.169.254"), netip.MustParseAddr("fd00:ec2::254")}
	const widest4, widest6 = 8, 16 // the lengths of prefixes
	for _, d := range c.policy.Direct {
		widest := widest4
		if d.Prefix.Addr().Is6() {
			widest = widest6
		}
		switch {
		case d.Prefix.Bits() < widest:
			c.add(0, "direct %s: it has a large part of all addresses: want a prefix of at least /%d", d, widest)
		case slices.ContainsFunc(metadata, d.Prefix.Contains):
			c.add(0, "direct %s: it has the metadata service of clouds, which gives credentials", d)
		case d.Port == 53 || d.Port == 853:
			c.add(0, "direct %s: queries to this nameserver are not judged, and their names can carry data out", d)
		}
	}
}

// checkAgainst looks for recorded names and addresses that the policy denies.
func (c *policyCheck) checkAgainst(seen []guard.Record) {
	for _, r := range seen {
		addr, err := netip.ParseAddr(r.Name)
		switch {
		case err == nil:
			for _, port := range r.Ports {
				if to := netip.AddrPortFrom(addr, port); !slices.ContainsFunc(c.policy.Direct, func(d guard.Direct) bool { return d.Has(to) }) {
					c.add(0, "%s would be refused: no direct has it (%s)", to, usage(r))
				}
			}
		case wanted(r):
			c.checkName(r)
		}
	}
}

func (c *policyCheck) checkName(r guard.Record) {
	name, err := wire.ParseName(r.Name)
	if err != nil {
		return
	}
	verdict, rule := c.policy.Judge(name, dns.TypeA)
	if verdict != guard.Carried {
		c.add(0, "%s would be denied (%s): %s", r.Name, usage(r), c.policy.Reason(verdict, rule))
		return
	}
	for _, port := range r.Ports {
		if !slices.Contains(rule.Ports, port) {
			c.add(rule.Line, "%s port %d would be refused: it is not among the ports of the rule (%s)", r.Name, port, usage(r))
		}
	}
	for _, text := range r.Types {
		if code, err := wire.ParseType(text); err == nil && !slices.Contains(rule.Types, code) {
			c.add(rule.Line, "%s %s would be denied: it is not among the types of the rule (%s)", r.Name, text, usage(r))
		}
	}
	if r.Private && !c.policy.Private {
		c.add(0, "%s would be refused: it leads to a private address, and private is deny (%s)", r.Name, usage(r))
	}
}

// print prints a line for each finding.
func (c *policyCheck) print(w io.Writer) {
	for _, text := range c.Findings {
		fmt.Fprintln(w, text)
	}
	if len(c.Findings) == 0 {
		fmt.Fprintf(w, "%s: no findings: mode %s, %d names in %d rules, sha256 %s\n", c.File, c.policy.Mode, c.policy.CountNames(), len(c.policy.Rules), c.policy.Hash)
	}
}

// readRecords reads files with records, and returns a record for each name, sorted by name.
func readRecords(files []string) ([]guard.Record, error) {
	var all []guard.Record
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
	return mergeRecords(all), nil
}
