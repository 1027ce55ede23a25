package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/inject"
	"github.com/nametap/nametap/internal/clip"
)

// maxManifest is the longest manifest that is read, in bytes.
const maxManifest = 64 << 20

// injectOptions are the flags of `nametap-discovery inject`.
type injectOptions struct {
	flags      *pflag.FlagSet
	files      []string
	configFile string
	guardFile  string
	namespace  string
	// cfg has the values of the flags. If a flag is set, its value replaces that of the file configFile.
	cfg inject.Config
}

func newInject(stdout, stderr io.Writer) *cobra.Command {
	var o injectOptions
	command := &cobra.Command{
		Use:   "inject -f FILE",
		Short: "Add the agent to the pods of a manifest",
		Long: `Read a manifest of Kubernetes objects, add the agent to the pods in it, and print it. The
agent is added to Pods, Deployments, StatefulSets, DaemonSets, ReplicaSets, Jobs, CronJobs
and PodTemplates, also in Lists. Other objects stay. docs/injection.md says what is added.

Pods with the label nametap.dev/inject: "false", pods on the network of their node and those
of ignored namespaces are left out. The standard error says what became of each pod. The
command can be run again on its own output, which then gets the new settings. It needs no
cluster.

If a pod cannot be injected, nothing is printed and the exit code is 1.`,
		Example: `  nametap inject -f shop.yaml | kubectl apply -f -
  kubectl get deployment cart -o yaml | nametap inject -f - | kubectl apply -f -
  nametap inject -f shop.yaml --mode resolv --nameserver 10.96.0.10
  nametap inject -f sandbox.yaml --guard policy.yaml`,
		Args: noArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			return o.run(command.InOrStdin(), stdout, stderr)
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringArrayVarP(&o.files, "filename", "f", nil, "`file` with the manifest, as YAML or JSON; - is the standard input, which is the default")
	o.declare(flags)
	flags.StringVarP(&o.namespace, "namespace", "n", "default", "`namespace` of objects that name none")
	return command
}

// declare declares the flags of settings. The other fields of an inject.Config can only be set in the file of --config.
func (o *injectOptions) declare(flags *pflag.FlagSet) {
	o.flags, o.cfg = flags, inject.DefaultConfig()
	flags.StringVar(&o.configFile, "config", "", "`file` with the settings of injection; docs/injection.md lists them")
	flags.StringVar((*string)(&o.cfg.Mode), "mode", string(o.cfg.Mode), "how queries get to the agent: rules (needs NET_ADMIN in an init container) or resolv (needs no capability)")
	flags.StringVar(&o.cfg.Image, "image", o.cfg.Image, "`image` of the agent")
	flags.StringVar(&o.cfg.InitImage, "init-image", o.cfg.InitImage, "`image` of the container that sets the rules")
	flags.StringVar(&o.cfg.ControlPlane, "control-plane", "", "`host:port` of the control plane (default istiod)")
	flags.StringVar(&o.cfg.RootCert, "root-cert", o.cfg.RootCert, "`ConfigMap` in the namespace of each pod with the root certificate of the control plane")
	flags.StringSliceVar(&o.cfg.RootCAFiles, "root-ca-file", nil, "`file` with root certificates of the control plane, which the pods get instead of that ConfigMap; may be repeated")
	flags.StringVar(&o.guardFile, "guard", "", "`file` with the policy of a guard for all pods, which a ConfigMap at the end of the output has (docs/injection.md)")
	flags.StringSliceVar(&o.cfg.Nameservers, "nameserver", nil, "`address` of the cluster's DNS, which mode resolv needs; may be repeated")
}

// config returns the settings of the file; flags that are set replace them.
func (o *injectOptions) config() (inject.Config, error) {
	cfg := inject.DefaultConfig()
	if o.configFile != "" {
		text, err := os.ReadFile(o.configFile)
		if err != nil {
			return cfg, fmt.Errorf("--config: %w", err)
		}
		if cfg, err = inject.ParseConfig(text); err != nil {
			return cfg, usageError{fmt.Errorf("--config %s: %w", o.configFile, err)}
		}
	}
	for name, set := range map[string]func(){
		"mode":          func() { cfg.Mode = o.cfg.Mode },
		"image":         func() { cfg.Image = o.cfg.Image },
		"init-image":    func() { cfg.InitImage = o.cfg.InitImage },
		"control-plane": func() { cfg.ControlPlane = o.cfg.ControlPlane },
		"root-cert":     func() { cfg.RootCert, cfg.RootCAFiles = o.cfg.RootCert, nil },
		"root-ca-file":  func() { cfg.RootCAFiles = o.cfg.RootCAFiles },
		"nameserver":    func() { cfg.Nameservers = o.cfg.Nameservers },
	} {
		if o.flags.Changed(name) {
			set()
		}
	}
	if o.guardFile != "" {
		text, err := os.ReadFile(o.guardFile)
		if err != nil {
			return cfg, fmt.Errorf("--guard: %w", err)
		}
		if _, err := guard.Parse(o.guardFile, text); err != nil {
			return cfg, usageError{fmt.Errorf("--guard: %w", err)}
		}
		cfg.Policy = text
	}
	if err := errors.Join(cfg.Check(), cfg.ReadRootCAs()); err != nil {
		return cfg, usageError{err}
	}
	return cfg, nil
}

// run injects the manifest. It prints to stdout only if all pods were injected or left out.
func (o *injectOptions) run(stdin io.Reader, stdout, stderr io.Writer) error {
	cfg, err := o.config()
	if err != nil {
		return err
	}
	text, err := o.read(stdin)
	if err != nil {
		return err
	}
	out, reports, err := inject.Manifest(text, o.namespace, cfg)
	if err != nil {
		return err
	}
	var refused []error
	for _, r := range reports {
		line := fmt.Sprintf("%s: %s: %s", r.Object, r.Outcome, strings.Join(r.Reasons, "; "))
		if r.Outcome == inject.Refused {
			refused = append(refused, fmt.Errorf("line %d: %s", r.Line, line))
			continue
		}
		_, _ = fmt.Fprintln(stderr, clip.Line(line)) // there is no other place for it
	}
	if len(refused) > 0 {
		return errors.Join(refused...)
	}
	_, err = stdout.Write(out)
	return err
}

// read reads the manifest.
func (o *injectOptions) read(stdin io.Reader) ([]byte, error) {
	in, name := stdin, "-"
	switch len(o.files) {
	case 0:
	case 1:
		name = o.files[0]
	default: // kubectl takes several files, and the last one alone would be a surprise
		return nil, usageError{fmt.Errorf("--filename: %q was given before: want one file, such as the standard input with the output of cat", o.files[0])}
	}
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer file.Close()
		in = file
	}
	text, err := io.ReadAll(io.LimitReader(in, maxManifest+1))
	if err == nil && len(text) > maxManifest {
		err = fmt.Errorf("want at most %d MiB", maxManifest>>20)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the manifest %s: %w", name, err)
	}
	return text, nil
}
