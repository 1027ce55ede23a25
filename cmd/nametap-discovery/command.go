package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/discovery/clusters"
	"github.com/nametap/nametap/discovery/kube"
	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/internal/version"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

const help = `Serve the Services and ServiceEntries of a Kubernetes cluster, or of a directory, to the agents
of nametap and Istio.

Every flag --foo-bar is also the environment variable NAMETAP_FOO_BAR. The command
line takes precedence.`

// options are the values of the flags.
type options struct {
	server     discovery.Config
	kubeconfig string
	httpAddr   string
	// injectAddr and injectConfig are for the webhook that adds the agent to pods.
	injectAddr, injectConfig string
	logLevel                 settings.LogLevel

	client discovery.Client // the client whose table is printed
	output string
}

// newOptions returns the defaults.
func newOptions() *options {
	return &options{
		server: discovery.DefaultConfig(), httpAddr: ":15014", logLevel: settings.LogLevel{LevelVar: new(slog.LevelVar)},
		client: discovery.Client{Namespace: "default"},
	}
}

// addFlags declares all flags. Every command has all of them, because the environment may
// set any of them.
func (o *options) addFlags(f *pflag.FlagSet) {
	f.SortFlags = false // the help lists them in the order of declaration
	g := settings.NewGroup(f, "Objects")
	g.String(&o.server.ConfigDir, "config-dir", "`directory` of Services, EndpointSlices, Pods and ServiceEntries")
	g.String(&o.kubeconfig, "kubeconfig", "`file` with the access to the Kubernetes API whose objects are read; default without --config-dir: the pod's service account")
	g.String(&o.server.ClustersNamespace, "clusters-namespace", "`namespace` of the Secrets with kubeconfigs of other clusters, labelled istio/multiCluster=true, whose hosts are served, too; empty for none")
	g.Bool(&o.server.AllowEmpty, "allow-empty", "accept a directory without any object: be ready with an empty table, and remove the hosts of what becomes empty")
	g.String(&o.server.ClusterDomain, "cluster-domain", "`domain` of Services")
	g.String(&o.server.RootNamespace, "root-namespace", "`namespace` of the default Sidecar and, at the Kubernetes API, of the ConfigMap \"istio\" with the settings of the mesh")

	g = settings.NewGroup(f, "Serving, status and logging")
	g.String(&o.server.GRPCAddr, "grpc-addr", "`address` that serves name tables (ADS) in plaintext, to everyone; empty serves none")
	g.String(&o.server.TLSAddr, "tls-addr", "`address` that serves name tables (ADS) over TLS, to clients with a token or a certificate; empty serves none")
	g.String(&o.server.TLS.Certificate, "tls-cert", "`file` with the certificate for --tls-addr; read again when it changes")
	g.String(&o.server.TLS.Key, "tls-key", "`file` with the key of the certificate")
	g.String(&o.server.TLS.ClientCA, "tls-client-ca", "`file` with the authorities of clients' SPIFFE certificates; without it clients need a token")
	g.String(&o.server.TokenAudience, "token-audience", "`audience` of clients' tokens, which the Kubernetes API reviews")
	g.String(&o.server.TrustDomain, "trust-domain", "`domain` of clients' SPIFFE certificates; default is the one of Services")
	g.String(&o.server.ClusterID, "cluster-id", "`name` that clients with a token may claim as their cluster; empty allows any")
	g.Var(settings.Int(&o.server.MaxClients, settings.ZeroRefused), "max-clients", "`number` of clients connected at a time; beyond that, one gives way: one that has sent no request for a second, or one of the IP address that has most")
	g.Var(settings.Int(&o.server.MaxClientsPerAddress, settings.ZeroRefused), "max-clients-per-address", "`number` of clients connected at a time from one IP address, those included that connected within a minute; others are refused")
	g.String(&o.httpAddr, "http-addr", "`address` that serves /healthz/ready, /healthz/live, /metrics, /debug/errors, /debug/objects, /debug/agents and /fleet; empty serves none")
	g.Text(o.logLevel, "log-level", "least important `level` to log: debug, info, warn or error")

	g = settings.NewGroup(f, "Injection")
	g.String(&o.injectAddr, "inject-addr", "`address` that serves the webhook that adds the agent to pods, over TLS, with the certificate of --tls-cert; empty serves none")
	g.String(&o.injectConfig, "inject-config", "`file` with the settings of injection, which docs/injection.md lists; read again when it changes")

	g = settings.NewGroup(f, "Printing a table")
	g.String(&o.client.Namespace, "for-namespace", "`namespace` of the client whose table is printed")
	g.Text((*labels)(&o.client.Labels), "for-labels", "`labels` of its workload, by which Sidecars select it: NAME=VALUE,...")
	g.Bool(&o.client.AutoAllocate, "dns-auto-allocate", "print the table of a client that asks for automatic VIPs")
}

// resolve adds the values from the environment, and finds the Kubernetes API.
func (o *options) resolve(f *pflag.FlagSet) error {
	if err := settings.Resolve(f, os.Environ()); err != nil {
		return usageError{err}
	}
	return o.resolveKubernetes()
}

// resolveKubernetes finds out how to reach the Kubernetes API, if it is a source.
func (o *options) resolveKubernetes() error {
	if o.kubeconfig == "" && o.server.ConfigDir != "" {
		return nil
	}
	var err error
	o.server.Kubernetes, err = clusters.Open(o.kubeconfig)
	if errors.Is(err, kube.ErrNotInCluster) {
		return usageError{errors.New("no source of objects: name the directory with your Services and ServiceEntries (--config-dir), " +
			"or a file with the access to the Kubernetes API (--kubeconfig); in a pod, the service account is used")}
	}
	return err
}

// labels are a workload's labels.
type labels map[string]string

// MarshalText returns "NAME=VALUE,...", sorted.
func (l labels) MarshalText() ([]byte, error) {
	var pairs []string
	for _, name := range slices.Sorted(maps.Keys(l)) {
		pairs = append(pairs, name+"="+l[name])
	}
	return []byte(strings.Join(pairs, ",")), nil
}

// UnmarshalText parses "NAME=VALUE,...".
func (l *labels) UnmarshalText(text []byte) error {
	*l = labels{}
	for pair := range strings.SplitSeq(string(text), ",") {
		name, value, ok := strings.Cut(pair, "=")
		if pair != "" && (!ok || name == "") {
			return errors.New("want NAME=VALUE, more after commas")
		}
		if pair != "" {
			(*l)[name] = value
		}
	}
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

// usageError is an error in the command line or the environment.
type usageError struct{ error }

// Unwrap returns the wrapped error.
func (e usageError) Unwrap() error { return e.error }

// agentProgram is the name by which `nametap inject` runs this program.
const agentProgram = "nametap"

// endSignals returns the signals that end the program.
func endSignals() []os.Signal { return []os.Signal{syscall.SIGINT, syscall.SIGTERM} }

// execute runs one command line, which begins with the name of the program, and returns the exit code.
func execute(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root, name := newRoot(stdout, stderr), "nametap-discovery"
	help := name
	if args[0] == agentProgram {
		name, help = agentProgram, agentProgram+" inject"
		root.Use = agentProgram
	}
	root.SetArgs(args[1:])
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	// If stderr cannot be written, there is no other place for the error.
	_, _ = fmt.Fprintf(stderr, "%s: %s\n", name, clip.Lines(err.Error()))
	if errors.As(err, new(usageError)) {
		_, _ = fmt.Fprintf(stderr, "%s --help lists the flags.\n", help)
		return exitUsage
	}
	return exitFailed
}

func newRoot(stdout, stderr io.Writer) *cobra.Command {
	o := newOptions()
	root := &cobra.Command{
		Use:     "nametap-discovery [--config-dir DIR] [--kubeconfig FILE]",
		Long:    help,
		Example: "  nametap-discovery --config-dir examples/shop\n  nametap-discovery table --config-dir examples/shop --for-namespace shop",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.resolve(cmd.Flags()); err != nil {
				return err
			}
			return serve(cmd.Context(), o, stderr)
		},
		PersistentPreRun: func(command *cobra.Command, _ []string) {
			if command.HasParent() { // signals end a command at once, even while it waits for input
				signal.Reset(endSignals()...)
			}
		},
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetFlagErrorFunc(func(command *cobra.Command, err error) error {
		return usageError{settings.FlagError(command, err)}
	})
	root.SetUsageFunc(settings.PrintUsage)
	o.addFlags(root.Flags())
	hide(root.Flags(), "for-namespace", "for-labels", "dns-auto-allocate")
	root.AddCommand(newAgents(stdout), newTable(stdout, stderr), newInject(stdout, stderr), newCertificates(stdout), newVersion(stdout))
	return root
}

// hide removes flags that have no effect on a command from its help.
func hide(flags *pflag.FlagSet, names ...string) {
	for _, name := range names {
		flags.Lookup(name).Hidden = true
	}
}

// noArgs refuses arguments. With cobra.NoArgs the error would not be a usageError.
func noArgs(command *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case command.HasParent():
		return usageError{fmt.Errorf("unknown argument %q: want flags only", args[0])}
	}
	return usageError{fmt.Errorf("unknown command or argument %q: want agents, table, inject, certificates, version, or flags only", args[0])}
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
			_, err := fmt.Fprintf(stdout, "nametap-discovery %s (%s)\n", build, build.Toolchain())
			return err
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", output, "`format`: text or json")
	return cmd
}
