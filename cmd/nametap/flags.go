package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/internal/version"
	"github.com/nametap/nametap/nds"
)

// agentFlags are the settings of the agent as a user writes them. What each one
// means stands in declare, once.
type agentFlags struct {
	namespace, domain, podName, instanceIP, clusterID, serviceAccount string
	labelsFile                                                        string

	xdsAddr, xds, xdsRootCA, xdsTokenFile, xdsServerName string
	xdsCert, xdsKey, workloadCert, caAddr, trustDomain   string
	xdsPlaintext, autoAllocate                           bool
	maxPushBytes                                         byteSize

	dnsAddr, resolvConf, beforeSync       string
	upstreams, bypass, localOnly          []string
	autopath, upstreamOrder               string
	upstreamRootCA                        string
	forwardParallel, upstreamMixCase      bool
	originalDestination                   bool
	cacheSize                             byteSize
	cacheMaxTTL, cacheMaxNegativeTTL      time.Duration
	upstreamTimeout, serveStale, ttl      time.Duration
	ednsUDPSize, maxTCPConns, maxInflight int

	statusAddr, stateDir, logLevel, logFormat string
	drain, readyTimeout                       time.Duration

	supervise bool
	logTo     io.Writer // nil is the standard error

	installRules bool
	capture      captureFlags
}

// defaultStateDir is used if it can be, and done without if not.
const defaultStateDir = "/var/lib/nametap"

// vmRootCA is where Istio has the root certificate on a VM. It is used if nothing says
// where it is and the default is not there.
const vmRootCA = "/etc/certs/root-cert.pem"

// declare declares every flag with its default.
func (f *agentFlags) declare(flags *pflag.FlagSet) {
	flags.SortFlags = false
	flags.String(settings.ConfigFlag, "", "file with settings, keys as the flags; docs/nametap.yaml shows all")
	flags.String(settings.MeshConfigFlag, defaultMeshConfig, "Istio's mesh config, of which defaultConfig is read; it may be absent there")
	f.declareIdentity(flags)
	f.declareControlPlane(flags)
	f.declareAnswers(flags)
	f.declareForwarding(flags)
	f.declareRun(flags)
	flags.BoolVar(&f.installRules, "capture", false, "have port 53 of this host redirected to the agent while it runs; takes CAP_NET_ADMIN")
	f.capture.declare(flags)
	settings.SetDiscoveryAddress(flags, "xds-addr")
	// The environment variables that Istio's agent has for the same.
	for _, istio := range []struct {
		flag, env string
		more      []string
	}{
		{"namespace", "POD_NAMESPACE", []string{"ISTIO_NAMESPACE"}},
		{flag: "pod-name", env: "POD_NAME"},
		{"instance-ip", "INSTANCE_IP", []string{"ISTIO_SVC_IP"}},
		{flag: "cluster-id", env: "ISTIO_META_CLUSTER_ID"},
		{flag: "dns-auto-allocate", env: "ISTIO_META_DNS_AUTO_ALLOCATE"},
		{flag: "service-account", env: "SERVICE_ACCOUNT"},
		{flag: "xds-root-ca", env: "XDS_ROOT_CA"},
		{flag: "ca-addr", env: "CA_ADDR"},
		{flag: "trust-domain", env: "TRUST_DOMAIN"},
		{flag: "dns-addr", env: "DNS_PROXY_ADDR"},
		{flag: "upstream-parallel", env: "DNS_FORWARD_PARALLEL"},
		{flag: "upstream-timeout", env: "DNS_FORWARD_TIMEOUT"},
		{flag: switchFlag, env: "ISTIO_META_DNS_CAPTURE"},
	} {
		flags.Lookup(istio.flag).Usage += " [" + istio.env + "]"
		settings.SetEnv(flags, istio.flag, istio.env, istio.more...)
	}
}

// declareIdentity declares who the agent is.
func (f *agentFlags) declareIdentity(flags *pflag.FlagSet) {
	flags.StringVar(&f.namespace, "namespace", "default", "own namespace, in which short names of one label answer")
	flags.StringVar(&f.domain, "domain", "", "cluster domain, or NAMESPACE.svc.CLUSTERDOMAIN (default: that, below cluster.local)")
	flags.StringVar(&f.podName, "pod-name", "", "own name (default: the host's)")
	flags.StringVar(&f.instanceIP, "instance-ip", "", "own address, before those of the interfaces (default: only those)")
	flags.StringVar(&f.clusterID, "cluster-id", "Kubernetes", "own cluster, as the control plane calls it")
	flags.StringVar(&f.serviceAccount, "service-account", "default", "own service account")
	flags.StringVar(&f.labelsFile, "labels-file", "/etc/istio/pod/labels", "file with the own labels, as the downward API writes it; it may be absent")
}

// declareControlPlane declares where the table comes from.
func (f *agentFlags) declareControlPlane(flags *pflag.FlagSet) {
	flags.StringVar(&f.xdsAddr, "xds-addr", "istiod.istio-system.svc:15012", "control plane, host:port")
	flags.BoolVar(&f.xdsPlaintext, "xds-plaintext", false, "no TLS to the control plane, and no token")
	flags.StringVar(&f.xds, "xds", nds.Incremental.String(), "ADS variant: incremental or sotw")
	flags.StringVar(&f.xdsRootCA, "xds-root-ca", "/var/run/secrets/istio/root-cert.pem", "PEM file with the control plane's root certificates")
	flags.StringVar(&f.xdsTokenFile, "xds-token-file", "/var/run/secrets/tokens/istio-token", "file with the bearer token, read on every connect")
	flags.StringVar(&f.xdsCert, "xds-cert", "", "PEM file with a client certificate for the control plane, read on every connect")
	flags.StringVar(&f.xdsKey, "xds-key", "", "PEM file with its key")
	flags.StringVar(&f.workloadCert, "workload-cert", string(nds.WorkloadCertAuto), "exchange the token for a certificate that outlives it: auto (unless kubelet renews the token), on or off")
	flags.StringVar(&f.caAddr, "ca-addr", "", "certificate authority for that, host:port (default: --xds-addr)")
	flags.StringVar(&f.trustDomain, "trust-domain", "cluster.local", "trust domain of the own identity, for that")
	flags.StringVar(&f.xdsServerName, "xds-server-name", "", "name in the control plane's certificate (default: the host of --xds-addr, istiod.istio-system.svc if that is an address or localhost)")
	flags.BoolVar(&f.autoAllocate, "dns-auto-allocate", false, "ask for automatic VIPs (240.240.0.0/16); they lead somewhere only through a proxy such as Envoy")
	f.maxPushBytes = 64 << 20
	flags.Var(&f.maxPushBytes, "max-push-bytes", "longest push that is received, in bytes or with KiB or MiB")
}

// declareAnswers declares how queries are answered.
func (f *agentFlags) declareAnswers(flags *pflag.FlagSet) {
	flags.StringVar(&f.dnsAddr, "dns-addr", dnsproxy.DefaultAddr, "listen for DNS here, UDP and TCP; localhost is 127.0.0.1 and ::1")
	flags.StringVar(&f.resolvConf, "resolv-conf", dnsproxy.DefaultResolvConf, "file with the search list and the nameservers")
	flags.DurationVar(&f.ttl, "ttl", dnsproxy.DefaultTTL, "TTL of mesh hosts, in whole seconds")
	flags.IntVar(&f.ednsUDPSize, "edns-udp-size", dnsproxy.DefaultEDNSUDPSize, "longest UDP response in bytes, 512 to 65534")
	flags.IntVar(&f.maxTCPConns, "max-tcp-conns", dnsproxy.DefaultMaxTCPConns, "TCP connections of clients at a time")
	flags.StringVar(&f.beforeSync, "before-sync", string(dnsproxy.BeforeSyncForward), "queries before the first table: forward, hold or servfail")
}

// declareForwarding declares what becomes of queries that are not the table's.
func (f *agentFlags) declareForwarding(flags *pflag.FlagSet) {
	flags.StringSliceVar(&f.upstreams, "upstream", nil, "nameserver instead of resolv.conf's: ADDRESS, ADDRESS:PORT or tls://ADDRESS#NAME; with SUFFIX= before it, for the names of that suffix; may be repeated")
	flags.StringVar(&f.upstreamRootCA, "upstream-root-ca", "", "PEM file with the root certificates of tls:// nameservers, read for every new connection (default: the system's)")
	flags.StringVar(&f.upstreamOrder, "upstream-order", string(dnsproxy.OrderStrict), "nameserver to ask first: strict (the first that answers; only it may say that there is nothing) or fastest")
	flags.BoolVar(&f.forwardParallel, "upstream-parallel", false, "ask all nameservers at once instead of one after the other")
	flags.BoolVar(&f.upstreamMixCase, "upstream-mix-case", false, "send questions in random case (0x20), against forged replies")
	flags.BoolVar(&f.originalDestination, "original-destination", true, "forward captured queries to the nameserver they were sent to if resolv.conf does not name it; for UDP that takes CAP_NET_ADMIN")
	flags.StringSliceVar(&f.bypass, "bypass", nil, "suffix whose names are forwarded even if the table has them; may be repeated")
	flags.StringSliceVar(&f.localOnly, "local-only", nil, "suffix whose names are never forwarded: unknown ones do not exist; may be repeated")
	flags.StringVar(&f.autopath, "autopath", string(dnsproxy.AutopathMesh), "walk the search list for clients: mesh (names of the table), all or off")
	f.cacheSize = dnsproxy.DefaultCacheSize
	flags.Var(&f.cacheSize, "cache-size", "memory for nameservers' replies, in bytes or with KiB or MiB; 0 keeps none")
	flags.DurationVar(&f.cacheMaxTTL, "cache-max-ttl", dnsproxy.DefaultMaxTTL, "longest time for which a reply is kept, and longest TTL given from the cache")
	flags.DurationVar(&f.cacheMaxNegativeTTL, "cache-max-negative-ttl", dnsproxy.DefaultMaxNegativeTTL, "the same for replies that say that there is nothing")
	flags.DurationVar(&f.serveStale, "serve-stale", dnsproxy.DefaultServeStale, "give expired replies of up to this age when no nameserver answers; 0 gives none")
	flags.DurationVar(&f.upstreamTimeout, "upstream-timeout", dnsproxy.DefaultUpstreamTimeout, "time for one forwarded query, over all nameservers")
	flags.IntVar(&f.maxInflight, "max-inflight", dnsproxy.DefaultMaxInflight, "queries forwarded or held at a time; beyond it SERVFAIL")
}

// declareRun declares how the agent runs.
func (f *agentFlags) declareRun(flags *pflag.FlagSet) {
	flags.StringVar(&f.statusAddr, "status-addr", ":15020", "listen for probes, metrics and `nametap status` here")
	flags.StringVar(&f.stateDir, "state-dir", defaultStateDir, "directory for the last good table; empty keeps none")
	flags.DurationVar(&f.drain, "drain", 5*time.Second, "after SIGTERM, answer for this long")
	flags.DurationVar(&f.readyTimeout, "ready-timeout", 30*time.Second, "without a table, be ready after this long all the same")
	flags.BoolVar(&f.supervise, "supervise", false, "hold the DNS sockets in a small process that starts the agent again when it dies or hangs, for pods")
	flags.StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	flags.StringVar(&f.logFormat, "log-format", "text", "text or json")
}

// config checks the settings and puts them together.
func (f *agentFlags) config(flags *pflag.FlagSet) (agent.Config, error) {
	if err := requirePositive(flags); err != nil {
		return agent.Config{}, err
	}
	logger, err := newLogger(cmp.Or[io.Writer](f.logTo, os.Stderr), f.logLevel, f.logFormat)
	if err != nil {
		return agent.Config{}, err
	}
	hostname, err := os.Hostname()
	if err != nil {
		return agent.Config{}, fmt.Errorf("asking for the host's name: %w", err)
	}
	if f.podName == "" {
		f.podName, _, _ = strings.Cut(hostname, ".") // as Istio's agent has it
	}
	if f.domain == "" {
		f.domain = f.namespace + ".svc." + dnsproxy.DefaultDomain
	}
	dns, err := f.dnsConfig()
	if err != nil {
		return agent.Config{}, err
	}
	xds, err := f.xdsConfig(flags)
	if err != nil {
		return agent.Config{}, err
	}
	capture, err := f.captureConfig()
	if err != nil {
		return agent.Config{}, err
	}
	return agent.Config{
		DNS: dns, XDS: xds, Capture: capture,
		StatusAddr:       f.statusAddr,
		StateDirRequired: flags.Changed("state-dir"),
		Drain:            f.drain,
		ReadyTimeout:     f.readyTimeout,
		Logger:           logger,
		Collectors:       []prometheus.Collector{version.Metric("nametap_build_info")},
	}, nil
}

// captureConfig is nil for an agent that is not to install rules. Its switch is to be
// set.
func (f *agentFlags) captureConfig() (*agent.CaptureConfig, error) {
	if !f.installRules {
		return nil, nil //nolint:nilnil // documented
	}
	if err := cmp.Or(f.capture.ownQueriesPass(), f.capture.ownNetwork(f.instanceIP)); err != nil {
		return nil, err
	}
	rules, err := f.capture.rules(f.dnsAddr, f.settle())
	if err != nil {
		return nil, err
	}
	cfg := &agent.CaptureConfig{Rules: rules, FailClosed: !f.capture.failOpen}
	if f.capture.servers == serversResolvConf {
		cfg.ResolvConf = f.resolvConf
	}
	return cfg, nil
}

// settle is how long a query may be on its way: what nameservers have, and a little for
// ourselves.
func (f *agentFlags) settle() time.Duration { return f.upstreamTimeout + time.Second }

func (f *agentFlags) dnsConfig() (dnsproxy.Config, error) {
	beforeSync, err := dnsproxy.ParseBeforeSync(f.beforeSync)
	if err != nil {
		return dnsproxy.Config{}, err
	}
	autopath, err := dnsproxy.ParseAutopath(f.autopath)
	if err != nil {
		return dnsproxy.Config{}, err
	}
	order, err := dnsproxy.ParseOrder(f.upstreamOrder)
	if err != nil {
		return dnsproxy.Config{}, err
	}
	if f.upstreamRootCA != "" {
		if _, err := upstream.ReadRoots(f.upstreamRootCA); err != nil {
			return dnsproxy.Config{}, fmt.Errorf("upstream-root-ca: %w", err)
		}
	}
	cfg := dnsproxy.Config{
		Addr: f.dnsAddr, Namespace: f.namespace, Domain: f.domain, ResolvConf: f.resolvConf,
		UpstreamTimeout: f.upstreamTimeout, TTL: f.ttl, EDNSUDPSize: f.ednsUDPSize,
		Bypass: f.bypass, LocalOnly: f.localOnly, Autopath: autopath,
		UpstreamRootCA: f.upstreamRootCA, Order: order, Parallel: f.forwardParallel, MixCase: f.upstreamMixCase, OriginalDestination: f.originalDestination,
		CacheSize: int(f.cacheSize), ServeStale: f.serveStale,
		CacheMaxTTL: f.cacheMaxTTL, CacheMaxNegativeTTL: f.cacheMaxNegativeTTL,
		MaxTCPConns: f.maxTCPConns, MaxInflight: f.maxInflight, BeforeSync: beforeSync,
		Version: "nametap " + version.String(), ID: f.podName,
	}
	// Zero is the package's default; a user who writes 0 means none.
	if cfg.CacheSize == 0 {
		cfg.CacheSize = -1
	}
	if cfg.ServeStale == 0 {
		cfg.ServeStale = -1
	}
	return cfg, f.addUpstreams(&cfg)
}

// addUpstreams reads the nameservers: SERVER, or SUFFIX=SERVER.
func (f *agentFlags) addUpstreams(cfg *dnsproxy.Config) error {
	for _, text := range f.upstreams {
		suffix, server, routed := strings.Cut(text, "=")
		if !routed {
			suffix, server = "", text
		}
		spec, err := upstream.ParseSpec(server)
		if err != nil {
			return err
		}
		if !routed {
			cfg.Upstreams = append(cfg.Upstreams, spec)
			continue
		}
		i := slices.IndexFunc(cfg.Routes, func(r dnsproxy.Route) bool { return strings.EqualFold(r.Suffix, suffix) })
		if i < 0 {
			i = len(cfg.Routes)
			cfg.Routes = append(cfg.Routes, dnsproxy.Route{Suffix: suffix})
		}
		cfg.Routes[i].Servers = append(cfg.Routes[i].Servers, spec)
	}
	return nil
}

func (f *agentFlags) xdsConfig(flags *pflag.FlagSet) (nds.Config, error) {
	id, err := readIdentity(flags, os.Environ())
	if err != nil {
		return nds.Config{}, err
	}
	variant, err := nds.ParseVariant(f.xds)
	if err != nil {
		return nds.Config{}, err
	}
	ips, err := agent.InstanceIPs(f.instanceIP)
	if err != nil {
		return nds.Config{}, err
	}
	workloadCert, err := nds.ParseWorkloadCert(f.workloadCert)
	if err != nil {
		return nds.Config{}, err
	}
	clusterDomain, err := dnsproxy.ClusterDomain(f.namespace, f.domain)
	if err != nil {
		return nds.Config{}, err
	}
	rootCAElse := ""
	if !flags.Changed("xds-root-ca") {
		rootCAElse = vmRootCA
	}
	return nds.Config{
		Addr: f.xdsAddr, Plaintext: f.xdsPlaintext, Variant: variant,
		RootCA: f.xdsRootCA, RootCAElse: rootCAElse, TokenFile: f.xdsTokenFile, ServerName: f.xdsServerName,
		CertFile: f.xdsCert, KeyFile: f.xdsKey, WorkloadCert: workloadCert, CAAddr: f.caAddr, TrustDomain: f.trustDomain,
		MaxPushBytes: int(f.maxPushBytes), StateDir: f.stateDir,
		Node: nds.Node{
			PodName: f.podName, Namespace: f.namespace, IPs: ips,
			// The node's domain has the namespace, however ours is written.
			Domain:    f.namespace + ".svc." + clusterDomain,
			ClusterID: f.clusterID, ServiceAccount: f.serviceAccount, Metadata: id.metadata,
			AutoAllocate: f.autoAllocate,
		},
		Refresh: f.refresh(id.labels),
	}, nil
}

// requirePositive refuses 0 where the packages below take a zero value for "the
// default": a user who writes 0 means something else.
func requirePositive(flags *pflag.FlagSet) error {
	mayBeZero := []string{"drain", "ready-timeout", "cache-size", "serve-stale"}
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

// newLogger returns a logger that writes to w as the settings say.
func newLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	var options slog.HandlerOptions
	var threshold slog.Level
	if err := threshold.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log-level %q: want debug, info, warn or error", level)
	}
	options.Level = threshold
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, &options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, &options)), nil
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
