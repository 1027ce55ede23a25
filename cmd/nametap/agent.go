package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/agent/supervise"
	"github.com/nametap/nametap/internal/listen"
)

func newAgentCommand() *cobra.Command {
	var o *options
	command := &cobra.Command{
		Use:   "agent",
		Short: "Answer DNS queries from a control plane's table; forward the rest",
		Long: `Answer DNS queries for the hosts of a mesh from the table that a control plane
(istiod or nametap-discovery) pushes, and forward all others to the nameservers
of resolv.conf.

The flag --foo-bar is also the environment variable NAMETAP_FOO_BAR and the key
foo-bar of the --config file. A variable in brackets works as well. If a
setting is set several times, the first of these wins: the command line, the
environment, Istio's configuration, the --config file. In Istio's configuration,
proxyMetadata sets environment variables: first that of the pod's annotation
proxy.istio.io/config (PROXY_CONFIG), then that of defaultConfig in --mesh-config.

When a file changes, or on SIGHUP outside of a terminal, the agent reads its
settings again. It applies those that it can and logs those that need a restart.

With --check the command only reads the settings, as the agent would, and says
what is wrong with them: each mistake with its place, exit code 2. It opens
no socket and needs no privilege.`,
		Args: usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error {
			if o.checkOnly {
				return checkSettings(command.OutOrStdout(), o)
			}
			err := runAgent(command, o)
			if err != nil {
				agent.NoteFailure(err.Error() + "\n")
			}
			return err
		},
	}
	o = newOptions(command.Flags())
	command.Flags().BoolVar(&o.checkOnly, "check", false, "only check the settings, and exit")
	return command
}

// checkSettings prints whether the settings of an agent are valid. The error has a line for each mistake.
func checkSettings(w io.Writer, o *options) error {
	err := o.resolve()
	cfg, more := o.config()
	if err = errors.Join(err, more); cfg.Egress != nil {
		err = errors.Join(err, hasSources(cfg.Egress.Sources))
	}
	if err != nil {
		return usageError{err}
	}
	_, err = fmt.Fprintln(w, "the settings are valid")
	return err
}

// hasSources returns an error if no interface of this host has one of the addresses.
func hasSources(sources []netip.Addr) error {
	var failed []error
	for _, source := range sources {
		if own, err := listen.OnInterface(source); err != nil || !own {
			failed = append(failed, cmp.Or(err, fmt.Errorf("egress-source %s: want an address of this host: no interface has it", source)))
		}
	}
	return errors.Join(failed...)
}

// runAgent runs the agent, or the process that supervises it, until the command is told to end.
func runAgent(command *cobra.Command, o *options) error {
	signals := newAgentSignals()
	log := newLogWriter(os.Stderr)
	defer log.close()
	o.logTo = log
	err := o.resolve()
	cfg, more := o.config()
	if err = errors.Join(err, more); err != nil {
		return usageError{err}
	}
	held, restarts, supervised := supervise.Inherited()
	switch cfg.Supervised, cfg.Restarts = supervised, restarts; {
	case supervised:
		cfg.Inherited, err = listen.Inherit(held, false)
	case o.supervise:
		return superviseAgent(command.Context(), cfg, signals)
	default:
		cfg.Inherited, err = systemdSockets()
		cfg.DrainCaptured = o.flags.Changed("drain")
	}
	if err != nil {
		return err
	}
	o.logStart(cfg)
	o.logParallel(cfg.Logger)
	cfg.SocketDirs = agent.SocketDirs(cfg.XDS.StateDir)
	cfg.Service = !supervised && servesUnit(&cfg)
	var a *agent.Agent
	reloads := newReloader(o, cfg.Logger, func() configurable { return a })
	reloads.showIn(&cfg)
	a, err = agent.New(command.Context(), cfg)
	if err != nil {
		return err
	}
	signals.onSecond(a.Hasten)
	if cfg.Service {
		signals.onHandOver(a.HandOver)
	}
	running, stop := context.WithCancel(command.Context())
	var beside sync.WaitGroup
	beside.Go(func() { reloads.run(running, signals.reload) })
	defer beside.Wait()
	defer stop()
	return a.Run(command.Context())
}

// servesUnit reports whether a unit of systemd holds the DNS sockets of the agent. It warns if nametap.service
// runs the agent without sockets.
func servesUnit(cfg *agent.Config) bool {
	if cfg.Inherited.Unit() {
		return true
	}
	if filepath.Base(os.Getenv("RUNTIME_DIRECTORY")) == "nametap" && os.Getenv("NOTIFY_SOCKET") != "" {
		cfg.Logger.Warn(
			"systemd has no sockets for this agent, so queries are lost in a restart; run: systemctl restart nametap.socket")
	}
	return false
}

// superviseAgent runs this command again as a child process, which answers on the sockets of this process.
func superviseAgent(ctx context.Context, cfg agent.Config, signals agentSignals) error {
	if os.Getenv("NOTIFY_SOCKET") != "" {
		return usageError{errors.New("supervise: systemd restarts the agent itself, and nametap.socket holds its sockets: " +
			"want --supervise=false under systemd")}
	}
	runtime.GOMAXPROCS(1) // this process has one thing to do, and stays small
	specs := []listen.Spec{
		{Name: "DNS", Setting: dnsAddrFlag, Addr: cfg.DNS.Addr, Networks: []string{"udp", "tcp"}, Required: true},
		{Name: "the status address", Setting: statusAddrFlag, Addr: cfg.StatusAddr, Networks: []string{"tcp"}},
	}
	if cfg.Egress != nil {
		specs = append(specs, listen.Spec{Name: "connections to VIPs", Setting: egressAddrFlag, Addr: cfg.Egress.Addr, Networks: []string{"tcp"}})
	}
	held, args := []*os.File(nil), os.Args
	for _, spec := range specs {
		args = append(args, "--"+spec.Setting+"="+spec.Addr) // also after a file of settings has changed
		if _, port, err := listen.SplitAddr(spec.Setting, spec.Addr); err == nil && port == 0 {
			return usageError{fmt.Errorf("%s %q: want a port other than 0 with --supervise", spec.Setting, spec.Addr)}
		}
		spec.FreeBind, spec.Log = true, cfg.Logger
		set, err := listen.New(spec, nil)
		if err == nil {
			err = set.Open(ctx) // the agent opens the rest later
		}
		if err != nil {
			return err
		}
		files, err := set.Files()
		if err != nil {
			return err
		}
		held = append(held, files...)
	}
	code, err := supervise.Run(supervise.Config{
		// The program of this process, even if the file was replaced since.
		Path: "/proc/self/exe", Args: args, Env: os.Environ(), Sockets: held, EndSignals: signals.end, Log: cfg.Logger,
	})
	if err != nil || code == 0 {
		return err
	}
	return exitError(code)
}
