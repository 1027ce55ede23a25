package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy/seen"
)

// allOf is how far back --no-follow begins without --since: longer than any agent runs.
const allOf = 10 * 365 * 24 * time.Hour

// A tailCommand is one run of nametap tail.
type tailCommand struct {
	status   statusClient
	output   string
	filter   map[string]*string
	failed   bool
	who      bool
	since    time.Duration
	count    int
	limit    time.Duration
	noFollow bool

	shown  int
	lost   uint64
	header bool
}

func newTailCommand() *cobra.Command {
	t := &tailCommand{filter: map[string]*string{}}
	command := &cobra.Command{
		Use:   "tail [NAME]",
		Short: "Show the queries that fail, and all others as they are answered",
		Long: `Show the queries that the agent answers: the client, the question, the result, where it
came from, and why it is none. With NAME, show those for the name and all names below it.

The agent keeps the last 1,000 failures, and the last 1,000 queries that were slow (500 ms)
or for names of Services that do not exist; --since and --no-follow show them. --failed
shows no others.

The exit code is 1 if --no-follow or --for found no query.`,
		Example: `  nametap tail --failed --since 10m
  nametap tail payments.example.com
  nametap tail --client gitea.service --type AAAA --rcode NXDOMAIN
  nametap tail --slow 200ms --server 10.96.0.10 --for 30s --output json`,
		Args: usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(command *cobra.Command, args []string) error {
			err := t.run(command.Context(), command.OutOrStdout(), args)
			if t.lost > 0 {
				printError(command.ErrOrStderr(), fmt.Sprintf("%d more queries came faster than this command read them\n", t.lost))
			}
			return err
		},
	}
	flags := command.Flags()
	t.status.declare(flags)
	flags.BoolVar(&t.failed, "failed", false, "only failures and other queries worth a look")
	flags.BoolVar(&t.who, "who", false, "look up the client of every query, not only of failures: this costs the agent up to 2 % of a processor")
	for _, f := range []struct{ param, usage string }{
		{seen.ParamClient, "only queries of a `client`: an address, a prefix, a uid, a systemd unit or a container"},
		{seen.ParamType, "only queries for a record `type`"},
		{seen.ParamRcode, "only answers with a response `code` such as SERVFAIL"},
		{seen.ParamServer, "only queries that a nameserver answered, or failed to, by its `address`"},
		{seen.ParamSource, "only answers from a `source`: table, cache, stale, cached_failure, upstream, self or probe"},
		{seen.ParamSlow, "only queries that took as long as this `duration`"},
	} {
		t.filter[f.param] = flags.String(f.param, "", f.usage)
	}
	flags.DurationVar(&t.since, "since", 0, "begin with the queries of this last `duration` that the agent has kept")
	flags.IntVarP(&t.count, "count", "n", 0, "end after this `number` of queries")
	flags.DurationVar(&t.limit, "for", 0, "end after this `duration`")
	flags.BoolVar(&t.noFollow, "no-follow", false, "end after the queries that the agent has kept")
	declareOutput(flags, &t.output)
	return command
}

// params returns the parameters of the request.
func (t *tailCommand) params(args []string) (url.Values, error) {
	params := url.Values{}
	for param, value := range t.filter {
		if *value != "" {
			params.Set(param, *value)
		}
	}
	if len(args) > 0 {
		params.Set(seen.ParamName, args[0])
	}
	if t.failed {
		params.Set(seen.ParamFailed, "true")
	}
	if t.who {
		params.Set(seen.ParamWho, "true")
	}
	if _, err := seen.ParseFilter(params); err != nil {
		return nil, usageError{err}
	}
	switch {
	case t.since < 0:
		return nil, usageError{fmt.Errorf("--since=%v: want a time ago such as 10m", t.since)}
	case t.count < 0:
		return nil, usageError{fmt.Errorf("--count=%d: want a number of queries", t.count)}
	case t.limit < 0:
		return nil, usageError{fmt.Errorf("--for=%v: want a time such as 30s", t.limit)}
	}
	if t.noFollow {
		params.Set(agent.ParamOnce, "true")
		if t.since == 0 {
			t.since = allOf
		}
	}
	if t.since > 0 {
		params.Set(agent.ParamSince, t.since.String())
	}
	return params, nil
}

// errTailEnded is the error if the agent ends while its queries are shown.
var errTailEnded = errors.New("the agent has ended the connection: it was restarted, or this command read nothing for a minute")

func (t *tailCommand) run(ctx context.Context, w io.Writer, args []string) error {
	params, err := t.params(args)
	if err != nil {
		return err
	}
	limited := ctx
	if t.limit > 0 {
		var cancel context.CancelFunc
		limited, cancel = context.WithTimeout(ctx, t.limit)
		defer cancel()
	}
	resp, err := t.status.request(limited, http.MethodGet, "/debug/tail", params)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	err = t.show(w, json.NewDecoder(resp.Body))
	switch {
	case limited.Err() != nil: // --for, or a signal
	case errors.Is(err, io.EOF) && t.noFollow, err == nil:
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return errTailEnded
	default:
		return err
	}
	if t.shown == 0 && (t.noFollow || t.limit > 0) && ctx.Err() == nil {
		return exitError(exitFailed)
	}
	return nil
}

// show prints the queries until there is an error, or --count of them.
func (t *tailCommand) show(w io.Writer, lines *json.Decoder) error {
	encoder := json.NewEncoder(w)
	for t.count == 0 || t.shown < t.count {
		var line agent.TailLine
		if err := lines.Decode(&line); err != nil {
			return err
		}
		t.lost += line.Lost
		if line.Record == nil {
			continue
		}
		t.shown++
		var err error
		if t.output == outputJSON {
			err = encoder.Encode(line.Record)
		} else {
			err = t.print(w, line.Record)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// tailRow is the format of a line. The columns are as wide as most values; longer ones move the rest of the line.
const tailRow = "%-12s  %-26s  %-36s  %-8s  %-16s  %s\n"

// print prints a query in one line, and the reason, if there is one, in another.
func (t *tailCommand) print(w io.Writer, r *seen.Record) error {
	var text strings.Builder
	if !t.header {
		fmt.Fprintf(&text, tailRow, "TIME", "CLIENT", "QUESTION", "RESULT", "FROM", "TOOK")
		t.header = true
	}
	fmt.Fprintf(&text, tailRow, clock(r.Time), printable(r.Who()), r.Question(), tailResult(r), tailFrom(r), tailTook(r))
	if r.Reason != "" {
		fmt.Fprintf(&text, "%14s%s  [%s]\n", "", printable(r.Reason), strings.Join(r.Rows, " "))
	}
	_, err := io.WriteString(w, text.String())
	return err
}

// clock returns the time of day, after the date if that is not today's.
func clock(at time.Time) string {
	at = at.Local()
	if at.Format(time.DateOnly) != time.Now().Format(time.DateOnly) {
		return at.Format("Jan _2 15:04:05.000")
	}
	return at.Format("15:04:05.000")
}

func tailResult(r *seen.Record) string {
	switch {
	case r.Source == "stale":
		return "stale"
	case r.Truncated:
		return r.Rcode + " TC"
	}
	return r.Rcode
}

func tailFrom(r *seen.Record) string {
	switch r.Source {
	case "upstream":
		if r.Server != "" {
			return r.Server
		}
		return "-"
	case "stale":
		return fmt.Sprintf("cache, %v old", time.Duration(r.Age)*time.Second)
	case "cached_failure":
		return "cache"
	}
	return r.Source
}

func tailTook(r *seen.Record) string {
	if r.Took == nil {
		return "-"
	}
	took := time.Duration(*r.Took * float64(time.Second))
	switch {
	case took >= time.Second:
		return took.Round(10 * time.Millisecond).String()
	case took >= time.Millisecond:
		return took.Round(100 * time.Microsecond).String()
	}
	return took.Round(time.Microsecond).String()
}

// printable returns a text in which a terminal finds nothing to obey. A user may choose the name of a cgroup.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
}
