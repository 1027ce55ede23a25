package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/user"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/listen"
)

// allOf is how far back `nametap tail --no-follow` begins if --since is not set, and how long it follows without --for.
// No agent runs that long.
const allOf = 10 * 365 * 24 * time.Hour

// A tailCommand is one run of nametap tail.
type tailCommand struct {
	agentCommand

	flags    *pflag.FlagSet
	filter   map[string]*string
	failed   bool
	denied   bool
	lookUp   bool // look up the client of every query
	limit    time.Duration
	since    time.Duration
	count    int
	noFollow bool
	by       topKey // count queries by this; "" to print them

	lost    uint64
	names   clientNames
	began   time.Time
	shown   int
	header  bool
	colour  bool
	reasons bool // reasons were printed
	counts  counts
	drawn   time.Time // when the counts were last shown on a terminal
}

// declare declares the flags.
func (t *tailCommand) declare(flags *pflag.FlagSet) {
	t.agentCommand.declare(flags)
	t.flags = flags
	flags.BoolVar(&t.failed, "failed", false, "only failures and other queries worth a look")
	flags.BoolVar(&t.denied, "denied", false, "only queries for names that the guard denies, with their clients")
	t.filter = map[string]*string{}
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
	flags.DurationVar(&t.limit, "for", 0, "end after this `duration`")
	flags.BoolVar(&t.lookUp, "who", false,
		"look up the client of every query, not only of failures: this costs the agent up to 2 % more of a processor")
	flags.DurationVar(&t.since, "since", 0, "begin with the queries of this last `duration` that the agent has kept")
	flags.IntVarP(&t.count, "count", "n", 0, "end after this `number` of queries")
	flags.BoolVar(&t.noFollow, "no-follow", false, "end after the queries that the agent has kept")
}

// params returns the parameters of the request. The only argument is a name, which may be missing.
func (t *tailCommand) params(args []string) (url.Values, error) {
	params := url.Values{}
	for param, value := range t.filter {
		if t.flags.Changed(param) {
			params.Set(param, *value)
		}
	}
	if len(args) > 0 {
		params.Set(seen.ParamName, args[0])
	}
	for param := range params {
		if params.Get(param) == "" { // it would select all queries
			return nil, usageError{fmt.Errorf("%s \"\": want a value", param)}
		}
	}
	if t.failed {
		params.Set(seen.ParamFailed, "true")
	}
	if t.denied {
		params.Set(seen.ParamDenied, "true")
	}
	if t.lookUp || t.by == keyClient {
		params.Set(seen.ParamWho, "true")
	}
	_, err := seen.ParseFilter(params)
	switch {
	case err != nil:
		return nil, usageError{err}
	case t.limit < 0:
		return nil, usageError{fmt.Errorf("--for=%v: want a time such as 30s", t.limit)}
	case t.since < 0:
		return nil, usageError{fmt.Errorf("--since=%v: want a time ago such as 10m", t.since)}
	case t.count < 0:
		return nil, usageError{fmt.Errorf("--count=%d: want a number of queries", t.count)}
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

// limited returns a context that ends with ctx, after the time of --for, or when nobody can read the output w any more:
// where no query comes, no write would fail.
func (t *tailCommand) limited(ctx context.Context, w io.Writer) (context.Context, context.CancelFunc) {
	limited, cancel := context.WithTimeout(ctx, cmp.Or(t.limit, allOf))
	if file, ok := w.(*os.File); ok {
		output := []unix.PollFd{{Fd: int32(file.Fd())}} //nolint:gosec // a descriptor
		go func() {
			defer cancel()
			for err := error(unix.EINTR); errors.Is(err, unix.EINTR); {
				_, err = unix.Poll(output, -1) // reports POLLERR of a pipe, or POLLHUP of a socket or a terminal
			}
		}()
	}
	return limited, cancel
}

func newTailCommand() *cobra.Command {
	t := &tailCommand{}
	command := &cobra.Command{
		Use:   "tail [NAME]",
		Short: "Show the queries that fail, and all others as they are answered",
		Long: `Show the queries that the agent answers: the client, the question, the result, where that
came from, and the reason for a failure. With NAME, show those for the name and all names
below it.

The agent keeps the last 1,000 failures, and the last 1,000 queries that were slow (500 ms)
or for Services that do not exist or have no address; --since and --no-follow show them. --failed
shows no others.

The exit code is 1 if --no-follow or --for found no query.`,
		Example: `  nametap tail --failed --since 10m
  nametap tail payments.example.com
  nametap tail --client gitea.service --type AAAA --rcode NXDOMAIN
  nametap tail --slow 200ms --server 10.96.0.10 --for 30s --output json`,
		Args: usageArgs(cobra.MaximumNArgs(1)),
		RunE: func(command *cobra.Command, args []string) error {
			t.colour = isTerminal(command.OutOrStdout()) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
			err := t.run(command.Context(), command.OutOrStdout(), args)
			// The command may also have printed queries if it ends with one of these errors.
			if err == nil || errors.Is(err, errTailEnded) || errors.Is(err, exitError(exitFailed)) {
				t.printEnd(command.Context(), command.ErrOrStderr())
			}
			return err
		},
	}
	t.declare(command.Flags())
	return command
}

// errTailEnded is the error if the agent ends while its queries are shown.
var errTailEnded = errors.New(
	"the agent has ended the connection: it was restarted, 8 other commands read queries, or this one read nothing for a minute")

func (t *tailCommand) run(ctx context.Context, w io.Writer, args []string) error {
	params, err := t.params(args)
	if err != nil {
		return err
	}
	limited, cancel := t.limited(ctx, w)
	defer cancel()
	t.began = time.Now()
	err = t.status.tail(limited, params, &t.lost, func(r *seen.Record) (more bool, err error) { return t.show(w, r) })
	stopped := limited.Err() != nil // --for, a signal, or no reader
	if t.by != "" && (t.shown > 0 || stopped) {
		if err := t.printCounts(w); err != nil {
			return err
		}
	}
	switch {
	case stopped, err == nil, t.noFollow && errors.Is(err, io.EOF):
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF): // even in the middle of a line
		return errTailEnded
	default:
		return err
	}
	if t.shown == 0 && (t.noFollow || t.limit > 0) && ctx.Err() == nil {
		return exitError(exitFailed)
	}
	return nil
}

// printEnd prints how many queries were shown, and how many were lost. If w is no terminal, it prints only the latter, if
// there are any.
func (t *tailCommand) printEnd(ctx context.Context, w io.Writer) {
	switch {
	case isTerminal(w):
		text, since := "", t.began.Add(-t.since)
		if ctx.Err() != nil {
			text = "\n" // ends the line in which the terminal shows ^C
		}
		if t.since == allOf {
			text += fmt.Sprintf("-- %d of the queries that the agent has kept", t.shown)
		} else {
			text += fmt.Sprintf("-- %d queries since %s; %d lost",
				t.shown, strings.TrimSuffix(timeOfDay(since), since.Local().Format(".000")), t.lost)
		}
		if t.reasons {
			text += "; `nametap explain F4` explains [F4]"
		}
		printError(w, text+"\n")
	case t.lost > 0:
		printError(w, fmt.Sprintf("%d more queries came faster than this command read them\n", t.lost))
	}
}

// show prints a query, and reports whether more are wanted.
func (t *tailCommand) show(w io.Writer, r *seen.Record) (more bool, err error) {
	t.shown++
	switch {
	case t.by != "":
		t.counts.add(t.key(r), r)
		err = t.redraw(w)
	case t.output == outputJSON:
		err = json.NewEncoder(w).Encode(r)
	default:
		err = t.print(w, r)
	}
	return t.count == 0 || t.shown < t.count, err
}

// tailRow is the format of a line. The columns are as wide as most values.
const tailRow = "%-12s  %-26s  %-36s  %s  %-16s  %s\n"

// resultColumn is the width of the column with the result, without its colour.
const resultColumn = 8

// Colours of a terminal (ECMA-48, SGR).
const (
	red    = "31"
	yellow = "33"
	faint  = "2"
)

// coloured returns a text in a colour, if the output is coloured.
func (t *tailCommand) coloured(text, colour string) string {
	if !t.colour || colour == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[m"
}

// print prints a query in one line. If there is a reason, it prints that in another line.
func (t *tailCommand) print(w io.Writer, r *seen.Record) error {
	var text strings.Builder
	if !t.header {
		fmt.Fprintf(&text, tailRow, "TIME", "CLIENT", "QUESTION", fmt.Sprintf("%-*s", resultColumn, "RESULT"), "FROM", "TOOK")
		t.header = true
	}
	result := t.coloured(fmt.Sprintf("%-*s", resultColumn, tailResult(r)), tailColour(r))
	fmt.Fprintf(&text, tailRow, timeOfDay(r.Time), t.names.nameOf(r), r.Question(), result, tailFrom(r), tailTook(r))
	if r.Reason != "" {
		t.reasons = true
		fmt.Fprintf(&text, "%14s%s\n", "",
			t.coloured(fmt.Sprintf("%s  [%s]", clip.Line(r.Reason), strings.Join(r.Rows, " ")), faint))
	}
	_, err := io.WriteString(w, text.String())
	return err
}

// timeOfDay returns t as text: the time of day or, if t is not today, the date and the time of day.
func timeOfDay(t time.Time) string {
	t = t.Local()
	if t.Format(time.DateOnly) != time.Now().Format(time.DateOnly) {
		return t.Format("Jan _2 15:04:05.000")
	}
	return t.Format("15:04:05.000")
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

// tailColour returns the colour of a result: red for a failure, yellow for another query worth a look.
func tailColour(r *seen.Record) string {
	switch {
	case !r.Noteworthy:
		return ""
	case r.Source != "stale" && r.Rcode != "NOERROR" && r.Rcode != "NXDOMAIN":
		return red
	}
	return yellow
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
	text := "-"
	if r.Took != nil {
		text = seconds(*r.Took).String()
	}
	if r.Transport == "tcp" {
		text += ", TCP"
	}
	return text
}

// clientNames names the clients of queries for people.
type clientNames struct {
	users map[uint32]string // by uid; "" for a user without a name
}

// nameOf returns the unit that a query came from, or else the name of the user, with the uid. For a client that was not
// looked up, it returns the address. If that is an address of this host, it returns "a local program" instead, because
// a reader could mistake the address for the address of a nameserver.
func (c *clientNames) nameOf(r *seen.Record) string {
	named := *r
	switch {
	case r.Unit != "":
	case r.UID != nil:
		named.Unit = c.user(*r.UID)
	case r.Client.Addr().IsValid() && listen.OfThisHost(r.Client.Addr().Unmap()):
		return "a local program"
	}
	return clip.Line(named.Who())
}

// user returns the name of a user, or "" if the user has none.
func (c *clientNames) user(uid uint32) string {
	name, known := c.users[uid]
	if known {
		return name
	}
	if found, err := user.LookupId(strconv.FormatUint(uint64(uid), 10)); err == nil {
		name = found.Username
	}
	if c.users == nil {
		c.users = map[uint32]string{}
	}
	c.users[uid] = name
	return name
}
