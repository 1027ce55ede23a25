package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/cgroup"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/internal/nat64"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/internal/version"
	"github.com/nametap/nametap/iptables"
)

// vmRootCA is where Istio has the root certificate on a VM. It is used if no setting names the file and the
// default file does not exist.
const vmRootCA = "/etc/certs/root-cert.pem"

// podReadyTimeout is agent.Config.ReadyTimeout in a pod. The containers of the pod wait for the agent.
const podReadyTimeout = 3 * time.Second

// resolve gives the settings their values.
func (o *options) resolve() error { return settings.Resolve(o.flags, os.Environ()) }

// config returns the agent's configuration. The error has a line for each setting that is wrong or, if there is none, says
// which settings contradict each other. Where a setting is not set, the configuration may have a value of the host, such
// as the host's name.
func (o *options) config() (agent.Config, error) {
	cfg := o.agent
	cfg.Logger = o.logger()
	cfg.StateDirRequired = o.flags.Changed(stateDirFlag) && !o.checkOnly
	cfg.Collectors = []prometheus.Collector{version.Metric("nametap_build_info")}
	cfg.XDS.MaxTable = int(min(cgroup.MemoryLimit("/")/12, 64<<20)) // measured: while all of a table changes, with two snapshots
	node := &cfg.XDS.Node
	if node.PodName == "" {
		hostname, err := os.Hostname()
		if err != nil {
			return cfg, fmt.Errorf("reading the host's name: %w", err)
		}
		node.PodName, _, _ = strings.Cut(hostname, ".") // like Istio's agent
	}
	cfg.Identity = node.PodName
	if os.Getenv(inPod) != "" {
		cfg.ReadyTimeout = podReadyTimeout
		if node.Namespace != "" {
			cfg.Identity += "." + node.Namespace
		}
	}
	err := errors.Join(o.completeDNS(&cfg), o.completeNode(&cfg), o.readPolicy())
	if o.policy != nil {
		cfg.Guard = guard.New(cfg.Identity)
		cfg.Guard.Use(o.policy)
	}
	if o.carriesVIPs() {
		cfg.Egress = &o.egress
		cfg.Egress.Memory = cmp.Or(cgroup.MemoryLimit("/"), cgroup.MachineMemory())
		if !o.flags.Changed("dns-auto-allocate") {
			node.AutoAllocate = true
		}
	}
	if !o.flags.Changed("xds-root-ca") {
		cfg.XDS.RootCAFallback = vmRootCA
	}
	if err = errors.Join(err, cfg.Validate()); err != nil || !o.installRules {
		return cfg, err
	}
	capture, err := o.agentCaptureConfig()
	cfg.Capture = &capture
	return cfg, err
}

// carriesVIPs reports whether connections to VIPs are carried.
func (o *options) carriesVIPs() bool { return o.carries || o.guardFile != "" }

// readPolicy reads the policy of the guard, if there is one.
func (o *options) readPolicy() (err error) {
	switch {
	case o.guardFile == "":
	case !o.carries && o.flags.Changed(egressFlag):
		err = errors.New("guard: connections to allowed names need egress: remove egress=false, or guard")
	default:
		o.policy, err = readPolicyFile(o.guardFile)
	}
	return err
}

// readPolicyFile reads the policy in a file that can be read again.
func readPolicyFile(path string) (*guard.Policy, error) {
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s: want a regular file, because the agent follows its changes", path)
	}
	if err != nil {
		return nil, fmt.Errorf("guard: %w", err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("guard: %w", err)
	}
	return guard.Parse(path, text)
}

// completeDNS adds to cfg.DNS the version, the domain, the nameservers and, from cfg.XDS, the identity of the node.
func (o *options) completeDNS(cfg *agent.Config) error {
	dns := &cfg.DNS
	dns.Namespace, dns.ID = cfg.XDS.Node.Namespace, cfg.XDS.Node.PodName
	dns.Version, dns.NAT64 = "nametap "+version.String(), nat64.Useful
	dns.Domain = cmp.Or(o.clusterDomain, dns.Domain)
	if dns.Forward.RootCA != "" {
		if _, err := upstream.ReadRoots(dns.Forward.RootCA); err != nil {
			return fmt.Errorf("upstream-root-ca: %w", err)
		}
	}
	addNameservers(&dns.Forward, o.nameservers)
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
	if domain, err := table.ClusterDomain(node.Namespace, cfg.DNS.Domain); err == nil { // otherwise cfg.DNS has the error
		// The node's domain is NAMESPACE.svc.DOMAIN, even if --domain is only DOMAIN.
		node.Domain = node.Namespace + ".svc." + domain
	}
	node.Metadata, node.Version = id.metadata, version.String()
	cfg.XDS.Refresh = o.refresh(id.labels)
	return nil
}

// logger returns a logger as the settings say.
func (o *options) logger() *slog.Logger {
	to := cmp.Or[io.Writer](o.logTo, os.Stderr)
	if inJournal(os.Stderr) {
		to = journalWriter{to}
	}
	options := &slog.HandlerOptions{Level: o.logLevel.LevelVar}
	if o.logFormat == formatJSON {
		return slog.New(slog.NewJSONHandler(to, options))
	}
	return slog.New(slog.NewTextHandler(to, options))
}

// logStart logs what runs, for whom, and the settings that do not have their defaults.
func (o *options) logStart(cfg agent.Config) {
	var set []string
	o.flags.VisitAll(func(flag *pflag.Flag) {
		if value := flag.Value.String(); value != flag.DefValue {
			set = append(set, flag.Name+"="+value)
		}
	})
	cfg.Logger.Info("starting", "version", version.String(), "namespace", cfg.XDS.Node.Namespace, "node", cfg.XDS.Node.ID(),
		"control_plane", cfg.XDS.Addr, "settings", strings.Join(set, " "))
}

// logParallel logs what the environment variable parallelEnv means to nametap, if its value is in use.
func (o *options) logParallel(log *slog.Logger) {
	if o.parallel && o.agent.DNS.Forward.Order == forward.OrderFastest {
		log.Info(parallelEnv+"=true means --"+orderFlag+" fastest: nameservers are not asked all at once",
			"source", settings.Source(o.flags.Lookup(orderFlag)))
	}
}

// captureConfig returns what is captured: the settings of capture, and what follows from other settings.
func (o *options) captureConfig() (agent.CaptureConfig, error) {
	cfg, enabled := o.capture, o.flags.Lookup(enabledFlag)
	cfg.Because = fmt.Sprintf("%s=%s (%s)", settings.Env(enabled), enabled.Value, settings.Source(enabled))
	cfg.ResolvConf = o.agent.DNS.Forward.ResolvConf
	if !cfg.On && o.guardFile != "" {
		return cfg, fmt.Errorf("guard: the kernel guards only with the rules of capture: remove guard, or %s", cfg.Because)
	}
	var err error
	cfg.Config, err = o.rulesConfig()
	return cfg, err
}

// agentCaptureConfig is captureConfig for an agent in this process. It returns an error if the agent's own
// queries, or the queries of a whole node, would be captured.
func (o *options) agentCaptureConfig() (agent.CaptureConfig, error) {
	if o.checkOnly { // the agent may run as another user, in another place
		return o.captureConfig()
	}
	if err := cmp.Or(ownQueriesPass(o.capture.Config), o.ownNetwork()); err != nil {
		return agent.CaptureConfig{}, err
	}
	return o.captureConfig()
}

// rulesConfig returns the configuration of the rules: the settings, and what follows from the address on which the
// agent listens. It does not add the servers of resolv.conf.
func (o *options) rulesConfig() (iptables.Config, error) {
	cfg, addr := o.capture.Config, o.agent.DNS.Addr
	hosts, port, err := listen.SplitAddr(dnsAddrFlag, addr)
	if err != nil {
		return cfg, err
	}
	cfg.Port = port
	if o.carriesVIPs() {
		hosts, port, err := listen.SplitAddr(egressAddrFlag, o.egress.Addr)
		if err != nil {
			return cfg, err
		}
		cfg.EgressPort = port
		if hosts[0].IsLoopback() && len(cfg.VirtualInterfaces) > 0 {
			return cfg, fmt.Errorf("%s %q: connections from capture-virtual-interface %v are redirected to the address of "+
				"that interface: want no host before the port",
				egressAddrFlag, o.egress.Addr, cfg.VirtualInterfaces)
		}
		cfg.VIPs = egress.VIPs()
	}
	cfg.Pod = os.Getenv(inPod) != "" && !o.hostNetwork
	cfg.Settle = o.agent.DNS.Forward.Timeout + time.Second // how long a reply may be in flight
	if cfg, err = servedFamilies(cfg, hosts); err != nil {
		return cfg, fmt.Errorf("%s %q: %w", dnsAddrFlag, addr, err)
	}
	// Build returns an error if the rules would be invalid.
	_, err = iptables.Build(cfg)
	return cfg, err
}

// servedFamilies leaves out a family if the agent does not listen where the rules redirect queries of that family.
// hosts are the addresses on which the agent listens. It returns an error if no family is left.
func servedFamilies(cfg iptables.Config, hosts []netip.Addr) (iptables.Config, error) {
	served := map[family.Family]bool{}
	for _, host := range hosts {
		if cfg.Serves(netip.AddrPortFrom(host, cfg.Port)) {
			served[family.Of(host)] = true
		}
	}
	if len(served) == 0 && len(cfg.VirtualInterfaces) > 0 {
		return cfg, fmt.Errorf("queries of capture-virtual-interface %v are redirected to the address of that interface: "+
			"want no host before the port, to listen on all addresses", cfg.VirtualInterfaces)
	}
	if len(served) == 0 {
		return cfg, errors.New("the rules redirect to 127.0.0.1 and ::1: want localhost, or no host before the port")
	}
	for _, f := range family.All() {
		if !served[f] {
			cfg = cfg.Without(f)
		}
	}
	return cfg, nil
}

// ownQueriesPass returns an error if this process, as the agent, would capture its own queries.
func ownQueriesPass(cfg iptables.Config) error {
	uid, gid := uint32(os.Getuid()), uint32(os.Getgid())
	if slices.Contains(cfg.AgentUIDs, uid) || slices.Contains(cfg.AgentGIDs, gid) {
		return nil
	}
	return fmt.Errorf("capture: this process has uid %d and gid %d, so the rules would redirect its own queries to "+
		"itself: run it as a user or group of --capture-agent-uid %v or --capture-agent-gid %v",
		uid, gid, cfg.AgentUIDs, cfg.AgentGIDs)
}
