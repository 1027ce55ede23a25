package iptables

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/internal/family"
)

// Config says what is captured. [DefaultConfig] is a good start: the zero value
// lacks a port and the agent's uid.
type Config struct {
	// Port is the agent's DNS port, for UDP and TCP, on 127.0.0.1 and ::1, and on the addresses of
	// VirtualInterfaces. It must be neither 0 nor 53. This package does not check that the agent listens there.
	// If the agent does not, queries are refused.
	Port uint16

	// AgentUIDs and AgentGIDs are the users and groups of the agent. Queries of sockets of these users and groups
	// are not captured, because they would come back to the agent. The exceptions are the agent's probes
	// ([ProbeHops]) and test queries ([TestAddr]), which are captured. At least one user or group is required.
	AgentUIDs, AgentGIDs []uint32

	// Servers are the nameservers to which queries are captured, such as the nameservers of resolv.conf. Queries to
	// other servers pass through. If Servers is empty, queries to any address are captured. Queries to link-local
	// IPv6 addresses always pass through ([Passes]). If a server's address names an interface ("fd00::1%eth0"),
	// queries of this host to the server are captured only if they leave through this interface.
	Servers []netip.Addr

	// ExcludeUIDs and ExcludeGIDs are users and groups whose queries pass through, such as the user of a stub
	// resolver on loopback. If its queries were captured, the agent could forward them to the same stub resolver.
	ExcludeUIDs, ExcludeGIDs []uint32
	// ExcludeCIDRs are destinations to which queries pass through.
	ExcludeCIDRs []netip.Prefix
	// ExcludeInterfaces are outgoing interfaces; queries through them pass through. A name that ends in "+" means
	// all interfaces whose names begin with the text before the "+".
	ExcludeInterfaces []string

	// VirtualInterfaces are interfaces of containers or virtual machines (docker0, k6t-eth0) whose incoming
	// queries are captured too. A "+" means the same as in ExcludeInterfaces. These queries are redirected to the
	// first address of the interface, so the agent has to listen there.
	VirtualInterfaces []string

	// VIPs are virtual addresses. If a client connects to a VIP, the agent connects it to the host that has the VIP.
	// TCP connections to VIPs are redirected to EgressPort. UDP packets are refused. If Servers is empty, queries
	// (port 53) to VIPs are captured. Otherwise packets to port 53 of VIPs are treated like packets to other ports. The
	// exclusions apply to VIPs, too. If EgressPort is 0, VIPs has no effect.
	VIPs []netip.Prefix
	// EgressPort is the agent's TCP port for VIPs, on the same addresses as Port.
	EgressPort uint16

	// Pod is true if the network namespace is a pod's. Queries that the agent sends to other hosts then skip the
	// other rules in table nat: rules of Istio's ambient mode would redirect these queries to port 15053, on which
	// ztunnel or the agent listens. Outside of pods these queries skip no rules, because a host may have DNAT rules
	// for them.
	Pod bool

	// Lease makes the rules match only for [LeaseTime] after each [Capture.Renew]. So the kernel ends the capture
	// when the agent no longer answers. Lease and FailClosed exclude each other.
	Lease bool
	// NATOnly leaves out all rules but those of table nat, and their comments: the conntrack zone, the lease, and the
	// rules that let redirected packets through the firewalls of table filter. Lease then only means that an agent sends
	// probes, so the rules redirect them.
	NATOnly bool

	// Guard bounds what programs reach; nil does not. With a Guard that enforces, FailClosed is set and Lease is not.
	Guard *Guard
	// GuardOnly leaves out all rules but those of Guard, so no query is captured.
	GuardOnly bool

	// Only is the only family whose queries are captured; 0 for both. If it is 0, a family that this machine lacks
	// is left out, and logged, as long as the other family works.
	Only family.Family
	// Backend is where the rules go; "" is Auto.
	Backend Backend
	// Interval is the pause of Keep before it repeats what has failed, and while other programs change rules all the
	// time; 0 is 5 s. Rules whose changes the kernel does not announce (legacy) are read once in twelve intervals.
	Interval time.Duration
	// Settle is how long the chains stay after the capture ends. As long as they stay, replies in flight still reach
	// the clients. Conntrack entries that such replies may need stay for the same time. Set it to a little more than
	// the longest time that the agent spends on a query; 0 is 5 s.
	Settle time.Duration
	// Patience is how long one tool may run. If a step of a removal fails for a reason that may pass, such as a lock
	// that another program holds, the step is retried for this time before its failure is reported. The retries go
	// on after the report. 0 is 15 s, which is enough to wait for the lock and for a slow name service: iptables
	// queries the name service even for a numeric uid.
	Patience time.Duration
	// ToolDir is a directory in which the tools of iptables are looked for before $PATH, /usr/sbin and
	// /sbin; "" for none.
	ToolDir string
	// FailClosed keeps the rules when Keep ends. Until an agent runs again, queries are
	// then refused. If another process, such as systemd, holds the agent's sockets,
	// queries wait there instead.
	FailClosed bool
}

// DefaultConfig returns a Config that redirects queries to any server to port 15053, except
// queries of uid and gid 1337.
func DefaultConfig() Config {
	return Config{
		Port:      15053,
		AgentUIDs: []uint32{1337},
		AgentGIDs: []uint32{1337},
		Backend:   Auto,
		Interval:  5 * time.Second,
		Settle:    5 * time.Second,
		Patience:  15 * time.Second,
	}
}

// Has reports whether queries over a family are captured.
func (c Config) Has(f family.Family) bool { return c.Only == 0 || c.Only == f }

// Families returns the families whose queries are captured.
func (c Config) Families() []family.Family {
	return slices.DeleteFunc(family.All(), func(f family.Family) bool { return !c.Has(f) })
}

// Needs reports whether f is required. IPv4 is required, and so is the family in the field Only and, with a Guard, each
// family that the kernel has. If this machine lacks a required family, the agent and the commands report a failure, even if
// the other family is captured.
func (c Config) Needs(f family.Family) bool {
	return f == family.IPv4 || c.Only == f || c.Guard != nil && !lacksFamily(f)
}

// Without returns the configuration without f. The other family must not be left out already.
func (c Config) Without(f family.Family) Config {
	c.Only = f.Other()
	return c
}

// Serves reports whether a listener at this address receives all queries of its family that the rules redirect.
// Queries of this host are redirected to loopback. Queries from a virtual interface are redirected to an address of
// that interface.
func (c Config) Serves(listener netip.AddrPort) bool {
	addr := listener.Addr()
	loopback := addr == family.Of(addr).Loopback()
	return listener.Port() == c.Port && (addr.IsUnspecified() || loopback && len(c.VirtualInterfaces) == 0)
}

// WithoutVIPs returns the configuration without the VIPs of a family. Packets to these VIPs then pass through.
func (c Config) WithoutVIPs(f family.Family) Config {
	c.VIPs = slices.DeleteFunc(slices.Clone(c.VIPs), func(p netip.Prefix) bool { return family.Of(p.Addr()) == f })
	return c
}

// vipRanges returns the VIPs of a family that are redirected.
func (c Config) vipRanges(f family.Family) (ranges []string) {
	for _, p := range c.VIPs {
		if c.EgressPort != 0 && family.Of(p.Addr()) == f {
			ranges = append(ranges, p.Masked().String())
		}
	}
	return ranges
}

// withDefaults returns c with Backend, Interval, Settle and Patience set to their defaults where they are empty, and with
// what follows from Guard.
func (c Config) withDefaults() Config {
	defaults := DefaultConfig()
	c.Backend = cmp.Or(c.Backend, defaults.Backend)
	c.Interval = cmp.Or(c.Interval, defaults.Interval)
	c.Settle = cmp.Or(c.Settle, defaults.Settle)
	c.Patience = cmp.Or(c.Patience, defaults.Patience)
	if c.Guard.Enforces() {
		c.FailClosed, c.Lease = true, false
	}
	return c
}

// validate returns an error for the first field with an invalid value. The error quotes the value and says what was
// expected.
func (c Config) validate() error {
	if c.Port == 0 || c.Port == dnsPort {
		return fmt.Errorf("capture port %d: want the agent's DNS port, not 0 and not %d", c.Port, dnsPort)
	}
	if len(c.AgentUIDs)+len(c.AgentGIDs) == 0 {
		return errors.New("capture needs the uid or gid of the agent: without one, the rules redirect the queries of the agent to itself")
	}
	for _, a := range c.Servers {
		if err := checkServer(a); err != nil {
			return err
		}
	}
	if err := cmp.Or(c.validateEgress(), c.validateGuard()); err != nil {
		return err
	}
	for _, p := range c.ExcludeCIDRs {
		if !p.IsValid() || !canonical(p.Masked().Addr()) {
			return fmt.Errorf("excluded CIDR %q: want an IPv4 or IPv6 prefix, not one with IPv4 within IPv6", p)
		}
	}
	for _, name := range slices.Concat(c.ExcludeInterfaces, c.VirtualInterfaces) {
		if err := checkInterface(name); err != nil {
			return err
		}
	}
	return c.validateModes()
}

func (c Config) validateEgress() error {
	if c.EgressPort == c.Port || c.EgressPort == dnsPort {
		return fmt.Errorf("port %d for VIPs: want another one than the agent's DNS port and %d", c.EgressPort, dnsPort)
	}
	for _, p := range c.VIPs {
		if !p.IsValid() || p.Bits() == 0 || !canonical(p.Masked().Addr()) {
			return fmt.Errorf("range of VIPs %q: want an IPv4 or IPv6 prefix, not of length 0", p)
		}
	}
	return nil
}

func (c Config) validateModes() error {
	if c.Lease && c.FailClosed {
		return errors.New("capture with both Lease and FailClosed: want at most one of them")
	}
	if !slices.Contains([]Backend{"", Auto, NFT, Legacy}, c.Backend) {
		return fmt.Errorf("iptables backend %q: want auto, nft or legacy", c.Backend)
	}
	if c.Interval < 0 || c.Settle < 0 || c.Patience < 0 {
		return fmt.Errorf("reconcile interval %v, settle time %v, patience %v: want 0 or more for all", c.Interval, c.Settle, c.Patience)
	}
	return nil
}

func checkServer(a netip.Addr) error {
	if !a.IsValid() || a.IsUnspecified() || !canonical(a) {
		return fmt.Errorf("capture server %q: want the IPv4 or IPv6 address of a server, not 0.0.0.0, :: or IPv4 within IPv6", a)
	}
	if a.Zone() != "" {
		if err := checkInterface(a.Zone()); err != nil {
			return fmt.Errorf("capture server %q: %w", a, err)
		}
	}
	return nil
}

// canonical reports whether iptables-save prints an address as netip does. iptables-save prints ::1:2 as ::0.1.0.2,
// because the address may contain an IPv4 address (RFC 4291, section 2.5.5.1, which deprecates such addresses).
func canonical(a netip.Addr) bool {
	b := a.As16()
	compatible := a.Is6() && [12]byte(b[:12]) == [12]byte{} && (b[12] != 0 || b[13] != 0)
	return !compatible && !a.Is4In6()
}

// checkInterface returns an error for a name that rules cannot have. The name must not be empty or too long for the
// kernel (dev_valid_name). iptables-restore and iptables-save must not quote or misread it, as they do with a name
// that begins with "-". A single "+" is an error because iptables-save leaves it out.
func checkInterface(name string) error {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+@"
	if name == "" || len(name) > 15 || name[0] == '-' || name == "+" || strings.Trim(name, allowed) != "" {
		return fmt.Errorf("interface %q: want 1 to 15 letters, digits and ._-@, without a - at the start; a + at the end means all names that begin with the text before it", name)
	}
	return nil
}

// Backend is one of the two implementations of iptables in the kernel. The kernel applies the rules of both, so
// nametap's rules must be in only one of them.
type Backend string

// The backends. Auto takes the only usable backend. If both are usable, it takes the one that already has rules of nametap,
// or else the one in which other programs have more rules. If that does not decide, it takes the backend that the tool named
// iptables-restore uses.
const (
	Auto   Backend = "auto"
	NFT    Backend = "nft"
	Legacy Backend = "legacy"
)

// other returns Legacy for NFT, and NFT for Legacy.
func (b Backend) other() Backend {
	if b == NFT {
		return Legacy
	}
	return NFT
}
