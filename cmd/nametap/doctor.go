package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/internal/version"
)

// exitWarnings is the exit code of doctor if there are only warnings.
const exitWarnings = 3

// A doctorCommand is one run of nametap doctor.
type doctorCommand struct {
	agentCommand

	all    bool
	bundle string
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
command itself checks that an agent runs. If none does, it checks the settings of the agent's
unit, and which program has the agent's port. It also checks the agent's version, resolv.conf,
nsswitch.conf, and that the agent answers the queries that programs send.

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
	command.Flags().BoolVar(&d.all, "all", false, "list the checks that passed and those that were skipped, too")
	command.Flags().StringVar(&d.bundle, "bundle", "", "also write a new tar `file` for a ticket: the problems, status, "+
		"settings, metrics, queries that failed, and a digest of the table")
	return command
}

func (d *doctorCommand) run(ctx context.Context, w io.Writer) error {
	var status agent.Status
	host := new(problems.Host)
	wrong := d.status.options.resolve() // the settings may be the problem that doctor finds
	err := wrong
	if wrong != nil {
		host.Settings, host.SettingsOf = wrong.Error(), "a setting of this command"
	} else {
		err = d.status.get(ctx, "/debug/status", nil, &status)
	}
	switch {
	case errors.Is(err, fs.ErrPermission) && wrong == nil:
		return usageError{err}
	case errors.As(err, new(usageError)), ctx.Err() != nil:
		return err
	}
	host.Domain, host.Hosts = d.status.options.agent.DNS.Domain, hostsServices()
	host.MDNS = exists("/run/avahi-daemon/socket")
	host.Version, host.Running = version.String(), strings.TrimPrefix(status.Version, "nametap ")
	unread := map[problems.Code]string{}
	for _, s := range status.Diagnosis.Skipped {
		unread[s.Code] = s.Reason
	}
	if err != nil && wrong == nil {
		d.readAbsent(ctx, host, err)
	}
	if status.Capture != nil && status.Capture.Rules != nil {
		for _, f := range status.Capture.Rules.Families {
			host.Others = append(host.Others, f.Others...)
		}
	}
	servers := d.readResolvConf(host)
	skipped := ""
	switch {
	case err != nil:
	case len(status.Redirected) > 0 && os.Getenv(inPod) != "":
		host.Unredirected, skipped = d.unredirected(status)
	case len(servers) > 0:
		host.Ways, skipped = d.ways(ctx, status, servers[0])
	}
	unread[problems.QueriesGoElsewhere], unread[problems.QueriesGoUnanswered] = skipped, skipped
	found := append(problems.Find(&problems.Readings{Now: time.Now(), Host: host}), status.Diagnosis.Problems...)
	report := problems.Judge(found, status.Diagnosis.Suspected, unread)
	if err := d.output.print(w, report, func(w io.Writer) { d.print(w, status, report) }); err != nil {
		return err
	}
	if d.bundle != "" {
		if err := d.writeBundle(ctx, status, report); err != nil {
			return err
		}
	}
	switch report.Worst() {
	case problems.Severe:
		return exitError(exitFailed)
	case problems.Minor:
		return exitError(exitWarnings)
	}
	return nil
}

// readAbsent finds out why no agent answers.
func (d *doctorCommand) readAbsent(ctx context.Context, host *problems.Host, err error) {
	host.Absent, host.Unit = err.Error(), unitState(ctx)
	if os.Getenv(inPod) == "" {
		unit := readUnit(ctx)
		own := looseOptions()
		own.checkOnly = true
		err := settings.Resolve(own.flags, append(unit.environ, os.Environ()...))
		if err == nil {
			_, err = own.config()
		}
		if err != nil && len(unit.environ) > 0 {
			host.Settings, host.SettingsOf = err.Error(), "a setting of nametap.service ("+strings.Join(unit.files, ", ")+")"
		}
	}
	host.Taken = programsAt(d.status.options.agent.DNS.Addr)
}

// exists reports whether there is a file.
func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// nsswitchConf says which services libc uses to look up names.
const nsswitchConf = "/etc/nsswitch.conf"

// resolvConf returns the path of the file that programs read.
func (d *doctorCommand) resolvConf() string {
	return cmp.Or(d.status.options.agent.DNS.Forward.ResolvConf, resolvconf.DefaultPath)
}

// hostsServices returns the services of the line "hosts" of nsswitch.conf; nil without that line.
func hostsServices() []string {
	text, err := os.ReadFile(nsswitchConf)
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		if services, found := strings.CutPrefix(strings.TrimSpace(line), "hosts:"); found {
			return strings.Fields(services)
		}
	}
	return nil
}

// unitState returns the state of nametap.service, as systemd says it; "" without systemd or the unit.
func unitState(ctx context.Context) string {
	shown := showUnit(ctx, "ActiveState,SubState,Result,NRestarts")
	if shown == "" {
		return ""
	}
	has := map[string]string{}
	for line := range strings.Lines(shown) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		has[key] = value
	}
	text := fmt.Sprintf("%s (%s)", has["ActiveState"], has["SubState"])
	if has["Result"] != "success" {
		text += ", result " + has["Result"]
	}
	return text + ", restarted " + has["NRestarts"] + " times"
}

// readResolvConf reads the file that programs read, and returns its nameservers.
func (d *doctorCommand) readResolvConf(host *problems.Host) []netip.AddrPort {
	host.ResolvConf = d.resolvConf()
	text, err := os.ReadFile(host.ResolvConf)
	if err != nil {
		host.Unread = err.Error()
		if target, linkErr := os.Readlink(host.ResolvConf); linkErr == nil && errors.Is(err, fs.ErrNotExist) {
			host.Unread = "it is a link to " + target + ", which does not exist"
		}
		return nil
	}
	servers := resolvconf.Parse(text).Servers
	for _, server := range servers {
		host.Servers = append(host.Servers, server.Addr().String())
	}
	return servers
}

// unredirected returns the families whose queries are not redirected to the agent of this pod, as the agent's test
// queries show, each with the reason. skipped says why this is not known.
func (d *doctorCommand) unredirected(status agent.Status) (reasons map[string]string, skipped string) {
	capture, err := d.status.options.captureConfig()
	switch {
	case err != nil:
		return nil, "the settings of capture are wrong: " + err.Error()
	case !capture.On:
		return nil, "capture is off: " + capture.Because
	}
	reasons = map[string]string{}
	for _, r := range status.Redirected {
		if notRedirected(r) && capture.Config.Has(familyOf(r)) {
			reasons[familyOf(r).String()] = fmt.Sprintf("%s a test query to %s", r.State, r.To)
		}
	}
	return reasons, ""
}

// ways sends queries to a nameserver of resolv.conf, as programs do. skipped says why it sends none.
func (d *doctorCommand) ways(
	ctx context.Context, status agent.Status, server netip.AddrPort,
) (sent []problems.Probe, skipped string) {
	own := status.OnlyNameserverOf != ""
	switch {
	case status.Capture != nil && !status.Capture.On:
		return nil, "capture is off: " + status.Capture.Because
	case status.Capture == nil && !own:
		return nil, "this agent captures no queries: programs that do not query it directly do not reach it"
	case os.Geteuid() != 0 && !own:
		return nil, "only root may send queries as another user"
	}
	if excluded := d.excluded(ctx); excluded != "" {
		return nil, "the settings may exclude this query from capture: " + excluded
	}
	sent, err := agent.AsProgram(ctx, server, status.DNS)
	if err != nil {
		return nil, "the agent does not say who it is: " + err.Error()
	}
	return sent, ""
}

// excluded returns a setting that may keep the agent from capturing the queries that doctor sends. It returns "" if
// there is no such setting.
func (d *doctorCommand) excluded(ctx context.Context) string {
	settings, err := askSettings(ctx, d.status)
	if err != nil {
		return ""
	}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		byUser := name == "capture-exclude-uid" || name == "capture-exclude-gid"
		if strings.HasPrefix(name, "capture-exclude-") &&
			(!byUser || slices.Contains(settings[name], strconv.Itoa(agent.ProgramUser))) {
			return "--" + name
		}
	}
	return ""
}

// print prints a report: the problems, and how many checks found none.
func (d *doctorCommand) print(w io.Writer, status agent.Status, report problems.Report) {
	fmt.Fprintf(w, "nametap %s", version.Release())
	if status.Uptime != "" {
		fmt.Fprintf(w, ", agent up %s, control plane %s", status.Uptime, status.XDS.Address)
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
		fmt.Fprintf(w, "suspected since %s, a problem after %v: %s\n", timeOfDay(p.Since), problems.Lasting, clip.Line(p.What))
	}
	if d.all {
		for _, title := range report.Passed {
			fmt.Fprintf(w, "ok       %s\n", title)
		}
		for _, s := range report.Skipped {
			fmt.Fprintf(w, "skipped  %s: %s\n", s.Check, clip.Line(s.Reason))
		}
	}
	fmt.Fprintf(w, "%d checks passed, %d skipped", len(report.Passed), len(report.Skipped))
	if !d.all {
		fmt.Fprint(w, "; --all lists them")
	}
	fmt.Fprintln(w)
	if len(report.Problems) == 0 {
		fmt.Fprintln(w, "queries for single names may fail all the same: nametap tail --failed --since 10m")
	}
}

// A bundle is a tar file for a ticket. It does not have the names of the table; it has the queries that failed,
// and their clients. If a file cannot be written, closing the tar file returns the error.
type bundle struct {
	tar     *tar.Writer
	missing bytes.Buffer // why parts are missing
}

// add adds a file. If err is not nil, the content is not known, and add notes err instead.
func (b *bundle) add(name string, content []byte, err error) {
	if err != nil {
		fmt.Fprintln(&b.missing, err)
		return
	}
	header := &tar.Header{Name: "nametap/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: time.Now()}
	if b.tar.WriteHeader(header) == nil {
		_, _ = b.tar.Write(content)
	}
}

// writeBundle writes what is known of the agent to a new file.
func (d *doctorCommand) writeBundle(ctx context.Context, status agent.Status, report problems.Report) (err error) {
	// O_EXCL does not follow a link that another user has put there.
	file, err := os.OpenFile(d.bundle, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("--bundle: %w", err)
	}
	defer func() {
		if err = errors.Join(err, file.Close()); err != nil {
			_ = os.Remove(d.bundle)
		}
	}()
	b := &bundle{tar: tar.NewWriter(file)}
	b.add("version.txt", []byte(version.String()+"\n"), nil)
	for name, v := range map[string]any{"problems.json": report, "status.json": status} {
		text, err := json.MarshalIndent(v, "", "  ")
		b.add(name, append(text, '\n'), err)
	}
	failures := url.Values{agent.ParamSince: {allOf.String()}, agent.ParamOnce: {"true"}}
	for _, reply := range []struct {
		name, path string
		query      url.Values
	}{
		{"settings.json", "/debug/settings", nil},
		{"failures.json", "/debug/tail", failures},
		{"metrics.txt", "/metrics", nil},
	} {
		text, err := d.status.read(ctx, http.MethodGet, reply.path, reply.query)
		b.add(reply.name, text, err)
	}
	table, err := d.status.read(ctx, http.MethodGet, "/debug/ndsz", nil)
	b.add("table.txt", fmt.Appendf(nil, "sha256 of /debug/ndsz: %x, %d bytes\n", sha256.Sum256(table), len(table)), err)
	for name, path := range map[string]string{"resolv.conf": d.resolvConf(), "nsswitch.conf": nsswitchConf} {
		text, err := os.ReadFile(path)
		b.add(name, text, err)
	}
	b.add("missing.txt", b.missing.Bytes(), nil)
	return b.tar.Close()
}
