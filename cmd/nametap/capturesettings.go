package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/iptables"
)

// A captureCommand has the values that all subcommands of `nametap capture` use. The subcommands accept all settings of
// the agent, because they may have the agent's environment and read the agent's file.
type captureCommand struct {
	options *options
	output  outputFormat
	source  string // where the settings come from

	config  agent.CaptureConfig
	capture *iptables.Capture
}

// subcommand returns a subcommand that reads the settings before it runs.
func (c *captureCommand) subcommand(
	use, short, long string, run func(ctx context.Context, w io.Writer) error,
) *cobra.Command {
	command := c.declared(use, short, long)
	c.output.declare(command.Flags())
	command.RunE = func(command *cobra.Command, _ []string) error {
		log := newLogWriter(os.Stderr)
		defer log.close()
		c.options.logTo = log
		err := c.resolve(command.Context(), use == "apply")
		switch {
		case err != nil && use == "status" && c.options.plainDNS():
			return c.printWithoutRules(command.OutOrStdout())
		case errors.Is(err, errUnitUnread):
			return err
		case err != nil:
			return usageError{err}
		}
		return run(command.Context(), command.OutOrStdout())
	}
	return command
}

// declared returns a subcommand with the settings of the agent. Its help shows only the settings that affect the
// rules.
func (c *captureCommand) declared(use, short, long string) *cobra.Command {
	command := &cobra.Command{
		Use: use, Short: short, Long: long,
		Args: usageArgs(cobra.NoArgs),
	}
	c.options = newOptions(command.Flags())
	others := []string{settings.ConfigFlag, settings.MeshConfigFlag, "instance-ip", "log-level", "log-format"}
	command.Flags().VisitAll(func(flag *pflag.Flag) {
		flag.Hidden = !affectsCapture(flag.Name) && !slices.Contains(others, flag.Name)
	})
	return command
}

// affectsCapture reports whether a setting of the agent affects the rules, or says how the commands for rules
// reach the agent.
func affectsCapture(name string) bool {
	others := []string{dnsAddrFlag, statusAddrFlag, egressFlag, egressAddrFlag, guardFlag, "resolv-conf", "upstream-timeout"}
	return strings.HasPrefix(name, "capture-") || slices.Contains(others, name)
}

// resolve reads the settings. If capture is on for the nameservers of resolv.conf alone, it also reads these
// nameservers. If unitRequired is true, a file of the unit that cannot be read is an error.
func (c *captureCommand) resolve(ctx context.Context, unitRequired bool) error {
	if err := c.findSettings(ctx, unitRequired); err != nil {
		return err
	}
	var err error
	if c.config, err = c.options.captureConfig(); err != nil {
		return err
	}
	if err := c.options.readPolicy(); err != nil {
		return err
	}
	c.config.Config = agent.WithPolicy(c.config.Config, c.options.policy)
	if c.config.On && c.config.Servers == agent.ResolvConfServers {
		if c.config.Config.Servers, err = agent.CapturedServers(c.config.ResolvConf); err != nil {
			return err
		}
	}
	c.capture, err = iptables.New(c.config.Config, c.options.logger())
	return err
}

// errUnitUnread is the error for settings of the unit that this user cannot read.
var errUnitUnread = errors.New("the settings of nametap.service cannot be read")

// The places from which settings come, besides flags and the environment.
const (
	onlyEnvironment = "flags and the environment"
	runningAgent    = "the running agent"
)

// findSettings gives the settings their values. Flags and the environment come first. The other settings come from
// the running agent or, without an agent, from nametap.service. In a container of a pod, or if the user has named a
// file, only flags, the environment and the named files count. If unitRequired is true, a file of the unit that
// cannot be read is an error.
func (c *captureCommand) findSettings(ctx context.Context, unitRequired bool) error {
	flags := c.options.flags
	own := settings.FromEnvironment(flags, os.Environ())
	given := func(name string) bool { return flags.Lookup(name).Changed }
	switch {
	case os.Getenv(inPod) != "":
		c.source = onlyEnvironment + " of this container, and the files that they name"
		return c.options.resolve()
	case given(settings.ConfigFlag) || given(settings.MeshConfigFlag):
		c.source = onlyEnvironment + ", and the files that they name"
		return c.options.resolve()
	}
	client := c.client(nil)
	values, err := askSettings(ctx, client)
	unit := unitSettings{}
	if err != nil {
		unit = readUnit(ctx)
		if other := c.client(unit.environ); other.place() != client.place() {
			values, err = askSettings(ctx, other)
		}
	}
	switch {
	case err == nil:
		c.source = onlyEnvironment + ", then " + runningAgent
		return errors.Join(own, settings.Adopt(flags, values, runningAgent))
	case unit.err != nil && unitRequired:
		return fmt.Errorf("%w: run this as root, or name a file with all settings by --%s: %w", errUnitUnread,
			settings.ConfigFlag, unit.err)
	}
	c.source = onlyEnvironment + unit.describe(err)
	return settings.Resolve(flags, append(unit.environ, os.Environ()...))
}

// askTimeout is how long an agent may take to say its settings.
const askTimeout = time.Second

// client returns a client of the running agent. unit is the environment of the agent's unit, which may say where
// the agent is.
func (c *captureCommand) client(unit []string) statusClient {
	client := statusClient{looseOptions()}
	// Mistakes are reported when the settings are resolved.
	_ = settings.Copy(client.options.flags, c.options.flags, settings.Given)
	_ = settings.FromEnvironment(client.options.flags, os.Environ())
	_ = settings.FromEnvironment(client.options.flags, unit)
	return client
}

// place returns the settings that say where the agent can be reached.
func (c *statusClient) place() [2]string {
	return [2]string{c.options.agent.StatusAddr, c.options.agent.XDS.StateDir}
}

// askSettings returns the settings of the running agent that affect the rules.
func askSettings(ctx context.Context, client statusClient) (map[string][]string, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var values map[string][]string
	err := client.get(ctx, "/debug/settings", nil, &values)
	maps.DeleteFunc(values, func(name string, _ []string) bool { return !affectsCapture(name) })
	return values, err
}

// plainDNS reports whether the agent is on port 53, where programs reach it by resolv.conf and not by rules.
// Injection sets this port in mode resolv.
func (o *options) plainDNS() bool {
	_, port, err := net.SplitHostPort(o.agent.DNS.Addr)
	return err == nil && port == "53"
}

// printWithoutRules prints the status of a pod whose agent is on port 53.
func (c *captureCommand) printWithoutRules(w io.Writer) error {
	result := struct {
		Mode    string `json:"mode"`
		DNSAddr string `json:"dns_addr"`
	}{"resolv", c.options.agent.DNS.Addr}
	return c.output.print(w, result, func(w io.Writer) {
		fmt.Fprintf(w, "mode resolv: there are no rules, because the agent is on port 53 (%s %s)\n"+
			"Programs that read resolv.conf send it their queries, if resolv.conf has that address.\n"+
			"Queries to other nameservers are not captured; mode rules of injection captures them.\n",
			dnsAddrFlag, result.DNSAddr)
	})
}
