package main

import (
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/agent/querylog"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/iptables"
	"github.com/nametap/nametap/nds"
)

// options are the settings of the agent. Most go straight into the Configs of the packages
// that they configure; the other fields belong to the command, or to more than one Config.
type options struct {
	flags   *pflag.FlagSet
	agent   agent.Config
	capture agent.CaptureConfig

	clusterDomain string
	instanceIP    netip.Addr
	labelsFile    string
	nameservers   []nameserver
	parallel      bool // whether parallelEnv is true

	installRules bool // --capture
	captureWait  time.Duration
	carries      bool // --egress; see carriesVIPs
	egress       egress.Config
	guardFile    string
	policy       *guard.Policy // of guardFile; see readPolicy
	hostNetwork  bool

	supervise bool
	checkOnly bool // --check: the settings are read, and nothing runs
	logLevel  settings.LogLevel
	logFormat logFormat
	logTo     io.Writer // nil is the standard error
}

// Names of settings that the code refers to.
const (
	dnsAddrFlag     = "dns-addr"
	enabledFlag     = "capture-enabled"
	failOpenFlag    = "capture-fail-open"
	captureWaitFlag = "capture-wait"
	hostNetworkFlag = "capture-host-network"
	statusAddrFlag  = "status-addr"
	stateDirFlag    = "state-dir"
	egressFlag      = "egress"
	egressAddrFlag  = "egress-addr"
	guardFlag       = "guard"
	orderFlag       = "upstream-order"
)

// parallelEnv is the variable that makes Istio's agent ask all nameservers at once.
const parallelEnv = "DNS_FORWARD_PARALLEL"

// defaultMeshConfig is where Istio has the mesh config in a pod and on a VM.
const defaultMeshConfig = "/etc/istio/config/mesh"

// newOptions declares every setting, each with its default.
func newOptions(flags *pflag.FlagSet) *options {
	o := &options{
		flags: flags,
		agent: agent.DefaultConfig(),
		capture: agent.CaptureConfig{
			On: true, Config: iptables.DefaultConfig(), Servers: agent.AllServers, Resolved: true,
		},
		egress:     egress.DefaultConfig(),
		labelsFile: "/etc/istio/pod/labels",
		logLevel:   settings.LogLevel{LevelVar: new(slog.LevelVar)},
		logFormat:  formatText,
	}
	flags.SortFlags = false
	files, config, mesh := settings.NewGroup(flags, "Files with settings"), "", defaultMeshConfig
	files.String(&config, settings.ConfigFlag,
		"`file` with settings, whose keys are the names of the flags; docs/nametap.yaml lists all")
	files.String(&mesh, settings.MeshConfigFlag,
		"Istio's mesh config, a `file` whose defaultConfig is read; at its default place it may be absent")
	o.declareControlPlane(settings.NewGroup(flags, "Identity and control plane"))
	o.declareDNS(settings.NewGroup(flags, "DNS"))
	o.declareNameservers(settings.NewGroup(flags, "Nameservers"))
	o.declareCache(settings.NewGroup(flags, "Cache"))
	o.declareCapture(settings.NewGroup(flags, "Capture"))
	o.declareEgress(settings.NewGroup(flags, "Connections to VIPs, and the guard"))
	o.declareProcess(settings.NewGroup(flags, "Process, status and logging"))
	return o
}

// looseOptions returns settings that belong to no command.
func looseOptions() *options { return newOptions(pflag.NewFlagSet("", pflag.ContinueOnError)) }

// declareControlPlane declares the identity of the workload, and where its table comes from.
func (o *options) declareControlPlane(g settings.Group) {
	xds, node := &o.agent.XDS, &o.agent.XDS.Node
	g.String(&node.Namespace, "namespace",
		"`namespace` of the workload; its Services also answer by their name alone").Env("POD_NAMESPACE", "ISTIO_NAMESPACE")
	g.String(&o.clusterDomain, "domain", "cluster `domain`, alone or as NAMESPACE.svc.DOMAIN (default cluster.local)")
	g.String(&node.PodName, "pod-name", "`name` of the workload (default the host's name)").Env("POD_NAME")
	g.Text(addrValue{&o.instanceIP}, "instance-ip", "`address` of the workload; the control plane gets it first, then "+
		"the addresses of the interfaces").Env("INSTANCE_IP", "ISTIO_SVC_IP")
	g.String(&node.ClusterID, "cluster-id",
		"`name` that the control plane has for the workload's cluster").Env("ISTIO_META_CLUSTER_ID")
	g.String(&node.ServiceAccount, "service-account", "service account of the workload").Env("SERVICE_ACCOUNT")
	g.String(&o.labelsFile, "labels-file",
		"`file` with the workload's labels, as the downward API writes it; it may be absent")
	g.String(&xds.Addr, "xds-addr", "control plane, `host:port`").DiscoveryAddress()
	g.Bool(&xds.Plaintext, "xds-plaintext", "connect to the control plane without TLS and without a token")
	g.String(&xds.RootCA, "xds-root-ca", "PEM `file` with the control plane's root certificates").Env("XDS_ROOT_CA")
	g.String(&xds.TokenFile, "xds-token-file", "`file` with the bearer token; read on every connect")
	g.String(&xds.CertFile, "xds-cert",
		"PEM `file` with a client certificate for the control plane; read on every connect")
	g.String(&xds.KeyFile, "xds-key", "PEM `file` with the key of that certificate")
	g.Var(settings.OneOf(&xds.WorkloadCert, nds.WorkloadCertAuto, nds.WorkloadCertOn, nds.WorkloadCertOff), "workload-cert",
		"when to exchange the token for a certificate that outlives it: auto (unless kubelet renews the token), on or off")
	g.String(&xds.CAAddr, "ca-addr",
		"certificate authority for that exchange, `host:port` (default --xds-addr)").Env("CA_ADDR")
	g.String(&xds.TrustDomain, "trust-domain", "trust `domain` of the workload's identity").Env("TRUST_DOMAIN")
	g.String(&xds.ServerName, "xds-server-name", "`name` that the control plane's certificate must have (default the "+
		"host of --xds-addr, or istiod.istio-system.svc if that is an address or localhost)")
	g.Bool(&node.AutoAllocate, "dns-auto-allocate", "ask for automatic VIPs (240.128.0.0/9), which need --egress or a "+
		"proxy such as Envoy (default with --egress)").Env("ISTIO_META_DNS_AUTO_ALLOCATE")
	g.String(&xds.StateDir, stateDirFlag, "`directory` for the last good table, used at the next start; empty keeps none")
}

// declareDNS declares where the agent listens and how it answers.
func (o *options) declareDNS(g settings.Group) {
	dns := &o.agent.DNS
	g.String(&dns.Addr, dnsAddrFlag, "listen for DNS on `host:port`, UDP and TCP; localhost is 127.0.0.1 and ::1, no "+
		"host is all addresses").Env("DNS_PROXY_ADDR")
	g.Var(settings.Duration(&dns.TTL, settings.ZeroRefused), "ttl", "TTL of mesh names, in whole seconds")
	g.Var(settings.OneOf(&dns.BeforeSync, dnsproxy.BeforeSyncs()...), "before-sync",
		"how to answer before the first table: forward, hold (in the first 10s, for up to 2s) or servfail")
	g.Var(settings.List(&dns.Bypass, settings.ParseString), "bypass",
		"`suffix` whose names are forwarded even if the table has them; may be repeated")
	g.Var(settings.List(&dns.LocalOnly, settings.ParseString), "local-only",
		"`suffix` whose names are never forwarded: clients that ask for those that the table lacks get NXDOMAIN; may be repeated")
}

// declareNameservers declares where queries that the table does not answer are forwarded to.
func (o *options) declareNameservers(g settings.Group) {
	forward := &o.agent.DNS.Forward
	g.String(&forward.ResolvConf, "resolv-conf", "`file` with the search list and the nameservers")
	g.Var(settings.List(&o.nameservers, parseNameserver), "upstream", "`nameserver` instead of resolv.conf's: ADDRESS, "+
		"ADDRESS:PORT or tls://ADDRESS#NAME; with SUFFIX= before it, only for names of that suffix; may be repeated")
	g.String(&forward.RootCA, "upstream-root-ca",
		"PEM `file` with the root certificates of tls:// nameservers; read for every connection (default the system's)")
	g.Text(upstreamOrder{&forward.Order, &o.parallel}, orderFlag,
		"nameserver to ask first: strict (the first that works; only it may answer NXDOMAIN) or fastest").Env(parallelEnv)
	g.Var(settings.Duration(&forward.Timeout, settings.ZeroRefused), "upstream-timeout",
		"time limit of a forwarded query, over all nameservers").Env("DNS_FORWARD_TIMEOUT")
}

// declareCache declares which replies of nameservers are kept.
func (o *options) declareCache(g settings.Group) {
	forward := &o.agent.DNS.Forward
	g.Var(settings.Bytes(&forward.CacheSize, settings.ZeroIsNone), "cache-size",
		"memory for replies of nameservers, in bytes or with KiB or MiB; 0 keeps none")
	g.Var(settings.Duration(&forward.ServeStale, settings.ZeroIsNone), "serve-stale",
		"if no nameserver answers, use replies that expired up to this long ago; 0 uses none")
}

// declareCapture declares which queries are redirected to the agent.
func (o *options) declareCapture(g settings.Group) {
	cfg := &o.capture.Config
	g.Bool(&o.installRules, "capture", "redirect port 53 of this host to the agent while it runs; needs CAP_NET_ADMIN")
	g.Bool(&o.capture.On, enabledFlag,
		"switch of capture; with false neither --capture nor 'nametap capture apply' installs rules").Env("ISTIO_META_DNS_CAPTURE")
	g.Var(settings.OneOf(&o.capture.Servers, agent.AllServers, agent.ResolvConfServers), "capture-servers",
		"capture queries to all nameservers, or only to those of resolv-conf")
	g.Var(settings.List(&cfg.AgentUIDs, settings.ParseUint[uint32]), "capture-agent-uid",
		"`uid` of the agent; its queries are not captured; may be repeated")
	g.Var(settings.List(&cfg.AgentGIDs, settings.ParseUint[uint32]), "capture-agent-gid",
		"`gid` of the agent; its queries are not captured; may be repeated")
	g.Var(settings.List(&cfg.ExcludeUIDs, settings.ParseUint[uint32]), "capture-exclude-uid",
		"do not capture queries of the user with this `uid`; may be repeated")
	g.Var(settings.List(&cfg.ExcludeGIDs, settings.ParseUint[uint32]), "capture-exclude-gid",
		"do not capture queries of the group with this `gid`; may be repeated")
	g.Var(settings.List(&cfg.ExcludeCIDRs, parsePrefix), "capture-exclude-cidr",
		"do not capture queries to nameservers in this `network`, such as 10.0.0.0/8; may be repeated")
	g.Var(settings.List(&cfg.ExcludeInterfaces, settings.ParseString), "capture-exclude-interface",
		"do not capture queries through this outgoing `interface`; tun+ means all that begin with tun; may be repeated")
	g.Var(settings.List(&cfg.VirtualInterfaces, settings.ParseString), "capture-virtual-interface",
		"also capture queries that come from this `interface` of containers or virtual machines; may be repeated")
	g.Negated(&cfg.FailClosed, failOpenFlag, "remove the rules when the agent ends, so that queries reach nameservers; "+
		"after a crash a service manager does so with 'nametap capture remove --after-agent'")
	g.Var(settings.Duration(&o.captureWait, settings.ZeroIsZero), captureWaitFlag, "how long 'nametap capture apply' "+
		"waits for an agent in another container before it installs rules; 0 installs them at once")
	g.Bool(&o.capture.Resolved, "capture-resolved", "with --capture, register with systemd-resolved if this host runs "+
		"it, so that programs that ask it directly find mesh names")
	g.Bool(&o.hostNetwork, hostNetworkFlag,
		"capture even in a pod on its node's network: the DNS of the whole node, until 'nametap capture remove'")
}

// declareEgress declares which connections to automatic VIPs are carried, and how.
func (o *options) declareEgress(g settings.Group) {
	cfg := &o.egress
	g.Bool(&o.carries, egressFlag, "carry TCP connections to automatic VIPs to their hosts: ask for VIPs, listen for "+
		"connections, and redirect these with the capture rules")
	g.String(&cfg.Addr, egressAddrFlag,
		"listen for connections to VIPs on `host:port`; localhost is 127.0.0.1 and ::1, no host is all addresses")
	g.Var(settings.List(&cfg.Sources, netip.ParseAddr), "egress-source",
		"`address` of this host from which connections to hosts are made; at most one of each family")
	g.Var(settings.Uint(&cfg.Mark), "egress-mark",
		"mark (SO_MARK) of the packets to hosts, for rules and routes; 0 for none; needs CAP_NET_ADMIN")
	g.String(&cfg.Proxy, "egress-proxy", "HTTP proxy, `host:port`, that connects to the hosts by CONNECT")
	g.Var(settings.Duration(&cfg.IdleTimeout, settings.ZeroRefused), "egress-idle-timeout", "how long a connection to a "+
		"VIP may carry no data in either direction; a twelfth of it after the data of one direction has ended")
	g.String(&o.guardFile, guardFlag, "`file` with the policy of the guard: the names outside of the mesh that clients may ask "+
		"for and reach; implies --egress; see docs/guard.md")
}

// declareProcess declares how the process runs, and what it logs and reports.
func (o *options) declareProcess(g settings.Group) {
	g.String(&o.agent.StatusAddr, statusAddrFlag, "listen for probes and metrics on `host:port`")
	g.Var(settings.Duration(&o.agent.Drain, settings.ZeroIsZero), "drain", "go on answering, and carrying open "+
		"connections to VIPs, for this long after SIGTERM; with --capture in nametap.service only if it is set, since no "+
		"query is redirected to the agent any more")
	g.Bool(&o.supervise, "supervise",
		"hold the DNS sockets in a small process that restarts the agent if it dies or hangs; for pods")
	g.Var(settings.OneOf(&o.agent.Records.QueryLog, querylog.Off, querylog.Failed, querylog.All), "query-log", "which queries to log, in one line a minute for each cause: "+
		"off, failed (those without an answer, or with a stale one) or all")
	g.Text(&o.agent.Records.Dnstap, "dnstap",
		"send queries and responses to a `receiver` of dnstap: unix:///PATH or tcp://HOST:PORT")
	g.Text(o.logLevel, "log-level", "least important level to log: debug, info, warn or error")
	g.Var(settings.OneOf(&o.logFormat, formatText, formatJSON), "log-format", "format of the log: text or json")
}

// A nameserver is one value of --upstream.
type nameserver struct {
	suffix string // if routed: the suffix of the names that the nameserver is for
	routed bool
	spec   upstream.Spec
}

// parseNameserver reads SERVER or SUFFIX=SERVER.
func parseNameserver(text string) (nameserver, error) {
	suffix, server, routed := strings.Cut(text, "=")
	if !routed {
		suffix, server = "", text
	}
	spec, err := upstream.ParseSpec(server)
	return nameserver{suffix, routed, spec}, err
}

// String returns the text that parseNameserver reads.
func (n nameserver) String() string {
	if n.routed {
		return n.suffix + "=" + n.spec.String()
	}
	return n.spec.String()
}

// addNameservers adds nameservers to a Config, each to the nameservers of its suffix.
func addNameservers(cfg *forward.Config, nameservers []nameserver) {
	for _, n := range nameservers {
		if !n.routed {
			cfg.Upstreams = append(cfg.Upstreams, n.spec)
			continue
		}
		i := slices.IndexFunc(cfg.Routes, func(r forward.Route) bool { return strings.EqualFold(r.Suffix, n.suffix) })
		if i < 0 {
			i, cfg.Routes = len(cfg.Routes), append(cfg.Routes, forward.Route{Suffix: n.suffix})
		}
		cfg.Routes[i].Servers = append(cfg.Routes[i].Servers, n.spec)
	}
}

// An addrValue is an address, or none.
type addrValue struct{ *netip.Addr }

// UnmarshalText reads an address.
func (v addrValue) UnmarshalText(text []byte) error {
	if v.Addr.UnmarshalText(text) != nil {
		return errors.New("want one IP address")
	}
	return nil
}

// An upstreamOrder is a setting of the order of nameservers. The value true, which parallelEnv may have, means
// fastest, and sets parallel. The value false means strict.
type upstreamOrder struct {
	*forward.Order
	parallel *bool
}

// UnmarshalText reads an order, true or false.
func (o upstreamOrder) UnmarshalText(text []byte) error {
	switch parallel, err := strconv.ParseBool(string(text)); {
	case err != nil:
		return o.Order.UnmarshalText(text)
	case parallel:
		*o.Order, *o.parallel = forward.OrderFastest, true
	default:
		*o.Order = forward.OrderStrict
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

// parsePrefix reads a prefix, or an address as the prefix that has only this address.
func parsePrefix(text string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(text); err == nil {
		return addr.Prefix(addr.BitLen())
	}
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, errors.New("want an address or a prefix such as 10.0.0.0/8")
	}
	return prefix.Masked(), nil
}
