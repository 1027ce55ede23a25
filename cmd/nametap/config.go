package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/internal/version"
)

// vmRootCA is where Istio has the root certificate on a VM. It is used if no setting says
// where it is and the default file does not exist.
const vmRootCA = "/etc/certs/root-cert.pem"

// resolve gives the settings their values.
func (o *options) resolve() error { return settings.Resolve(o.flags, os.Environ()) }

// config returns the agent's configuration: the settings, checked against each other, and
// what they leave to the host.
func (o *options) config() (agent.Config, error) {
	cfg := o.agent
	cfg.Logger = o.logger()
	cfg.StateDirRequired = o.flags.Changed("state-dir")
	cfg.Collectors = []prometheus.Collector{version.Metric("nametap_build_info")}
	node := &cfg.XDS.Node
	if node.PodName == "" {
		hostname, err := os.Hostname()
		if err != nil {
			return cfg, fmt.Errorf("reading the host's name: %w", err)
		}
		node.PodName, _, _ = strings.Cut(hostname, ".") // like Istio's agent
	}
	if err := o.completeDNS(&cfg); err != nil {
		return cfg, err
	}
	if err := o.completeNode(&cfg); err != nil {
		return cfg, err
	}
	if !o.flags.Changed("xds-root-ca") {
		cfg.XDS.RootCAFallback = vmRootCA
	}
	if !o.installRules {
		return cfg, nil
	}
	capture, err := o.agentCaptureConfig()
	cfg.Capture = &capture
	return cfg, err
}

// completeDNS adds to the query path's Config what it shares with the control plane's, and
// the nameservers.
func (o *options) completeDNS(cfg *agent.Config) error {
	dns := &cfg.DNS
	dns.Namespace, dns.ID = cfg.XDS.Node.Namespace, cfg.XDS.Node.PodName
	dns.Version = "nametap " + version.String()
	if o.clusterDomain != "" {
		dns.Domain = o.clusterDomain
	}
	if dns.Forward.RootCA != "" {
		if _, err := upstream.ReadRoots(dns.Forward.RootCA); err != nil {
			return fmt.Errorf("upstream-root-ca: %w", err)
		}
	}
	addNameservers(dns, o.nameservers)
	return nil
}

// completeNode adds the node's addresses, its metadata and its labels.
func (o *options) completeNode(cfg *agent.Config) error {
	id, err := readIdentity(o.flags, os.Environ())
	if err != nil {
		return err
	}
	node := &cfg.XDS.Node
	if node.IPs, err = agent.InstanceIPs(o.instanceIP); err != nil {
		return err
	}
	domain, err := table.ClusterDomain(node.Namespace, cfg.DNS.Domain)
	if err != nil {
		return err
	}
	// The node's domain has the namespace even if --domain does not.
	node.Domain = node.Namespace + ".svc." + domain
	node.Metadata = id.metadata
	cfg.XDS.Refresh = o.refresh(id.labels)
	return nil
}

// logger returns a logger as the settings say.
func (o *options) logger() *slog.Logger {
	w, options := cmp.Or[io.Writer](o.logTo, os.Stderr), &slog.HandlerOptions{Level: o.logLevel.LevelVar}
	if o.logFormat == formatJSON {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

// A logLevel is the least important level to log. It may change while loggers are in use.
type logLevel struct{ *slog.LevelVar }

// MarshalText returns what UnmarshalText reads.
func (l logLevel) MarshalText() ([]byte, error) {
	return []byte(strings.ToLower(l.Level().String())), nil
}

// UnmarshalText reads a level.
func (l logLevel) UnmarshalText(text []byte) error {
	if l.LevelVar.UnmarshalText(text) != nil {
		return errors.New("want debug, info, warn or error")
	}
	return nil
}

// logFormat is how lines of the log are written.
type logFormat string

// The values of logFormat.
const (
	formatText logFormat = "text"
	formatJSON logFormat = "json"
)

// MarshalText returns what UnmarshalText reads.
func (f logFormat) MarshalText() ([]byte, error) { return []byte(f), nil }

// UnmarshalText reads one of the values.
func (f *logFormat) UnmarshalText(text []byte) error {
	switch v := logFormat(text); v {
	case formatText, formatJSON:
		*f = v
		return nil
	}
	return errors.New("want text or json")
}
