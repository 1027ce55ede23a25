package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/internal/version"
)

// exitWarnings is the exit code of doctor if there are only warnings.
const exitWarnings = 3

// A doctorCommand is one run of nametap doctor.
type doctorCommand struct {
	agentCommand

	all bool
}

func newDoctorCommand() *cobra.Command {
	d := new(doctorCommand)
	command := &cobra.Command{
		Use:   "doctor",
		Short: "Show what is wrong, why, and what ends it",
		Long: `Show what is wrong with the agent and with DNS on this host: since when, the evidence, the
effect, and a command or a file that ends it. Problems come before warnings, and causes before
problems that they may explain. A problem that another one does explain is left out. Run the
command as root, which may send queries as another user.

The agent reports a problem that has lasted for 15 s, and until 15 s after its end. The
command lets the agent ask each nameserver, for up to 2 s. It finds an agent without a private
socket by its ports. It checks the settings that the agent's unit would have after a restart,
which program has the agent's port, the agent's version, resolv.conf, nsswitch.conf, and that
the agent answers the queries that programs send. A check passes only if something was seen a
short time ago; what nothing was seen of is not known.

The exit code is 0 without a problem, 1 with one, 3 with warnings only, 2 if this user may
not ask the agent.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error {
			return d.run(command.Context(), command.OutOrStdout())
		},
	}
	d.declare(command.Flags())
	flag := command.Flags().Lookup("resolv-conf")
	flag.Hidden, flag.Usage = false, "`path` of the resolv.conf that programs read"
	command.Flags().BoolVar(&d.all, "all", false, "list the checks that passed and those whose result is not known, too")
	return command
}

func (d *doctorCommand) run(ctx context.Context, w io.Writer) error {
	h := host{doctorCommand: d}
	if h.wrong = d.status.options.resolve(); h.wrong != nil { // the settings may be the problem that doctor finds
		h.err = h.wrong
	} else {
		h.err = d.status.get(ctx, "/debug/status", url.Values{agent.ParamAsk: {"true"}}, &h.status)
	}
	switch {
	case errors.Is(h.err, fs.ErrPermission) && h.wrong == nil:
		return usageError{h.err}
	case errors.As(h.err, new(usageError)), ctx.Err() != nil:
		return h.err
	}
	files, servers := h.fileConditions()
	report := condition.Judge(slices.Concat(h.processConditions(ctx), files, h.status.Conditions, h.wayConditions(ctx, servers)))
	if err := d.output.print(w, report, func(w io.Writer) { d.print(w, h.status, report) }); err != nil {
		return err
	}
	switch report.Worst() {
	case condition.Severe:
		return exitError(exitFailed)
	case condition.Minor:
		return exitError(exitWarnings)
	}
	return nil
}

// resolvConf returns the path of the file that programs read.
func (d *doctorCommand) resolvConf() string {
	return cmp.Or(d.status.options.agent.DNS.Forward.ResolvConf, resolvconf.DefaultPath)
}

// unitState returns the state of nametap.service, as systemd says it; "" without systemd or the unit.
func unitState(ctx context.Context) string {
	shown := showUnit(ctx, "ActiveState,SubState,Result,NRestarts")
	if shown == "" {
		return ""
	}
	state := fmt.Sprintf("%s (%s)", property(shown, "ActiveState"), property(shown, "SubState"))
	if result := property(shown, "Result"); result != "success" {
		state += ", result " + result
	}
	return state + ", restarted " + property(shown, "NRestarts") + " times"
}

// print prints a report: the problems, and how many checks found none.
func (d *doctorCommand) print(w io.Writer, status agent.Status, report condition.Report) {
	fmt.Fprintf(w, "nametap %s", version.Release())
	if status.XDS.Address != "" {
		fmt.Fprintf(w, ", agent up %s, control plane %s", seconds(status.Uptime), status.XDS.Address)
	}
	fmt.Fprint(w, "\n\n")
	for _, p := range report.Problems {
		since := ""
		if !p.Since.IsZero() {
			since = "  since " + timeOfDay(p.Since)
		}
		fmt.Fprintf(w, "%s  %s%s\n", strings.ToUpper(string(p.Severity)), clip.Line(p.What), since)
		for _, line := range [][2]string{
			{"evidence", p.Evidence}, {"effect", p.Effect}, {"mend", p.Mend}, {"rows", strings.Join(p.Rows, " ")},
		} {
			fmt.Fprintf(w, "  %-8s  %s\n", line[0], oneLine(line[1]))
		}
	}
	for _, p := range report.Suspected {
		fmt.Fprintf(w, "suspected since %s, a problem after %v: %s\n", timeOfDay(p.Since), condition.Lasting, clip.Line(p.What))
	}
	if d.all {
		for _, r := range report.OK {
			fmt.Fprintf(w, "ok         %s\n", r.Title)
		}
		for _, r := range report.Unknown {
			fmt.Fprintf(w, "not known  %s: %s\n", r.Title, clip.Line(r.Reason))
		}
	}
	fmt.Fprintf(w, "%d checks passed, %d not known", len(report.OK), len(report.Unknown))
	if !d.all {
		fmt.Fprint(w, "; --all lists them")
	}
	fmt.Fprintln(w)
	if len(report.Problems) == 0 {
		fmt.Fprintln(w, "queries for single names may fail all the same: nametap tail --failed --since 10m")
	}
}
