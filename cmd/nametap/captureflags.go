package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/iptables"
)

// captureFlags are the settings of capture. They are the agent's too, since the agent
// on a VM installs the rules itself.
type captureFlags struct {
	on, failOpen, hostNetwork bool
	hostIP                    string

	servers                         string
	agentUIDs, agentGIDs            []uint
	excludeUIDs, excludeGIDs        []uint
	excludeCIDRs, excludeInterfaces []string
	excludeSourcePorts              []uint
	virtualInterfaces               []string
	zone                            uint16
	ipv6, backend                   string
	reconcile                       time.Duration
}

// Which nameservers' queries are captured.
const (
	serversAll        = "all"
	serversResolvConf = "resolv-conf"
)

// defaultMeshConfig is where Istio has the mesh config in a pod and on a VM.
const defaultMeshConfig = "/etc/istio/config/mesh"

const (
	switchFlag   = "dns-capture"
	failOpenFlag = "fail-open"
)

// declare declares the flags, which begin with that of the switch.
func (f *captureFlags) declare(flags *pflag.FlagSet) {
	flags.BoolVar(&f.on, switchFlag, true, "capture DNS, where --capture or 'nametap capture apply' asks for it; false installs no rules")
	flags.StringVar(&f.servers, "servers", serversAll, "capture queries for all nameservers, or only for those of resolv-conf")
	flags.UintSliceVar(&f.agentUIDs, "agent-uid", []uint{agentID}, "user of the agent, whose own queries pass; may be repeated")
	flags.UintSliceVar(&f.agentGIDs, "agent-gid", []uint{agentID}, "group of the agent, whose own queries pass; may be repeated")
	flags.UintSliceVar(&f.excludeUIDs, "exclude-uid", nil, "user whose queries pass; may be repeated")
	flags.UintSliceVar(&f.excludeGIDs, "exclude-gid", nil, "group whose queries pass; may be repeated")
	flags.StringSliceVar(&f.excludeCIDRs, "exclude-cidr", nil, "nameservers, such as 10.0.0.0/8, to which queries pass; may be repeated")
	flags.StringSliceVar(&f.excludeInterfaces, "exclude-interface", nil, "interface through which queries pass, tun+ for all that begin with tun; may be repeated")
	flags.UintSliceVar(&f.excludeSourcePorts, "exclude-source-port", nil, "port from which queries pass; may be repeated")
	flags.StringSliceVar(&f.virtualInterfaces, "virtual-interface", nil, "interface of containers or virtual machines whose queries are captured too; may be repeated")
	flags.Uint16Var(&f.zone, "conntrack-zone", iptables.DefaultConfig().Zone, "conntrack zone of captured queries; 0 is none")
	flags.StringVar(&f.ipv6, "ipv6", string(iptables.IfAvailable), "capture queries over IPv6: auto, on or off")
	flags.StringVar(&f.backend, "backend", string(iptables.Auto), "where the rules go: auto, nft or legacy")
	flags.DurationVar(&f.reconcile, "reconcile", iptables.DefaultConfig().Interval, "look after the rules this often")
	flags.BoolVar(&f.failOpen, failOpenFlag, true, "when the agent has ended, queries go to nameservers again; if it was killed, by 'nametap capture remove --after-agent'. false leaves the rules in")
	flags.BoolVar(&f.hostNetwork, hostNetworkFlag, false, "capture also in a pod that has its node's network: the DNS of the whole node, until 'nametap capture remove'")
	flags.StringVar(&f.hostIP, "host-ip", "", "address of the pod's node, by which a pod with its node's network is told [HOST_IP]")
	settings.SetEnv(flags, "host-ip", "HOST_IP") // as Istio's templates have it
}

// agentID is the user and the group of the agent, as Istio's has it.
const agentID = 1337

// rules returns the configuration of the rules, without the servers of resolv.conf.
// settle is how long a forwarded query may take.
func (f *captureFlags) rules(dnsAddr string, settle time.Duration) (iptables.Config, error) {
	host, port, err := net.SplitHostPort(dnsAddr)
	if err != nil {
		return iptables.Config{}, fmt.Errorf("dns-addr %q: want host:port: %w", dnsAddr, err)
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return iptables.Config{}, fmt.Errorf("dns-addr %q: want a port from 1 to 65535", dnsAddr)
	}
	if f.servers != serversAll && f.servers != serversResolvConf {
		return iptables.Config{}, fmt.Errorf("servers %q: want %s or %s", f.servers, serversAll, serversResolvConf)
	}
	cfg := iptables.DefaultConfig()
	cfg.Port = uint16(number)
	cfg.Zone, cfg.Interval, cfg.Settle = f.zone, f.reconcile, settle
	cfg.ExcludeInterfaces, cfg.VirtualInterfaces = f.excludeInterfaces, f.virtualInterfaces
	cfg.IPv6, cfg.Backend = iptables.Choice(f.ipv6), iptables.Backend(f.backend)
	if cfg.IPv6, err = f.listens(host, cfg.IPv6); err != nil {
		return iptables.Config{}, fmt.Errorf("dns-addr %q: %w", dnsAddr, err)
	}
	for _, ids := range []struct {
		flag string
		from []uint
		into *[]uint32
	}{
		{"agent-uid", f.agentUIDs, &cfg.AgentUIDs},
		{"agent-gid", f.agentGIDs, &cfg.AgentGIDs},
		{"exclude-uid", f.excludeUIDs, &cfg.ExcludeUIDs},
		{"exclude-gid", f.excludeGIDs, &cfg.ExcludeGIDs},
	} {
		if *ids.into, err = narrow[uint32](ids.flag, ids.from); err != nil {
			return iptables.Config{}, err
		}
	}
	if cfg.ExcludeSourcePorts, err = narrow[uint16]("exclude-source-port", f.excludeSourcePorts); err != nil {
		return iptables.Config{}, err
	}
	for _, text := range f.excludeCIDRs {
		prefix, err := parsePrefix(text)
		if err != nil {
			return iptables.Config{}, err
		}
		cfg.ExcludeCIDRs = append(cfg.ExcludeCIDRs, prefix)
	}
	// The rules themselves are checked where they are made.
	if _, err := iptables.Build(cfg); err != nil {
		return iptables.Config{}, err
	}
	return cfg, nil
}

// listens compares where an agent listens that has this host in its address with where the
// rules lead: to 127.0.0.1 and ::1, and to the addresses of virtual interfaces. It returns
// what becomes of IPv6, which may be left out.
func (f *captureFlags) listens(host string, v6 iptables.Choice) (iptables.Choice, error) {
	if len(f.virtualInterfaces) > 0 && host != "" && host != "0.0.0.0" {
		return v6, fmt.Errorf("queries of virtual-interface %v come to the address that it has: want no host before the port, which is all addresses", f.virtualInterfaces)
	}
	switch {
	case host == "" || host == "localhost":
		return v6, nil
	case host != "127.0.0.1" && host != "0.0.0.0":
		return v6, errors.New("the rules lead to 127.0.0.1 and ::1: want localhost, or no host before the port")
	case v6 == iptables.On:
		return v6, errors.New("with ipv6 on, the rules lead to ::1 too: want localhost, or no host before the port")
	}
	return iptables.Off, nil
}

// narrow returns numbers of a flag as a type that is smaller.
func narrow[T uint16 | uint32](flag string, from []uint) ([]T, error) {
	into := make([]T, 0, len(from))
	for _, n := range from {
		if uint(T(n)) != n {
			return nil, fmt.Errorf("%s %d: want at most %d", flag, n, ^T(0))
		}
		into = append(into, T(n))
	}
	return into, nil
}

// parsePrefix reads a CIDR, or an address for itself alone.
func parsePrefix(text string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(text); err == nil {
		return addr.Prefix(addr.BitLen())
	}
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("exclude-cidr %q: want an address or a prefix such as 10.0.0.0/8", text)
	}
	return prefix.Masked(), nil
}

// switchReader returns a function that reads again whether DNS is to be captured, and what
// says so. given are the flags of the command line, before others were resolved.
func switchReader(given *pflag.FlagSet) func() (agent.Switch, error) {
	fixed := map[string]string{}
	for _, name := range []string{settings.ConfigFlag, settings.MeshConfigFlag, switchFlag} {
		if flag := given.Lookup(name); flag.Changed {
			fixed[name] = flag.Value.String()
		}
	}
	return func() (agent.Switch, error) {
		var again agentFlags
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		again.declare(flags)
		for name, value := range fixed {
			if err := flags.Set(name, value); err != nil {
				return agent.Switch{}, err
			}
		}
		if err := settings.Resolve(flags, os.Environ()); err != nil {
			return agent.Switch{}, err
		}
		return agent.Switch{On: again.capture.on, Because: because(flags.Lookup(switchFlag))}, nil
	}
}

// because says what sets the switch.
func because(flag *pflag.Flag) string {
	return fmt.Sprintf("%s is %s by %s", settings.Env(flag), flag.Value, settings.Source(flag))
}

// ownQueriesPass returns an error if this process, as an agent, would capture its own
// queries.
func (f *captureFlags) ownQueriesPass() error {
	uid, gid := uint(os.Getuid()), uint(os.Getgid())
	if slices.Contains(f.agentUIDs, uid) || slices.Contains(f.agentGIDs, gid) {
		return nil
	}
	return fmt.Errorf("capture: this process has uid %d and gid %d, so its own queries would come back to it: want a user or group of --agent-uid %v or --agent-gid %v",
		uid, gid, f.agentUIDs, f.agentGIDs)
}
