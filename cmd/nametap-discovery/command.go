package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/internal/version"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

const defaultStateDir = "/var/lib/nametap-discovery"

// options are the values of the flags.
type options struct {
	configDir     string
	grpcAddr      string
	httpAddr      string
	clusterDomain string
	stateDir      string
	allowEmpty    bool
	maxClients    int
	logLevel      string

	printTable   bool
	forNamespace string
	autoAllocate bool
	output       string

	// stateDirGiven tells the default from the same directory on request: the
	// latter must work.
	stateDirGiven bool
}

// addFlags defines every flag, once. Every command has them all, as the
// environment may set any of them whatever the command.
func (o *options) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.configDir, "config-dir", "", "`directory` of Services, EndpointSlices, Pods and ServiceEntries (required)")
	f.StringVar(&o.clusterDomain, "cluster-domain", discovery.DefaultClusterDomain, "`domain` of Services")
	f.StringVar(&o.stateDir, "state-dir", defaultStateDir, "`directory` that remembers automatic VIPs and the last good objects; empty keeps them in memory")
	f.BoolVar(&o.allowEmpty, "allow-empty", false, "a config directory without any object is right: be ready with it, and drop all hosts when it becomes empty")
	f.StringVar(&o.grpcAddr, "grpc-addr", ":15010", "`address` to serve name tables on (ADS, plaintext)")
	f.StringVar(&o.httpAddr, "http-addr", ":15014", "`address` for /healthz/ready, /healthz/live, /metrics and /debug/errors; empty for none")
	f.IntVar(&o.maxClients, "max-clients", discovery.DefaultMaxClients, "`number` of clients served at a time; others are refused")
	f.StringVar(&o.logLevel, "log-level", "info", "least important `level` to log: debug, info, warn or error")
	f.BoolVar(&o.printTable, "print-table", false, "build once, print the table of --for-namespace as JSON and exit")
	f.BoolVar(&o.autoAllocate, "dns-auto-allocate", false, "print the table of a client that asks for automatic VIPs")
	f.StringVar(&o.forNamespace, "for-namespace", "default", "`namespace` of the client whose table --print-table prints")
}

// resolve adds what the environment sets.
func (o *options) resolve(f *pflag.FlagSet) error {
	if err := settings.Resolve(f, os.Environ()); err != nil {
		return usageError{err}
	}
	o.stateDirGiven = f.Changed("state-dir")
	return nil
}

// Values of --output.
const (
	outputText = "text"
	outputJSON = "json"
)

func checkOutput(output string) error {
	if output != outputText && output != outputJSON {
		return usageError{fmt.Errorf("--output=%q: want %s or %s", output, outputText, outputJSON)}
	}
	return nil
}

// usageError is an error in what was asked, not in doing it.
type usageError struct{ error }

// Unwrap gives the error within.
func (e usageError) Unwrap() error { return e.error }

// execute runs one command line and returns its exit code.
func execute(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot(stdout, stderr)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	// Who cannot write to stderr cannot be told so.
	_, _ = fmt.Fprintf(stderr, "nametap-discovery: %v\n", err)
	var usage usageError
	if errors.As(err, &usage) {
		_, _ = fmt.Fprintln(stderr, "nametap-discovery --help lists the flags.")
		return exitUsage
	}
	return exitFailed
}

func newRoot(stdout, stderr io.Writer) *cobra.Command {
	var o options
	root := &cobra.Command{
		Use:   "nametap-discovery --config-dir DIR",
		Short: "Serve the Services and ServiceEntries of a directory to nametap or Istio agents",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.resolve(cmd.Flags()); err != nil {
				return err
			}
			if o.printTable {
				return printTable(o, stdout, stderr)
			}
			return serve(cmd.Context(), o, stderr)
		},
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{settings.FlagError(err)} })
	o.addFlags(root.Flags())
	root.AddCommand(newTable(stdout, stderr), newVersion(stdout))
	return root
}

// noArgs refuses arguments; cobra's own check would not count as wrong usage.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("unknown command or argument %q: want table, version or flags only", args[0])}
	}
	return nil
}

func newTable(stdout, stderr io.Writer) *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "table --config-dir DIR [--for-namespace NS]",
		Short: "Build once and print the table of a namespace",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.resolve(cmd.Flags()); err != nil {
				return err
			}
			if err := checkOutput(o.output); err != nil {
				return err
			}
			return printTable(o, stdout, stderr)
		},
	}
	o.addFlags(cmd.Flags())
	cmd.Flags().StringVarP(&o.output, "output", "o", outputJSON, "json or text")
	for _, name := range []string{"grpc-addr", "http-addr", "log-level", "max-clients", "print-table"} {
		cmd.Flags().Lookup(name).Hidden = true // of no use here
	}
	return cmd
}

func newVersion(stdout io.Writer) *cobra.Command {
	output := outputText
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			build := version.Read()
			if output == outputJSON {
				return printJSON(stdout, build)
			}
			_, err := fmt.Fprintf(stdout, "nametap-discovery %s (%s)\n", build, build.Go)
			return err
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", output, "text or json")
	return cmd
}

// config checks the options and turns them into the server's.
func (o options) config(logger *slog.Logger) (discovery.Config, error) {
	if o.configDir == "" {
		return discovery.Config{}, usageError{errors.New("--config-dir is missing: name the directory that holds your Services and ServiceEntries")}
	}
	if o.maxClients < 1 {
		return discovery.Config{}, usageError{fmt.Errorf("--max-clients=%d: want at least 1", o.maxClients)}
	}
	return discovery.Config{
		ConfigDir: o.configDir, GRPCAddr: o.grpcAddr, ClusterDomain: o.clusterDomain, StateDir: o.stateDir,
		AllowEmpty: o.allowEmpty, MaxClients: o.maxClients, Logger: logger,
	}, nil
}

func (o options) logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.logLevel)); err != nil {
		return nil, usageError{fmt.Errorf("--log-level %q: want debug, info, warn or error", o.logLevel)}
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level})), nil
}
