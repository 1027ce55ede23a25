package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
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
		shortNames bool
	)
	command := &cobra.Command{
		Use:   "table",
		Short: "Show the agent's table of mesh names, in an order that diff(1) can compare",
		Example: `  nametap table
  nametap table --output json >before.json
  nametap table --output json | diff before.json -`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error {
			var table hostTable
			if err := c.status.get(command.Context(), "/debug/ndsz", nil, &table); err != nil {
				return err
			}
			if !shortNames {
				maps.DeleteFunc(table.Table, isShortName)
			}
			for _, info := range table.Table {
				slices.Sort(info.IPs) // a push may have them in another order
			}
			return c.output.print(command.OutOrStdout(), table, table.print)
		},
	}
	c.declare(command.Flags())
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
