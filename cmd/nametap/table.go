package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
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
		text += " of " + strings.Join(p.IPs, " ")
	}
	return text
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
			table.sort()
			if diff != "" {
				return c.printDiff(command.OutOrStdout(), diff, table)
			}
			return c.output.print(command.OutOrStdout(), table, table.print)
		},
	}
	c.declare(command.Flags())
	command.Flags().StringVar(&diff, "diff", "",
		"show the difference from a `file` that --output json wrote; exit code 1 if there is one")
	command.Flags().BoolVar(&shortNames, "short-names", false, "also show the short names of each host, as entries")
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

// sort sorts the addresses, which a push may have in another order than the previous one.
func (t hostTable) sort() {
	for _, info := range t.Table {
		slices.Sort(info.IPs)
		for _, p := range info.Ports {
			slices.Sort(p.IPs)
		}
	}
}

// A tableDiff has the entries that only one of two tables has. A host whose entry has changed is in both.
type tableDiff struct {
	Removed map[string]hostInfo `json:"removed"`
	Added   map[string]hostInfo `json:"added"`
}

// without returns the entries that the table other does not have.
func (t hostTable) without(other hostTable) map[string]hostInfo {
	only := maps.Clone(t.Table)
	maps.DeleteFunc(only, func(host string, info hostInfo) bool { return reflect.DeepEqual(info, other.Table[host]) })
	return only
}

// printDiff prints the difference from the table in a file. If there is one, it returns an error: the exit code is 1, as with
// diff(1).
func (c *agentCommand) printDiff(w io.Writer, path string, current hostTable) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading the table to compare with: %w", err)
	}
	var previous hostTable
	if err := json.Unmarshal(text, &previous); err != nil || previous.Table == nil {
		return fmt.Errorf("%s: want the output of `nametap table --output json`", path)
	}
	previous.sort()
	diff := tableDiff{Removed: previous.without(current), Added: current.without(previous)}
	all := maps.Clone(diff.Removed)
	maps.Copy(all, diff.Added)
	err = c.output.print(w, diff, func(w io.Writer) {
		for _, host := range slices.Sorted(maps.Keys(all)) {
			for _, side := range []struct {
				sign    string
				entries map[string]hostInfo
			}{{"-", diff.Removed}, {"+", diff.Added}} {
				if info, there := side.entries[host]; there {
					fmt.Fprintln(w, side.sign, host, info)
				}
			}
		}
	})
	if err == nil && len(all) > 0 {
		err = fmt.Errorf("the tables differ in %d hosts", len(all))
	}
	return err
}

// String returns the entry as text.
func (h hostInfo) String() string {
	text := strings.Join(h.IPs, " ")
	if details := h.details(); details != "" {
		text = strings.TrimLeft(text+" ("+details+")", " ")
	}
	return text
}
