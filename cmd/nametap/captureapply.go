package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/iptables"
)

func newCaptureApply() *cobra.Command {
	c := new(captureCommand)
	return c.subcommand("apply", "Install the rules", `Install the rules, and remove all other rules of nametap. Rules that are already
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

// apply installs the rules, if the switch is on.
func (c *captureCommand) apply(ctx context.Context, w io.Writer) error {
	if !c.config.On {
		nothing := struct {
			On      bool   `json:"on"`
			Because string `json:"because"`
		}{c.config.On, c.config.Because}
		return c.print(w, nothing, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "no rules installed: %s\n", c.config.Because)
			return err
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

// printInstalled prints the rules. It does not ask an agent: one may start later.
func (c *captureCommand) printInstalled(ctx context.Context, w io.Writer) error {
	status, err := c.capture.Applied()
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
	awaited := agent.Awaited{Rules: c.config.Config, StatusAddr: c.options.agent.StatusAddr, Logger: log}
	rules, err := awaited.Await(waiting)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, agent.ErrCapturesItself):
		return fmt.Errorf("no rules are installed, because %w", err)
	case err != nil:
		return fmt.Errorf("no rules are installed, because no agent has answered for %v (--%s): look at the log of the container that runs `nametap agent`, which has to start before this one with the same --%s: %w",
			c.options.captureWait, captureWaitFlag, dnsAddrFlag, err)
	}
	c.config.Config = rules
	c.capture, err = iptables.New(rules, log)
	return err
}
