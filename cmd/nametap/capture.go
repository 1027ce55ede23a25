package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/agent/resolved"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/iptables"
)

func newCaptureCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "capture",
		Short: "Install, remove or check the rules that redirect port 53 to the agent",
		Long: `Install, remove or check the iptables rules that redirect port 53 to the agent. The rules
redirect queries of applications, but not the agent's own. The settings are the agent's. All
commands but remove look for them: flags and the environment come first, then the settings
of the running agent or, without one, those of the unit nametap.service, such as
/etc/default/nametap. With --config or --mesh-config, and in a container of a pod, only
flags, the environment and these files count.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error { return command.Help() },
	}
	command.AddCommand(newCaptureApply(), newCaptureRemove(), newCapturePrint(), newCaptureStatus(), newCaptureCheck())
	return command
}

func newCaptureRemove() *cobra.Command {
	c := new(captureCommand)
	afterAgent, unlessLeased := false, false
	command := c.declared("remove", "Remove the rules",
		`Remove all rules of nametap from both backends, whatever settings installed them.
Queries go to nameservers again at once; the command ends when no reply can be in flight
to the agent. If rules of nametap may remain in a backend that cannot be read, the exit
code is 1.

--after-agent is for service managers: the command does not wait for replies, and ignores a
backend that this user cannot read. With --unless-leased it leaves rules that the next
agent may take over, because the kernel is about to end the capture by itself. With
--capture-fail-open=false, or if the rules enforce the policy of a guard, it does nothing.`)
	command.RunE = func(command *cobra.Command, _ []string) error {
		log := newLogWriter(os.Stderr) // a log that is not read must not delay the removal
		defer log.close()
		c.options.logTo = log
		stay, logger := c.resolveForRemoval()
		switch {
		case afterAgent && stay:
			logger.Warn("the rules stay: without an agent queries are refused", "because", "--capture-fail-open=false")
			return nil
		case afterAgent:
			return removeAfterAgent(command.Context(), unlessLeased, logger)
		}
		capture, err := iptables.New(iptables.DefaultConfig(), logger) // removal finds chains by their names alone
		if err != nil {
			return err
		}
		unregister(logger)
		return capture.Remove(command.Context())
	}
	command.Flags().BoolVar(&afterAgent, "after-agent", false,
		"remove the rules of an agent that has ended, for service managers")
	command.Flags().BoolVar(&unlessLeased, "unless-leased", false,
		"with --after-agent: leave rules that the kernel ends within 2 s")
	return command
}

// removeAfterAgent removes the rules of an agent that has ended, so none of its replies is in flight. It ignores
// rules that this user cannot read. Rules that enforce the policy of a guard stay. If unlessLeased is true, it leaves rules that
// the next agent may take over.
func removeAfterAgent(ctx context.Context, unlessLeased bool, logger *slog.Logger) error {
	cfg := iptables.DefaultConfig()
	cfg.Settle = time.Nanosecond
	capture, err := iptables.New(cfg, logger)
	if err != nil {
		return err
	}
	leased := func(f family.Family) bool { alive, err := iptables.Leased(f); return alive && err == nil }
	enforced, endsByItself := capture.Left(ctx)
	switch {
	case enforced:
		logger.Warn("the rules stay: without an agent queries are refused", "because", "they enforce the policy of a guard")
		return nil
	case unlessLeased && slices.ContainsFunc(family.All(), leased) && endsByItself:
		return nil // the next agent uses the rules
	}
	unregister(logger) // first: a tool of iptables may hang
	err = capture.Remove(ctx)
	if errors.Is(err, iptables.ErrUnseen) {
		logger.Warn("removed the capture rules that this user can read", "error", err)
		return nil
	}
	return err
}

// unregister removes the registration with systemd-resolved, if there is one.
func unregister(logger *slog.Logger) {
	if err := resolved.RemoveLink(); err != nil {
		logger.Warn("systemd-resolved may still ask the agent for mesh names", "error", err)
	}
}

// resolveForRemoval reports whether a setting keeps the rules after an agent. Malformed settings must not: they may be the
// reason why no agent runs.
func (c *captureCommand) resolveForRemoval() (stay bool, logger *slog.Logger) {
	err := c.options.resolve()
	logger = c.options.logger()
	if err != nil {
		logger.Warn("some settings are malformed; the rules are removed without them", "error", err)
	}
	return c.options.capture.Config.FailClosed, logger
}

func newCapturePrint() *cobra.Command {
	c := new(captureCommand)
	return c.subcommand("print", "Print the rules",
		`Print the programs that apply would run on a machine without rules of nametap, such as
iptables-restore, and their input. Nothing is changed. status shows how the rules of this
machine differ from that.`,
		func(_ context.Context, w io.Writer) error {
			rules, err := iptables.Build(c.config.Config)
			if err != nil {
				return err
			}
			type step struct {
				Program string `json:"program"`
				Text    string `json:"text"`
			}
			steps := []step{}
			for i, program := range []string{"iptables-restore", "ip6tables-restore"} {
				if text := rules.Text(family.All()[i]); text != "" {
					steps = append(steps, step{program + " --noflush -w", text})
				}
			}
			return c.output.print(w, steps, func(w io.Writer) {
				fmt.Fprintf(w, "# settings: %s\n", c.source)
				for _, step := range steps {
					fmt.Fprintf(w, "# %s\n%s", step.Program, step.Text)
				}
			})
		})
}

func newCaptureStatus() *cobra.Command {
	c := new(captureCommand)
	return c.subcommand("status", "Show the rules that are installed",
		`Show which rules of nametap are installed, in which backend, how they differ from the
settings, and whether an agent answers where they redirect queries. If they differ, or if no
agent answers, the exit code is 1. In a pod that was injected with mode resolv there are no
rules, and the command says so.

Rules can be read only with CAP_NET_ADMIN and the tools of iptables, which the agent's
container of a pod lacks. There the command sends test queries to find out whether queries
are redirected to an agent. If any family is not, and the settings ask for it, the exit
code is 1.`,
		func(ctx context.Context, w io.Writer) error {
			status, err := c.capture.Status(ctx)
			if err != nil {
				return c.testQueries(ctx, w, err)
			}
			listeners := redirectedTo(ctx, status)
			return errors.Join(c.printStatus(ctx, w, status, listeners), c.check(status), unanswered(listeners))
		})
}

// testQueries sends test queries, and prints whether they were captured. unread is the reason why the rules cannot be
// read.
func (c *captureCommand) testQueries(ctx context.Context, w io.Writer, unread error) error {
	result := struct {
		Settings   string         `json:"settings"`
		Error      string         `json:"error"`
		Redirected []probe.Result `json:"redirected"`
	}{c.source, unread.Error(), probe.Redirections(ctx, c.config.Config.Families())}
	err := c.output.print(w, result, func(w io.Writer) {
		c.printSettings(w)
		printRedirections(w, result.Redirected)
	})
	for _, r := range result.Redirected {
		switch {
		case c.config.On && (notRedirected(r) || r.State != probe.Agent && c.config.Config.Needs(r.Family())):
			return errors.Join(err,
				fmt.Errorf("DNS over %s is not captured: %s; the rules cannot be read: %w", r.Family(), r.Error, unread))
		case r.State == probe.Agent && !c.config.On:
			return errors.Join(err, fmt.Errorf("DNS is captured despite %s", c.config.Because))
		}
	}
	return err
}

// check returns an error unless the installed rules are as the settings say.
func (c *captureCommand) check(status iptables.Status) error {
	installed := false
	for _, f := range status.Families {
		installed = installed || f.State == iptables.InPlace
		switch {
		case f.State == iptables.Drifted, f.OtherBackend:
			return errors.New("the rules differ from these settings: `nametap capture apply` would replace them; " +
				"`nametap status` how they differ from the settings of the running agent")
		case c.config.On &&
			(f.State == iptables.Absent || f.State == iptables.Unavailable && c.config.Config.Needs(f.Family)):
			return fmt.Errorf("DNS over %s is not captured", f.Family)
		}
	}
	if !c.config.On && installed {
		return fmt.Errorf("DNS is captured despite %s", c.config.Because)
	}
	return nil
}

// printStatus prints the rules, the listeners that they redirect to, and what the kernel refuses. It returns an error if a
// policy is enforced and the kernel does not refuse what the policy does not allow.
func (c *captureCommand) printStatus(ctx context.Context, w io.Writer, status iptables.Status, listeners []probe.Result) (err error) {
	all := struct {
		Settings string `json:"settings"`
		iptables.Status
		Listeners []probe.Result  `json:"listeners,omitempty"`
		Refusals  []probe.Refusal `json:"refusals,omitempty"`
	}{c.source, status, listeners, nil}
	if c.config.Config.Guard.Enforces() {
		all.Refusals = agent.Refusals(ctx, c.options.policy)
	}
	for _, r := range all.Refusals {
		if r.State == probe.Passed {
			err = errors.Join(err, fmt.Errorf("the guard does not hold over %s: packets to %s are not refused", r.Family, r.To))
		}
	}
	return errors.Join(err, c.output.print(w, all, func(w io.Writer) {
		c.printSettings(w)
		printRules(w, status)
		printListeners(w, listeners)
		for _, r := range all.Refusals {
			fmt.Fprintf(w, "guard\t%s: a packet to %s: %s\n", r.Family, r.To, cmp.Or(r.Error, string(r.State)))
		}
	}))
}

// printSettings prints where the settings come from, and whether capture is on.
func (c *captureCommand) printSettings(w io.Writer) {
	fmt.Fprintf(w, "settings\t%s\nswitch\t%s\n", c.source, onOff(c.config.On, c.config.Because))
}

// onOff returns the state of the switch of capture, and what sets the switch.
func onOff(on bool, because string) string {
	if on {
		return "on: " + because
	}
	return "off: " + because
}

// printResolved prints the registration with systemd-resolved. It prints nothing on hosts
// without systemd-resolved.
func printResolved(w io.Writer, status resolved.Status) {
	text := ""
	switch status.State {
	case resolved.Off:
		text = "not registered"
	case resolved.Registered:
		text = fmt.Sprintf("registered, %d domains", status.Domains)
	case resolved.Failed:
		text = "not registered: " + status.Error
	default:
		return
	}
	fmt.Fprintf(w, "systemd-resolved\t%s\n", text)
}

// printRules prints a line for the backend and one for each family.
func printRules(w io.Writer, status iptables.Status) {
	fmt.Fprintf(w, "backend\t%s: %s\n", status.Backend, status.Because)
	for _, f := range status.Families {
		text := string(f.State)
		if len(f.Without) > 0 {
			text += ", without " + strings.Join(f.Without, ", ")
		}
		switch f.Lease {
		case iptables.LeaseAlive:
			text += ", ends with the agent"
		case iptables.LeaseEnded:
			text += ", captures nothing: no agent has answered for some seconds, so queries go to the nameservers"
		case iptables.LeaseUnknown:
			text += ", ends with the agent, or captures nothing: a firewall drops packets to loopback, UDP port 4, and maybe " +
				"those that renew the lease (ports 1 to 3)"
		}
		switch f.Guard {
		case iptables.GuardEnforces:
			text += ", guard: enforce"
		case iptables.GuardAudits:
			text += fmt.Sprintf(", guard: audit (packets not in the policy: %d tcp, %d udp, %d others)",
				f.Guarded["tcp"], f.Guarded["udp"], f.Guarded["other"])
		}
		if f.OtherBackend {
			text += ", with rules of nametap in the other backend too"
		}
		if f.Error != "" {
			text += ": " + f.Error
		}
		fmt.Fprintf(w, "%s\t%s\n", f.Family, text)
		printLines(w, "\t%s; `nametap capture check` shows what to do\n", f.Others)
		printLines(w, "\t%s\n", f.Drift)
	}
}

// printLines prints a line for each text.
func printLines(w io.Writer, format string, texts []string) {
	for _, text := range texts {
		fmt.Fprintf(w, format, text)
	}
}

func newCaptureCheck() *cobra.Command {
	c := new(captureCommand)
	return c.subcommand("check", "Check whether this machine supports the rules",
		`Check what this machine supports, and show how to get what is missing. The command tries
the rules in a new network namespace and changes nothing else. If nothing could be
captured, or if rules are installed and no agent answers where they redirect queries, the exit
code is 1.`,
		func(ctx context.Context, w io.Writer) error {
			findings := append([]iptables.Finding{{What: "settings", OK: true, Detail: c.source}}, c.capture.Check(ctx)...)
			listeners, installed := c.checkedListeners(ctx)
			all := slices.Concat(findings, fullTable(), c.listenerFindings(listeners, installed))
			err := c.output.print(w, all, func(w io.Writer) { printFindings(w, all) })
			if installed {
				err = errors.Join(err, unanswered(listeners))
			} else {
				findings = all
			}
			for _, f := range findings {
				if f.Needed && !f.OK {
					err = errors.Join(err, fmt.Errorf("nothing can be captured: %s: %s", f.What, f.Detail))
				}
			}
			return err
		})
}

func printFindings(w io.Writer, findings []iptables.Finding) {
	for _, f := range findings {
		verdict := "ok"
		switch {
		case !f.OK && f.Needed:
			verdict = "MISSING"
		case !f.OK:
			verdict = "without"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", verdict, f.What, strings.ReplaceAll(f.Detail, "\n", "; "))
		if f.Advice != "" {
			fmt.Fprintf(w, "\t\t→ %s\n", f.Advice)
		}
	}
}

func newCaptureApply() *cobra.Command {
	c := new(captureCommand)
	return c.subcommand("apply", "Install the rules",
		`Install the rules, and remove all other rules of nametap. Rules that are already
installed stay unchanged. A family (IPv4 or IPv6) gets all of its rules or none, and a
family that this machine does not support is left out. Errors that
may be temporary are retried for some seconds. If a supported family then still lacks
rules, the exit code is 1; the rules that could be installed stay.

With --capture-wait the command first waits until an agent answers, so that no query is
redirected to a port without a listener, and until that agent is ready, so that the first
queries are answered from its table. This is for pods, where another container runs the
agent. Without --capture-wait the rules are installed at once, and queries are refused
until an agent listens.

With ISTIO_META_DNS_CAPTURE=false the command installs nothing, and the exit code is 0.`, c.apply)
}

// apply installs the rules, if capture is on.
func (c *captureCommand) apply(ctx context.Context, w io.Writer) error {
	if !c.config.On {
		nothing := struct {
			On      bool   `json:"on"`
			Because string `json:"because"`
		}{c.config.On, c.config.Because}
		return c.output.print(w, nothing, func(w io.Writer) {
			fmt.Fprintf(w, "no rules installed: %s\n", c.config.Because)
		})
	}
	if err := c.options.ownNetwork(); err != nil {
		return err
	}
	if c.options.captureWait > 0 {
		if err := c.awaitAgent(ctx); err != nil {
			return err
		}
	}
	err := c.capture.Apply(ctx)
	switch {
	case errors.Is(err, iptables.ErrIncomplete):
		return errors.Join(c.printInstalled(ctx, w), err)
	case errors.Is(err, iptables.ErrCapability):
		return err
	case err != nil:
		return fmt.Errorf("%w; `nametap capture check` shows what is missing", err)
	}
	return c.printInstalled(ctx, w)
}

// printInstalled prints the rules. It does not ask the agent, which may start later.
func (c *captureCommand) printInstalled(ctx context.Context, w io.Writer) error {
	status, err := c.capture.Status(ctx)
	if err != nil {
		return err
	}
	return c.printStatus(ctx, w, status, nil)
}

// awaitAgent waits for the agent, and leaves out a family that the agent does not serve. A
// missing capability is reported at once.
func (c *captureCommand) awaitAgent(ctx context.Context) error {
	if err := iptables.Permitted(); err != nil {
		return err
	}
	log := c.options.logger()
	waiting, cancel := context.WithTimeout(ctx, c.options.captureWait)
	defer cancel()
	rules, err := agent.Await(waiting, c.config.Config, c.options.agent.StatusAddr, log)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, agent.ErrCapturesItself):
		return fmt.Errorf("no rules are installed, because %w", err)
	case err != nil:
		return fmt.Errorf("no rules are installed, because no agent has answered for %v (--%s): look at the log of the "+
			"container that runs `nametap agent`, which has to start before this one with the same --%s: %w",
			c.options.captureWait, captureWaitFlag, dnsAddrFlag, err)
	}
	c.config.Config = rules
	c.capture, err = iptables.New(rules, log)
	return err
}
