package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/internal/clip"
)

// A hostTable is the table in the form of /debug/ndsz.
type hostTable struct {
	Table map[string]hostInfo `json:"table"`
}

// A hostInfo is one entry of a hostTable.
type hostInfo struct {
	IPs       []string      `json:"ips"`
	Registry  string        `json:"registry,omitempty"`
	Shortname string        `json:"shortname,omitempty"`
	Namespace string        `json:"namespace,omitempty"`
	Alias     string        `json:"alias,omitempty"`
	Headless  bool          `json:"headless,omitempty"`
	Ports     []servicePort `json:"ports,omitempty"`
}

// A servicePort is a port of a Service.
type servicePort struct {
	Name     string   `json:"name,omitempty"`
	Number   int      `json:"number"`
	Protocol string   `json:"protocol,omitempty"` // TCP if empty
	IPs      []string `json:"ips,omitempty"`      // the entry's addresses that have the port; empty for all
}

// String returns the port as text, such as "http 8080/TCP".
func (p servicePort) String() string {
	text := strings.TrimLeft(fmt.Sprintf("%s %d/%s", p.Name, p.Number, cmp.Or(p.Protocol, "TCP")), " ")
	if len(p.IPs) > 0 {
		text += " of " + strings.Join(slices.Sorted(slices.Values(p.IPs)), " ")
	}
	return text
}

// equal reports whether two entries are the same, apart from the order of their addresses.
func (h hostInfo) equal(other hostInfo) bool {
	return h.Registry == other.Registry && h.Shortname == other.Shortname && h.Namespace == other.Namespace &&
		h.details() == other.details() &&
		slices.Equal(slices.Sorted(slices.Values(h.IPs)), slices.Sorted(slices.Values(other.IPs)))
}

// details returns what an entry says besides its addresses, as text.
func (h hostInfo) details() string {
	var details []string
	if h.Alias != "" {
		details = append(details, "alias of "+h.Alias)
	}
	if h.Headless {
		details = append(details, "headless")
	}
	for _, p := range h.Ports {
		details = append(details, p.String())
	}
	return strings.Join(details, ", ")
}

// errDiffers is the error of `nametap table --diff` if there is a difference: the exit code is 1, as with diff(1).
var errDiffers = errors.New("the tables differ")

func newTableCommand() *cobra.Command {
	var (
		c          agentCommand
		diff       string
		shortNames bool
	)
	command := &cobra.Command{
		Use:   "table",
		Short: "Show the agent's table of mesh names, or its difference from a file",
		Example: `  nametap table
  nametap table --output json > before.json
  nametap table --diff before.json`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error {
			var table hostTable
			if err := c.status.get(command.Context(), "/debug/ndsz", nil, &table); err != nil {
				return err
			}
			if !shortNames {
				maps.DeleteFunc(table.Table, isShortName)
			}
			if diff != "" {
				return printDiff(command.OutOrStdout(), c.output, diff, table)
			}
			return c.output.print(command.OutOrStdout(), table, table.print)
		},
	}
	c.declare(command.Flags())
	command.Flags().BoolVar(&shortNames, "short-names", false, "also show the short names of each host, as entries")
	command.Flags().StringVar(&diff, "diff", "",
		"show the difference from a `file` that --output json wrote; exit code 1 if there is one")
	return command
}

// isShortName reports whether the agent derived an entry from the entry of a Kubernetes Service. The key of such an
// entry ends in a dot. The key of a ServiceEntry's host ends in a dot, too, if the host in the ServiceEntry does.
func isShortName(key string, info hostInfo) bool {
	return strings.HasSuffix(key, ".") && info.Shortname == "" && info.Registry == "Kubernetes"
}

func (t hostTable) print(w io.Writer) {
	fmt.Fprintln(w, "HOST\tREGISTRY\tADDRESSES")
	for _, host := range slices.Sorted(maps.Keys(t.Table)) {
		info := t.Table[host]
		fmt.Fprintf(w, "%s\t%s\t%s", host, clip.Line(info.Registry), strings.Join(info.IPs, " "))
		if details := info.details(); details != "" {
			fmt.Fprint(w, "\t", details)
		}
		fmt.Fprintln(w)
	}
}

// line returns the line of a diff for an entry.
func (h hostInfo) line(sign, host string) string {
	words := append([]string{sign, host}, h.IPs...)
	if details := h.details(); details != "" {
		words = append(words, "("+details+")")
	}
	return strings.Join(words, " ") + "\n"
}

// A tableDiff is the difference between two tables.
type tableDiff struct {
	Added   map[string]hostInfo   `json:"added"`
	Removed map[string]hostInfo   `json:"removed"`
	Changed map[string]hostChange `json:"changed"`
}

// A hostChange is one host that both tables have, with different entries.
type hostChange struct {
	Before hostInfo `json:"before"`
	After  hostInfo `json:"after"`
}

func diffTables(previous, current hostTable) tableDiff {
	diff := tableDiff{Added: map[string]hostInfo{}, Removed: map[string]hostInfo{}, Changed: map[string]hostChange{}}
	for host, info := range current.Table {
		if old, known := previous.Table[host]; !known {
			diff.Added[host] = info
		} else if !info.equal(old) {
			diff.Changed[host] = hostChange{Before: old, After: info}
		}
	}
	for host, info := range previous.Table {
		if _, still := current.Table[host]; !still {
			diff.Removed[host] = info
		}
	}
	return diff
}

func printDiff(w io.Writer, output outputFormat, path string, current hostTable) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading the table to compare with: %w", err)
	}
	var previous hostTable
	if err := json.Unmarshal(text, &previous); err != nil || previous.Table == nil {
		return fmt.Errorf("%s: want the output of `nametap table --output json`", path)
	}
	diff := diffTables(previous, current)
	if err := output.print(w, diff, diff.print); err != nil {
		return err
	}
	if n := len(diff.Added) + len(diff.Removed) + len(diff.Changed); n > 0 {
		return fmt.Errorf("%w in %d hosts", errDiffers, n)
	}
	return nil
}

func (d tableDiff) print(w io.Writer) {
	lines := map[string]string{}
	for host, info := range d.Removed {
		lines[host] = info.line("-", host)
	}
	for host, info := range d.Added {
		lines[host] = info.line("+", host)
	}
	for host, c := range d.Changed {
		lines[host] = c.Before.line("-", host) + c.After.line("+", host)
	}
	for _, host := range slices.Sorted(maps.Keys(lines)) {
		fmt.Fprint(w, lines[host])
	}
}
