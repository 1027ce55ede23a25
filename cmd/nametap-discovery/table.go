package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/internal/clip"
)

func newTable(stdout, stderr io.Writer) *cobra.Command {
	o := newOptions()
	cmd := &cobra.Command{
		Use:   "table [--config-dir DIR] [--kubeconfig FILE] [--for-namespace NS]",
		Short: "Print the table of a namespace, and the errors in the objects",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.resolve(cmd.Flags()); err != nil {
				return err
			}
			if err := checkOutput(o.output); err != nil {
				return err
			}
			return printTable(cmd.Context(), o, stdout, stderr)
		},
	}
	o.addFlags(cmd.Flags())
	cmd.Flags().StringVarP(&o.output, "output", "o", outputJSON, "`format`: json or text")
	hide(cmd.Flags(), "cluster-id", "clusters-namespace", "grpc-addr", "http-addr", "inject-addr", "inject-config", "log-level", "max-clients", "max-clients-per-address", "tls-addr", "tls-cert", "tls-client-ca", "tls-key", "token-audience", "trust-domain")
	return cmd
}

// printTable prints the table of a client. If documents are broken, it lists their errors and fails, so
// that a user can check a directory before a rollout.
func printTable(ctx context.Context, o *options, stdout, stderr io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second) // the API server may be away
	defer cancel()
	table, broken, err := discovery.Table(ctx, o.server, o.client)
	if err != nil {
		return err
	}
	if o.output == outputText {
		err = printText(stdout, table)
	} else {
		// protojson alone would vary its spaces, and would not sort the hosts.
		var data []byte
		var plain any
		if data, err = protojson.Marshal(table); err == nil {
			err = json.Unmarshal(data, &plain)
		}
		err = cmp.Or(err, printJSON(stdout, plain))
	}
	if err != nil {
		return fmt.Errorf("printing the table: %w", err)
	}
	for _, e := range broken {
		if _, err := fmt.Fprintln(stderr, clip.Line(e.Error())); err != nil {
			return fmt.Errorf("listing errors: %w", err)
		}
	}
	if len(broken) > 0 {
		return fmt.Errorf("broken documents (errors: %d): the objects named above are not in the table; repair them", len(broken))
	}
	return nil
}

// printText prints a line per host, in the form of `nametap table`.
func printText(w io.Writer, table *api.NameTable) error {
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "HOST\tREGISTRY\tADDRESSES")
	for _, host := range slices.Sorted(maps.Keys(table.GetTable())) {
		info := table.GetTable()[host]
		fmt.Fprintf(columns, "%s\t%s\t%s", host, info.GetRegistry(), strings.Join(info.GetIps(), " "))
		if text := details(info); text != "" {
			fmt.Fprint(columns, "\t", text)
		}
		fmt.Fprintln(columns)
	}
	return columns.Flush()
}

// details returns the fields of an entry besides its addresses, in the form of `nametap table`.
func details(info *api.NameTable_NameInfo) string {
	var texts []string
	if info.GetAlias() != "" {
		texts = append(texts, "alias of "+info.GetAlias())
	}
	if info.GetHeadless() {
		texts = append(texts, "headless")
	}
	for _, p := range info.GetPorts() {
		text := strings.TrimLeft(fmt.Sprintf("%s %d/%s", p.GetName(), p.GetNumber(), cmp.Or(p.GetProtocol(), "TCP")), " ")
		if len(p.GetIps()) > 0 {
			text += " of " + strings.Join(p.GetIps(), " ")
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}
