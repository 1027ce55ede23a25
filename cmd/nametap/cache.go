package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/wire"
)

func newCacheCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "cache [NAME]",
		Short: "Show the replies of nameservers that the agent keeps, or flush them",
		Example: `  nametap cache
  nametap cache www.example.org
  nametap cache flush --suffix corp.example`,
	}
	requestCache(command, http.MethodGet, "/debug/cache", printCache)
	flush := &cobra.Command{
		Use:   "flush [NAME]",
		Short: "Remove all replies from the cache, or those for a name or a suffix",
	}
	requestCache(flush, http.MethodPost, "/cache/flush", func(w io.Writer, f *agent.Flushed) { fmt.Fprintf(w, "%d flushed\n", f.Flushed) })
	command.AddCommand(flush)
	return command
}

// requestCache completes a command. The command sends a request about the replies for a name or a suffix, or about all
// replies, and prints the result.
func requestCache[T any](command *cobra.Command, method, path string, text func(w io.Writer, result *T)) {
	var (
		c      agentCommand
		suffix string
	)
	command.Args = usageArgs(cobra.MaximumNArgs(1))
	command.RunE = func(command *cobra.Command, args []string) error {
		selection := url.Values{}
		switch bySuffix := command.Flags().Changed("suffix"); {
		case len(args) > 0 && bySuffix:
			return usageError{errors.New("want NAME or --suffix, not both")}
		case len(args) > 0:
			selection.Set("name", args[0])
		case bySuffix:
			selection.Set("suffix", suffix)
		}
		for _, value := range selection {
			if _, err := wire.ParseName(value[0]); err != nil { // an empty one would select all
				return usageError{err}
			}
		}
		result := new(T)
		if err := c.status.do(command.Context(), method, path, selection, result); err != nil {
			return err
		}
		return c.output.print(command.OutOrStdout(), result, func(w io.Writer) { text(w, result) })
	}
	c.declare(command.Flags())
	command.Flags().StringVar(&suffix, "suffix", "", "only the names of this `suffix`")
}

func printCache(w io.Writer, content *forward.CacheContent) {
	fmt.Fprintln(w, "NAME\tTYPE\tREPLY\tRECORDS\tTTL\tFROM\tFAILURE")
	for _, e := range content.Entries {
		ttl := strconv.Itoa(e.TTL)
		if e.TTL < 0 {
			ttl = "stale"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\t%s\n",
			e.Name, e.Type, cmp.Or(e.Rcode, "-"), e.Records, ttl, cmp.Or(e.Server, "-"), e.Failure)
	}
	if more := content.Total - len(content.Entries); more > 0 {
		fmt.Fprintf(w, "and %d more\n", more)
	}
}
