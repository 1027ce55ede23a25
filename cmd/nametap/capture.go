package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/iptables"
)

// A captureCommand is what the subcommands of capture share. They have all settings of
// the agent, so that one environment and one file do for both.
type captureCommand struct {
	options *options
	output  string

	config  agent.CaptureConfig
	capture *iptables.Capture
}

func newCaptureCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "capture",
		Short: "The rules that redirect port 53 to the agent",
		Long: `The rules of iptables that redirect port 53 to the agent: what applications ask a
nameserver comes to the agent, what the agent asks does not. The settings are the
agent's; one environment, or one --config file, does for both.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error { return command.Help() },
	}
	command.AddCommand(newCaptureApply(), newCaptureRemove(), newCapturePrint(), newCaptureStatus(), newCaptureCheck())
	return command
}

// subcommand returns a subcommand that runs with the settings resolved.
func (c *captureCommand) subcommand(use, short, long string, run func(ctx context.Context, w io.Writer) error) *cobra.Command {
	command := c.declared(use, short, long)
	declareOutput(command.Flags(), &c.output)
	command.RunE = func(command *cobra.Command, _ []string) error {
		log := newLogWriter(os.Stderr)
		defer log.close()
		c.options.logTo = log
		if err := c.resolve(); err != nil {
			return usageError{err}
		}
		return run(command.Context(), command.OutOrStdout())
	}
	return command
}

// declared returns a subcommand that has the settings.
func (c *captureCommand) declared(use, short, long string) *cobra.Command {
	command := &cobra.Command{
		Use: use, Short: short, Long: long,
		Args: usageArgs(cobra.NoArgs),
	}
	c.options = newOptions(command.Flags())
	// The help shows the settings that say something about the rules.
	others := []string{settings.ConfigFlag, settings.MeshConfigFlag, "instance-ip", dnsAddrFlag, "resolv-conf", "upstream-timeout", "log-level", "log-format"}
	command.Flags().VisitAll(func(flag *pflag.Flag) {
		flag.Hidden = !strings.HasPrefix(flag.Name, "capture-") && !slices.Contains(others, flag.Name)
	})
	return command
}

// print prints v as --output says.
func (c *captureCommand) print(w io.Writer, v any, text func(w io.Writer) error) error {
	return printOutput(w, c.output, v, text)
}

// resolve reads the settings.
func (c *captureCommand) resolve() error {
	if err := c.options.resolve(); err != nil {
		return err
	}
	var err error
	if c.config, err = c.options.captureConfig(); err != nil {
		return err
	}
	if c.config.On && c.config.Servers == agent.ResolvConfServers {
		if c.config.Config.Servers, err = agent.CapturedServers(c.config.ResolvConf); err != nil {
			return err
		}
	}
	c.capture, err = iptables.New(c.config.Config, c.options.logger())
	return err
}

func newCaptureApply() *cobra.Command {
	c := new(captureCommand)
	return c.subcommand("apply", "Put the rules in", `Put the rules in, in place of any others of ours. What is there already is not
changed. Each family has all of its rules or none. What this machine lacks is done
without. What fails for a reason that may pass is tried again for some seconds; if a
family is not captured then, or by lesser rules, it is exit code 1, and what could be
had is in. With ISTIO_META_DNS_CAPTURE=false nothing is put in, and that is no error.`,
		func(ctx context.Context, w io.Writer) error {
			if !c.config.On {
				nothing := struct {
					On      bool   `json:"on"`
					Because string `json:"because"`
				}{c.config.On, c.config.Because}
				return c.print(w, nothing, func(w io.Writer) error {
					_, err := fmt.Fprintf(w, "no rules are put in: %s\n", c.config.Because)
					return err
				})
			}
			if err := c.options.ownNetwork(); err != nil {
				return err
			}
			err := c.capture.Apply(ctx)
			switch {
			case errors.Is(err, iptables.ErrIncomplete):
				return errors.Join(c.printStatus(ctx, w), err)
			case errors.Is(err, iptables.ErrCapability):
				return err
			case err != nil:
				return fmt.Errorf("%w; `nametap capture check` says what is missing", err)
			}
			return c.printStatus(ctx, w)
		})
}

func newCaptureRemove() *cobra.Command {
	c := new(captureCommand)
	afterAgent := false
	command := c.declared("remove", "Take the rules out", `Take out all that is ours, in both backends, whatever it was put in with. Queries go
to nameservers again at once; the command ends when no reply can be on its way any
more. It is exit code 1 if a backend cannot be read in which rules of nametap may be. With
--after-agent, which is for service managers, it does not wait, is content with what the
agent's user may read, and does nothing if --capture-fail-open=false says that queries are to be
refused without an agent.`)
	command.RunE = func(command *cobra.Command, _ []string) error {
		log := newLogWriter(os.Stderr) // a log that is not read must not keep the rules in
		defer log.close()
		c.options.logTo = log
		failOpen, logger := c.resolveForRemoval()
		if afterAgent && !failOpen {
			logger.Warn("the rules stay: queries are refused without an agent (--capture-fail-open=false)")
			return nil
		}
		cfg := iptables.DefaultConfig() // any will do: chains are found by their names
		if afterAgent {
			cfg.Settle = time.Nanosecond // no reply of the agent can be in flight
		}
		capture, err := iptables.New(cfg, logger)
		if err != nil {
			return err
		}
		err = capture.Remove(command.Context())
		if afterAgent && errors.Is(err, iptables.ErrUnseen) {
			logger.Warn("capture rules removed as far as they can be seen", "unseen", err)
			return nil
		}
		return err
	}
	command.Flags().BoolVar(&afterAgent, "after-agent", false, "only if --capture-fail-open, and at once")
	return command
}

// resolveForRemoval returns the settings that removal needs. Malformed settings must not
// keep the rules in: they may be the reason why no agent runs.
func (c *captureCommand) resolveForRemoval() (failOpen bool, logger *slog.Logger) {
	err := c.options.resolve()
	logger = c.options.logger()
	if err != nil {
		logger.Warn("removing the rules without the settings that cannot be read", "error", err)
	}
	return !c.options.capture.Config.FailClosed, logger
}

func newCapturePrint() *cobra.Command {
	c := new(captureCommand)
	clean := false
	command := c.subcommand("print", "Print what apply would do", `Print the text that apply would give to iptables-restore now, and to which. Nothing is
changed. With --clean, or where the rules of this machine cannot be read, it is the text
for a machine that has none of ours.`,
		func(ctx context.Context, w io.Writer) error {
			steps, err := c.capture.Plan(ctx)
			if err != nil || clean {
				if err != nil {
					fmt.Fprintf(os.Stderr, "for a machine that has none of our rules, as those of this one cannot be read: %v\n", err)
				}
				if steps, err = c.cleanSteps(); err != nil {
					return err
				}
			}
			all := append([]iptables.Step{}, steps...) // [] rather than null
			return c.print(w, all, func(w io.Writer) error { return printSteps(w, all) })
		})
	command.Flags().BoolVar(&clean, "clean", false, "as for a machine that has none of our rules")
	return command
}

// cleanSteps returns the texts for a machine that has none of our rules.
func (c *captureCommand) cleanSteps() ([]iptables.Step, error) {
	rules, err := iptables.Build(c.config.Config)
	if err != nil {
		return nil, err
	}
	var steps []iptables.Step
	for _, family := range []struct {
		family  iptables.Family
		program string
	}{{iptables.IPv4, "iptables-restore"}, {iptables.IPv6, "ip6tables-restore"}} {
		if text := rules.Text(family.family); text != "" {
			steps = append(steps, iptables.Step{Program: family.program + " --noflush -w", Text: text})
		}
	}
	return steps, nil
}

func printSteps(w io.Writer, steps []iptables.Step) error {
	if len(steps) == 0 {
		_, err := fmt.Fprintln(w, "# all is in place")
		return err
	}
	for _, step := range steps {
		if _, err := fmt.Fprintf(w, "# %s\n%s", step.Program, step.Text); err != nil {
			return err
		}
	}
	return nil
}

func newCaptureStatus() *cobra.Command {
	c := new(captureCommand)
	return c.subcommand("status", "Show the rules that are in", `Show where rules of ours are, and how they differ from the settings. It is exit code 1
if they are not as they should be.`,
		func(ctx context.Context, w io.Writer) error {
			if err := c.printStatus(ctx, w); err != nil {
				return err
			}
			status, err := c.capture.Status(ctx)
			if err != nil {
				return err
			}
			return c.judge(status)
		})
}

// judge returns an error unless the rules are as the switch says.
func (c *captureCommand) judge(status iptables.Status) error {
	in := false
	for _, f := range status.Families {
		in = in || f.State == iptables.InPlace
		needed := f.Family == iptables.IPv4 || c.config.Config.IPv6 == iptables.On
		switch {
		case f.State == iptables.Drifted, f.OtherBackend:
			return errors.New("the rules are not as these settings say; `nametap capture print` shows what apply would do, `nametap status` what an agent says that has its own settings")
		case c.config.On && (f.State == iptables.Absent || f.State == iptables.Unavailable && needed):
			return fmt.Errorf("DNS over %s is not captured", f.Family)
		}
	}
	if !c.config.On && in {
		return fmt.Errorf("DNS is captured, though %s", c.config.Because)
	}
	return nil
}

func (c *captureCommand) printStatus(ctx context.Context, w io.Writer) error {
	status, err := c.capture.Status(ctx)
	if err != nil {
		return err
	}
	return c.print(w, status, func(w io.Writer) error {
		lines := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintf(lines, "wanted\t%s\n", c.config.Because)
		printRules(lines, status)
		return lines.Flush()
	})
}

// printRules prints a line for the backend and one for each family.
func printRules(w io.Writer, status iptables.Status) {
	fmt.Fprintf(w, "backend\t%s: %s\n", status.Backend, status.Because)
	for _, f := range status.Families {
		text := string(f.State)
		if f.State == iptables.InPlace && !f.Zone && len(f.Without) == 0 {
			text += ", without a conntrack zone"
		}
		if len(f.Without) > 0 {
			text += ", without " + strings.Join(f.Without, ", ")
		}
		if f.OtherBackend {
			text += ", and rules of ours in the other backend"
		}
		if f.Error != "" {
			text += ": " + f.Error
		}
		fmt.Fprintf(w, "%s\t%s\n", f.Family, text)
		for _, passes := range f.Passes {
			fmt.Fprintf(w, "\tnot captured: %s\n", passes)
		}
		for _, unserved := range f.Unserved {
			fmt.Fprintf(w, "\tnot served: %s\n", unserved)
		}
		for _, other := range f.Others {
			fmt.Fprintf(w, "\t%s; `nametap capture check` says what to do\n", other)
		}
		for _, drift := range f.Drift {
			fmt.Fprintf(w, "\t%s\n", drift)
		}
	}
}

func newCaptureCheck() *cobra.Command {
	c := new(captureCommand)
	return c.subcommand("check", "Say what this machine lacks for the rules", `Say what this machine has and lacks for the rules, and how to get it. Nothing is
changed: rules are tried in a network namespace of their own. It is exit code 1 if
nothing could be captured.`,
		func(ctx context.Context, w io.Writer) error {
			findings := c.capture.Check(ctx)
			err := c.print(w, findings, func(w io.Writer) error { return printFindings(w, findings) })
			for _, f := range findings {
				if f.Needed && !f.OK {
					err = errors.Join(err, fmt.Errorf("nothing can be captured: %s: %s", f.What, f.Detail))
				}
			}
			return err
		})
}

func printFindings(w io.Writer, findings []iptables.Finding) error {
	lines := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range findings {
		verdict := "ok"
		switch {
		case !f.OK && f.Needed:
			verdict = "MISSING"
		case !f.OK:
			verdict = "without"
		}
		fmt.Fprintf(lines, "%s\t%s\t%s\n", verdict, f.What, strings.ReplaceAll(f.Detail, "\n", "; "))
		if f.Advice != "" {
			fmt.Fprintf(lines, "\t\t→ %s\n", f.Advice)
		}
	}
	return lines.Flush()
}
