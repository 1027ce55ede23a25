package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy/forward"
)

// A cacheView is the content of the cache, with the form in which it is printed.
type cacheView forward.CacheContent

// A cacheFlush is the result of a flush, with the form in which it is printed.
type cacheFlush agent.Flushed

func newCacheCommand() *cobra.Command {
	var (
		status         statusClient
		output, suffix string
	)
	command := &cobra.Command{
		Use:   "cache [NAME]",
		Short: "Show the replies of nameservers that the agent keeps, or flush them",
		Example: `  nametap cache
  nametap cache www.example.org
  nametap cache flush --suffix corp.example`,
		Args: usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(command *cobra.Command, args []string) error {
			selection, err := cacheSelection(args, suffix)
			if err != nil {
				return err
			}
			var view cacheView
			if err := status.get(command.Context(), "/debug/cache", selection, &view); err != nil {
				return err
			}
			return printOutput(command.OutOrStdout(), output, view, view.print)
		},
	}
	status.declare(command.Flags())
	command.Flags().StringVar(&suffix, "suffix", "", "only the names of this `suffix`")
	declareOutput(command.Flags(), &output)
	command.AddCommand(newCacheFlushCommand())
	return command
}

func newCacheFlushCommand() *cobra.Command {
	var (
		status         statusClient
		output, suffix string
	)
	command := &cobra.Command{
		Use:   "flush [NAME]",
		Short: "Remove all replies from the cache, or those for a name or a suffix",
		Args:  usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(command *cobra.Command, args []string) error {
			selection, err := cacheSelection(args, suffix)
			if err != nil {
				return err
			}
			var flushed cacheFlush
			if err := status.do(command.Context(), http.MethodPost, "/cache/flush", selection, &flushed); err != nil {
				return err
			}
			return printOutput(command.OutOrStdout(), output, flushed, flushed.print)
		},
	}
	status.declare(command.Flags())
	command.Flags().StringVar(&suffix, "suffix", "", "only the names of this `suffix`")
	declareOutput(command.Flags(), &output)
	return command
}

// cacheSelection returns the parameters that select the replies for a name or a suffix; no parameters select all
// replies.
func cacheSelection(args []string, suffix string) (url.Values, error) {
	query := url.Values{}
	switch {
	case len(args) > 0 && suffix != "":
		return nil, usageError{errors.New("want NAME or --suffix, not both")}
	case len(args) > 0:
		query.Set("name", args[0])
	case suffix != "":
		query.Set("suffix", suffix)
	}
	return query, nil
}

func (v cacheView) print(w io.Writer) error {
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "NAME\tTYPE\tREPLY\tRECORDS\tTTL\tFROM\tFAILURE")
	for _, e := range v.Entries {
		ttl := strconv.Itoa(e.TTL)
		if e.TTL < 0 {
			ttl = "stale"
		}
		fmt.Fprintf(columns, "%s\t%s\t%s\t%d\t%s\t%s\t%s\n", e.Name, e.Type, cmp.Or(e.Rcode, "-"), e.Records, ttl, cmp.Or(e.Server, "-"), e.Failure)
	}
	if more := v.Total - len(v.Entries); more > 0 {
		fmt.Fprintf(columns, "and %d more\n", more)
	}
	return columns.Flush()
}

func (f cacheFlush) print(w io.Writer) error {
	_, err := fmt.Fprintf(w, "%d flushed\n", f.Flushed)
	return err
}
