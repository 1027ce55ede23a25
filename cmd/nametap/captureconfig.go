package main

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/iptables"
)

// captureConfig returns what is captured: the settings, and what follows from others.
func (o *options) captureConfig() (agent.CaptureConfig, error) {
	cfg, enabled := o.capture, o.flags.Lookup(enabledFlag)
	cfg.Because = fmt.Sprintf("%s=%s (%s)", settings.Env(enabled), enabled.Value, settings.Source(enabled))
	cfg.ResolvConf = o.agent.DNS.Forward.ResolvConf
	var err error
	cfg.Config, err = o.rulesConfig()
	return cfg, err
}

// agentCaptureConfig is captureConfig for an agent in this process. It returns an error if
// the agent's own queries or those of a whole node would be captured.
func (o *options) agentCaptureConfig() (agent.CaptureConfig, error) {
	if err := cmp.Or(ownQueriesPass(o.capture.Config), o.ownNetwork()); err != nil {
		return agent.CaptureConfig{}, err
	}
	return o.captureConfig()
}

// rulesConfig returns the configuration of the rules, without the servers of resolv.conf:
// the settings, and what follows from the address on which the agent listens.
func (o *options) rulesConfig() (iptables.Config, error) {
	cfg, addr := o.capture.Config, o.agent.DNS.Addr
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return cfg, fmt.Errorf("%s %q: want host:port: %w", dnsAddrFlag, addr, err)
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return cfg, fmt.Errorf("%s %q: want a port from 1 to 65535", dnsAddrFlag, addr)
	}
	cfg.Port = uint16(number)
	cfg.Settle = o.agent.DNS.Forward.Timeout + time.Second // for nameservers, and a little for the agent
	if cfg, err = servedFamilies(cfg, host); err != nil {
		return cfg, fmt.Errorf("%s %q: %w", dnsAddrFlag, addr, err)
	}
	// iptables checks the rules themselves.
	_, err = iptables.Build(cfg)
	return cfg, err
}

// servedFamilies leaves out the families for which an agent on this host does not listen
// where the rules redirect to. It returns an error for a family that is required, and if
// none is left.
func servedFamilies(cfg iptables.Config, host string) (iptables.Config, error) {
	hosts := []string{host}
	switch host {
	case "":
		hosts = []string{"0.0.0.0", "::"}
	case "localhost":
		hosts = []string{"127.0.0.1", "::1"}
	}
	served := map[iptables.Family]bool{}
	for _, host := range hosts {
		addr, err := netip.ParseAddr(host)
		if err == nil && cfg.Serves(netip.AddrPortFrom(addr, cfg.Port)) {
			served[iptables.FamilyOf(addr)] = true
		}
	}
	if len(served) == 0 && len(cfg.VirtualInterfaces) > 0 {
		return cfg, fmt.Errorf("queries of capture-virtual-interface %v are redirected to the address of that interface: want no host before the port, to listen on all addresses", cfg.VirtualInterfaces)
	}
	if len(served) == 0 {
		return cfg, errors.New("the rules redirect to 127.0.0.1 and ::1: want localhost, or no host before the port")
	}
	if !served[iptables.IPv6] && cfg.IPv6 == iptables.On {
		return cfg, errors.New("with capture-ipv6 on, the rules redirect to ::1 too: want localhost, or no host before the port")
	}
	for _, f := range []iptables.Family{iptables.IPv4, iptables.IPv6} {
		if !served[f] {
			cfg = cfg.Without(f)
		}
	}
	return cfg, nil
}

// ownQueriesPass returns an error if this process, as an agent, would capture its own
// queries.
func ownQueriesPass(cfg iptables.Config) error {
	uid, gid := uint32(os.Getuid()), uint32(os.Getgid())
	if slices.Contains(cfg.AgentUIDs, uid) || slices.Contains(cfg.AgentGIDs, gid) {
		return nil
	}
	return fmt.Errorf("capture: this process has uid %d and gid %d, so the rules would redirect its own queries to itself: run it as a user or group of --capture-agent-uid %v or --capture-agent-gid %v",
		uid, gid, cfg.AgentUIDs, cfg.AgentGIDs)
}

// parsePrefix reads a prefix, or an address as the prefix of itself alone.
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
