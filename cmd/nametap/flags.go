package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/internal/version"
	"github.com/nametap/nametap/nds"
)

// agentFlags are the settings of the agent as a user writes them. What each one
// means stands in declare, once.
type agentFlags struct {
	namespace, domain, podName, instanceIP, clusterID, serviceAccount string

	xdsAddr, xds, xdsRootCA, xdsTokenFile, xdsServerName string
	xdsPlaintext                                         bool
	maxPushBytes                                         byteSize

	dnsAddr, resolvConf, beforeSync       string
	upstreams                             []string
	upstreamTimeout, ttl                  time.Duration
	ednsUDPSize, maxTCPConns, maxInflight int

	statusAddr, stateDir, logLevel, logFormat string
	drain, readyTimeout                       time.Duration
}

// defaultStateDir is used if it can be, and done without if not.
const defaultStateDir = "/var/lib/nametap"

// declare declares every flag with its default and, where Istio has one, the
// environment variable of its agent.
func (f *agentFlags) declare(flags *pflag.FlagSet) {
	flags.SortFlags = false
	flags.String(settings.ConfigFlag, "", "file with settings, keys as the flags; docs/nametap.yaml shows all")

	text := func(p *string, name, value, env, usage string) {
		if env != "" {
			usage += " [" + env + "]"
		}
		flags.StringVar(p, name, value, usage)
		if env != "" {
			settings.SetEnv(flags, name, env)
		}
	}
	text(&f.namespace, "namespace", "default", "POD_NAMESPACE", "own namespace, in which short names of one label answer")
	text(&f.domain, "domain", "", "", "cluster domain, or NAMESPACE.svc.CLUSTERDOMAIN (default: that, below cluster.local)")
	text(&f.podName, "pod-name", "", "POD_NAME", "own name (default: the host's)")
	text(&f.instanceIP, "instance-ip", "", "INSTANCE_IP", "own address, before those of the interfaces (default: only those)")
	text(&f.clusterID, "cluster-id", "Kubernetes", "ISTIO_META_CLUSTER_ID", "own cluster, as the control plane calls it")
	text(&f.serviceAccount, "service-account", "default", "", "own service account")

	text(&f.xdsAddr, "xds-addr", "istiod.istio-system.svc:15012", "", "control plane, host:port")
	flags.BoolVar(&f.xdsPlaintext, "xds-plaintext", false, "no TLS to the control plane, and no token")
	text(&f.xds, "xds", nds.Incremental.String(), "", "ADS variant: incremental or sotw")
	text(&f.xdsRootCA, "xds-root-ca", "/var/run/secrets/istio/root-cert.pem", "XDS_ROOT_CA", "PEM file with the control plane's root certificates")
	text(&f.xdsTokenFile, "xds-token-file", "/var/run/secrets/tokens/istio-token", "", "file with the bearer token, read on every connect")
	text(&f.xdsServerName, "xds-server-name", "istiod.istio-system.svc", "", "name in the control plane's certificate")
	f.maxPushBytes = 64 << 20
	flags.Var(&f.maxPushBytes, "max-push-bytes", "longest push that is received, in bytes or with KiB or MiB")

	text(&f.dnsAddr, "dns-addr", dnsproxy.DefaultAddr, "DNS_PROXY_ADDR", "listen for DNS here, UDP and TCP; localhost is 127.0.0.1 and ::1")
	text(&f.resolvConf, "resolv-conf", dnsproxy.DefaultResolvConf, "", "file with the search list and the nameservers")
	flags.StringSliceVar(&f.upstreams, "upstream", nil, "nameserver instead of resolv.conf's, ADDRESS or ADDRESS:PORT; may be repeated")
	flags.DurationVar(&f.upstreamTimeout, "upstream-timeout", dnsproxy.DefaultUpstreamTimeout, "time for one forwarded query, over all nameservers [DNS_FORWARD_TIMEOUT]")
	settings.SetEnv(flags, "upstream-timeout", "DNS_FORWARD_TIMEOUT")
	flags.IntVar(&f.maxInflight, "max-inflight", dnsproxy.DefaultMaxInflight, "queries forwarded or held at a time; beyond it SERVFAIL")
	flags.DurationVar(&f.ttl, "ttl", dnsproxy.DefaultTTL, "TTL of mesh hosts, in whole seconds")
	flags.IntVar(&f.ednsUDPSize, "edns-udp-size", dnsproxy.DefaultEDNSUDPSize, "longest UDP response in bytes, 512 to 65534")
	flags.IntVar(&f.maxTCPConns, "max-tcp-conns", dnsproxy.DefaultMaxTCPConns, "TCP connections of clients at a time")
	text(&f.beforeSync, "before-sync", string(dnsproxy.BeforeSyncForward), "", "queries before the first table: forward, hold or servfail")

	text(&f.statusAddr, "status-addr", ":15020", "", "listen for probes, metrics and `nametap status` here")
	text(&f.stateDir, "state-dir", defaultStateDir, "", "directory for the last good table; empty keeps none")
	flags.DurationVar(&f.drain, "drain", 5*time.Second, "after SIGTERM, answer for this long")
	flags.DurationVar(&f.readyTimeout, "ready-timeout", 30*time.Second, "without a table, be ready after this long all the same")
	text(&f.logLevel, "log-level", "info", "", "debug, info, warn or error")
	text(&f.logFormat, "log-format", "text", "", "text or json")
}

// config checks the settings and puts them together.
func (f *agentFlags) config(flags *pflag.FlagSet) (agent.Config, error) {
	if err := requirePositive(flags); err != nil {
		return agent.Config{}, err
	}
	logger, err := newLogger(f.logLevel, f.logFormat)
	if err != nil {
		return agent.Config{}, err
	}
	hostname, err := os.Hostname()
	if err != nil {
		return agent.Config{}, fmt.Errorf("asking for the host's name: %w", err)
	}
	if f.podName == "" {
		f.podName = hostname
	}
	if f.domain == "" {
		f.domain = f.namespace + ".svc." + dnsproxy.DefaultDomain
	}
	dns, err := f.dnsConfig()
	if err != nil {
		return agent.Config{}, err
	}
	xds, err := f.xdsConfig()
	if err != nil {
		return agent.Config{}, err
	}
	return agent.Config{
		DNS: dns, XDS: xds,
		StatusAddr:       f.statusAddr,
		StateDirRequired: flags.Changed("state-dir"),
		Drain:            f.drain,
		ReadyTimeout:     f.readyTimeout,
		Logger:           logger,
	}, nil
}

func (f *agentFlags) dnsConfig() (dnsproxy.Config, error) {
	beforeSync, err := dnsproxy.ParseBeforeSync(f.beforeSync)
	if err != nil {
		return dnsproxy.Config{}, err
	}
	cfg := dnsproxy.Config{
		Addr: f.dnsAddr, Namespace: f.namespace, Domain: f.domain, ResolvConf: f.resolvConf,
		UpstreamTimeout: f.upstreamTimeout, TTL: f.ttl, EDNSUDPSize: f.ednsUDPSize,
		MaxTCPConns: f.maxTCPConns, MaxInflight: f.maxInflight, BeforeSync: beforeSync,
		Version: "nametap " + version.String(), ID: f.podName,
	}
	for _, s := range f.upstreams {
		upstream, err := dnsproxy.ParseUpstream(s)
		if err != nil {
			return dnsproxy.Config{}, err
		}
		cfg.Upstreams = append(cfg.Upstreams, upstream)
	}
	return cfg, nil
}

func (f *agentFlags) xdsConfig() (nds.Config, error) {
	variant, err := nds.ParseVariant(f.xds)
	if err != nil {
		return nds.Config{}, err
	}
	ips, err := agent.InstanceIPs(f.instanceIP)
	if err != nil {
		return nds.Config{}, err
	}
	clusterDomain, err := dnsproxy.ClusterDomain(f.namespace, f.domain)
	if err != nil {
		return nds.Config{}, err
	}
	return nds.Config{
		Addr: f.xdsAddr, Plaintext: f.xdsPlaintext, Variant: variant,
		RootCA: f.xdsRootCA, TokenFile: f.xdsTokenFile, ServerName: f.xdsServerName,
		MaxPushBytes: int(f.maxPushBytes), StateDir: f.stateDir,
		Node: nds.Node{
			PodName: f.podName, Namespace: f.namespace, IPs: ips,
			// The node's domain has the namespace, however ours is written.
			Domain:    f.namespace + ".svc." + clusterDomain,
			ClusterID: f.clusterID, ServiceAccount: f.serviceAccount,
		},
	}, nil
}

// requirePositive refuses 0 where the packages below take a zero value for "the
// default": a user who writes 0 means something else.
func requirePositive(flags *pflag.FlagSet) error {
	mayBeZero := []string{"drain", "ready-timeout"}
	var err error
	flags.VisitAll(func(flag *pflag.Flag) {
		text := flag.Value.String()
		switch kind := flag.Value.Type(); {
		case kind != "int" && kind != "duration" && kind != "bytes":
		case strings.HasPrefix(text, "-"):
			err = errors.Join(err, fmt.Errorf("%s %s: want no negative value", flag.Name, text))
		case (text == "0" || text == "0s") && !slices.Contains(mayBeZero, flag.Name):
			err = errors.Join(err, fmt.Errorf("%s %s: want more than 0", flag.Name, text))
		}
	})
	return err
}

func newLogger(level, format string) (*slog.Logger, error) {
	var options slog.HandlerOptions
	var threshold slog.Level
	if err := threshold.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log-level %q: want debug, info, warn or error", level)
	}
	options.Level = threshold
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(os.Stderr, &options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(os.Stderr, &options)), nil
	}
	return nil, fmt.Errorf("log-format %q: want text or json", format)
}

// A byteSize is a number of bytes that may be written with a unit.
type byteSize int

// String writes the size with the largest unit that divides it.
func (b *byteSize) String() string {
	switch n := int(*b); {
	case n != 0 && n%(1<<20) == 0:
		return strconv.Itoa(n>>20) + "MiB"
	case n != 0 && n%(1<<10) == 0:
		return strconv.Itoa(n>>10) + "KiB"
	default:
		return strconv.Itoa(n)
	}
}

// Set reads a size.
func (b *byteSize) Set(s string) error {
	digits, shift := s, 0
	if rest, ok := strings.CutSuffix(s, "KiB"); ok {
		digits, shift = rest, 10
	} else if rest, ok := strings.CutSuffix(s, "MiB"); ok {
		digits, shift = rest, 20
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil {
		return errors.New("want a number of bytes, alone or with KiB or MiB, such as 64MiB")
	}
	*b = byteSize(n << shift)
	return nil
}

// Type names the kind of value in the help.
func (b *byteSize) Type() string { return "bytes" }
