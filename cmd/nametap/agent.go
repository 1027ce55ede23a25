package main

import (
	"os"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/supervise"
)

func newAgentCommand() *cobra.Command {
	var o *options
	command := &cobra.Command{
		Use:   "agent",
		Short: "Answer DNS queries from a control plane's table; forward the rest",
		Long: `Answer DNS queries for the hosts of a mesh, from the table that a control plane
(istiod, or nametap-discovery) pushes, and forward all others to the nameservers
of resolv.conf.

Every flag --foo-bar is also the environment variable NAMETAP_FOO_BAR, unless its
text names another, and the key foo-bar of the --config file. The command line
wins over the environment, that over Istio's configuration (the annotation
proxy.istio.io/config in PROXY_CONFIG, then defaultConfig of --mesh-config, whose
proxyMetadata has names of environment variables), that over the --config file.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error {
			readSwitch := o.switchReader()
			if err := o.resolve(); err != nil {
				return usageError{err}
			}
			log := newLogWriter(os.Stderr)
			defer log.close()
			o.logTo = log
			cfg, err := o.config()
			if err != nil {
				return usageError{err}
			}
			sockets, restarts, supervised := supervise.Sockets()
			switch {
			case supervised:
				cfg.DNS.Sockets, cfg.DNS.OpenOthers, cfg.Restarts = sockets, true, restarts
			case o.supervise:
				return superviseAgent(command.Context(), cfg)
			default:
				cfg.DNS.Sockets = activation.Files(true) // of systemd; none without it
			}
			if cfg.Capture != nil {
				cfg.Capture.Switch = readSwitch
			}
			a, err := agent.New(command.Context(), cfg)
			if err != nil {
				return err
			}
			onSecondSignal(a.Hasten)
			return a.Run(command.Context())
		},
	}
	o = newOptions(command.Flags())
	return command
}
