package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/clip"
)

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
			table := &api.NameTable{} // in the form of /debug/ndsz
			if err := c.status.get(command.Context(), "/debug/ndsz", nil, table); err != nil {
				return err
			}
			if !shortNames {
				maps.DeleteFunc(table.GetTable(), isShortName)
			}
			sortAddresses(table)
			if diff != "" {
				return c.printDiff(command.OutOrStdout(), diff, table.GetTable())
			}
			return c.output.print(command.OutOrStdout(), table, func(w io.Writer) { printTable(w, table.GetTable()) })
		},
	}
	c.declare(command.Flags())
	command.Flags().StringVar(&diff, "diff", "",
		"show the difference from a `file` that --output json wrote; exit code 1 if there is one")
	command.Flags().BoolVar(&shortNames, "short-names", false, "also show the short names of each host, as entries")
	return command
}

// hosts are the entries of a table.
type hosts map[string]*api.NameTable_NameInfo

// isShortName reports whether the agent derived an entry from the entry of a Kubernetes Service. The key of such an
// entry ends in a dot. The key of a ServiceEntry's host ends in a dot, too, if the host in the ServiceEntry does.
func isShortName(key string, info *api.NameTable_NameInfo) bool {
	return strings.HasSuffix(key, ".") && info.GetShortname() == "" && info.GetRegistry() == "Kubernetes"
}

func printTable(w io.Writer, table hosts) {
	fmt.Fprintln(w, "HOST\tREGISTRY\tADDRESSES")
	for _, host := range slices.Sorted(maps.Keys(table)) {
		info := table[host]
		fmt.Fprintf(w, "%s\t%s\t%s", host, clip.Line(info.GetRegistry()), strings.Join(info.GetIps(), " "))
		if details := details(info); details != "" {
			fmt.Fprint(w, "\t", details)
		}
		fmt.Fprintln(w)
	}
}

// details returns what an entry says besides its addresses, as text.
func details(info *api.NameTable_NameInfo) string {
	var details []string
	if info.GetAlias() != "" {
		details = append(details, "alias of "+info.GetAlias())
	}
	if info.GetHeadless() {
		details = append(details, "headless")
	}
	for _, p := range info.GetPorts() {
		text := strings.TrimLeft(fmt.Sprintf("%s %d/%s", p.GetName(), p.GetNumber(), cmp.Or(p.GetProtocol(), "TCP")), " ")
		if ips := p.GetIps(); len(ips) > 0 {
			text += " of " + strings.Join(ips, " ")
		}
		details = append(details, text)
	}
	return strings.Join(details, ", ")
}

// sortAddresses sorts the addresses, which a push may have in another order than the previous one.
func sortAddresses(table *api.NameTable) {
	for _, info := range table.GetTable() {
		slices.Sort(info.GetIps())
		for _, p := range info.GetPorts() {
			slices.Sort(p.GetIps())
		}
	}
}

// without returns the entries that the table other does not have.
func (t hosts) without(other hosts) hosts {
	only := maps.Clone(t)
	maps.DeleteFunc(only, func(host string, info *api.NameTable_NameInfo) bool { return proto.Equal(info, other[host]) })
	return only
}

// printDiff prints the difference from the table in a file. If there is one, it returns an error: the exit code is 1, as with
// diff(1). A host whose entry has changed is removed and added.
func (c *agentCommand) printDiff(w io.Writer, path string, current hosts) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading the table to compare with: %w", err)
	}
	previous := &api.NameTable{}
	if err := json.Unmarshal(text, previous); err != nil || previous.GetTable() == nil {
		return fmt.Errorf("%s: want the output of `nametap table --output json`", path)
	}
	sortAddresses(previous)
	diff := struct {
		Removed hosts `json:"removed"`
		Added   hosts `json:"added"`
	}{hosts(previous.GetTable()).without(current), current.without(previous.GetTable())}
	all := maps.Clone(diff.Removed)
	maps.Copy(all, diff.Added)
	err = c.output.print(w, diff, func(w io.Writer) {
		for _, host := range slices.Sorted(maps.Keys(all)) {
			printChange(w, "-", host, diff.Removed)
			printChange(w, "+", host, diff.Added)
		}
	})
	if err == nil && len(all) > 0 {
		err = fmt.Errorf("the tables differ in %d hosts", len(all))
	}
	return err
}

// printChange prints the entry of a host, if entries have one.
func printChange(w io.Writer, sign, host string, entries hosts) {
	info, there := entries[host]
	if !there {
		return
	}
	text := strings.Join(info.GetIps(), " ")
	if details := details(info); details != "" {
		text = strings.TrimLeft(text+" ("+details+")", " ")
	}
	fmt.Fprintln(w, sign, host, text)
}
