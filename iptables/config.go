package iptables

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Backend is one of the two implementations of iptables in the kernel. Rules of
// both are effective at once, so ours must be in one of them only.
type Backend string

// The backends. Auto takes the only one that works; of two, the one in which other
// programs have more rules; else the one that holds ours already; else that of the
// plain iptables-restore.
const (
	Auto   Backend = "auto"
	NFT    Backend = "nft"
	Legacy Backend = "legacy"
)

// other returns the backend that b is not; b is NFT or Legacy.
func (b Backend) other() Backend {
	if b == NFT {
		return Legacy
	}
	return NFT
}

// MarshalText returns what UnmarshalText reads.
func (b Backend) MarshalText() ([]byte, error) { return []byte(b), nil }

// UnmarshalText reads "auto", "nft" or "legacy". The error says what was expected; the
// caller names the setting and its value.
func (b *Backend) UnmarshalText(text []byte) error {
	switch v := Backend(text); v {
	case Auto, NFT, Legacy:
		*b = v
		return nil
	}
	return errors.New("want auto, nft or legacy")
}

// Family is an IP version.
type Family int

// The families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// FamilyOf returns the family of an address.
func FamilyOf(addr netip.Addr) Family {
	if addr.Is4() {
		return IPv4
	}
	return IPv6
}

// String returns "IPv4" or "IPv6".
func (f Family) String() string { return fmt.Sprintf("IPv%d", int(f)) }

// MarshalText writes f as String does.
func (f Family) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText reads what MarshalText wrote.
func (f *Family) UnmarshalText(text []byte) error {
	for _, family := range families() {
		if string(text) == family.String() {
			*f = family
			return nil
		}
	}
	return fmt.Errorf("family %q: want %s or %s", text, IPv4, IPv6)
}

// families returns both, in the order in which they are applied.
func families() []Family { return []Family{IPv4, IPv6} }

// other returns the family that f is not.
func (f Family) other() Family {
	if f == IPv4 {
		return IPv6
	}
	return IPv4
}

// Choice says whether something is wanted.
type Choice string

// The values of a Choice. IfAvailable does without, and says so.
const (
	IfAvailable Choice = "auto"
	On          Choice = "on"
	Off         Choice = "off"
)

// MarshalText returns what UnmarshalText reads.
func (c Choice) MarshalText() ([]byte, error) { return []byte(c), nil }

// UnmarshalText reads "auto", "on" or "off". The error says what was expected; the caller
// names the setting and its value.
func (c *Choice) UnmarshalText(text []byte) error {
	switch v := Choice(text); v {
	case IfAvailable, On, Off:
		*c = v
		return nil
	}
	return errors.New("want auto, on or off")
}

// Config says what is captured. [DefaultConfig] is a good start: the zero value
// lacks a port and the agent's uid.
type Config struct {
	// Port is the agent's DNS port, for UDP and TCP, on 127.0.0.1 and ::1, and
	// on the addresses of VirtualInterfaces. Not 0 and not 53. Nobody asks here
	// whether the agent listens there: without it, queries are refused.
	Port uint16

	// AgentUIDs and AgentGIDs are what the agent runs as: queries of a socket
	// with one of them are never captured, or they would come back to it. There
	// must be at least one.
	AgentUIDs, AgentGIDs []uint32

	// Servers are the nameservers whose queries are captured, resolv.conf's for
	// example; queries to others pass. Empty captures queries to any address. A
	// zone ("fe80::1%eth0") limits that server to this outgoing interface.
	Servers []netip.Addr

	// ExcludeUIDs and ExcludeGIDs are users whose queries pass: that of a
	// stub resolver on loopback, which would ask itself through us.
	ExcludeUIDs, ExcludeGIDs []uint32
	// ExcludeCIDRs are destinations to which queries pass.
	ExcludeCIDRs []netip.Prefix
	// ExcludeInterfaces are outgoing interfaces through which queries pass; a
	// name that ends in "+" stands for all that begin so.
	ExcludeInterfaces []string
	// ExcludeSourcePorts are ports from which queries pass, for a resolver
	// that sends from a fixed one.
	ExcludeSourcePorts []uint16

	// VirtualInterfaces are interfaces behind which are containers or virtual
	// machines whose queries are captured too, as they come in (docker0,
	// k6t-eth0); "+" as above. The redirection goes to the interface's first
	// address, so the agent has to listen there.
	VirtualInterfaces []string

	// Zone is the conntrack zone of captured UDP queries; 0 is none. Without it
	// an application and the agent that use the same source port take each
	// other's path.
	Zone uint16
	// NoComments leaves out the comments that say what each rule is for.
	NoComments bool

	// IPv4 and IPv6 say whether queries over these are captured. With IfAvailable
	// (or "") a family that this machine lacks is left out, as long as the other
	// one works. They are not both Off.
	IPv4, IPv6 Choice
	// Backend is where the rules go; "" is Auto.
	Backend Backend
	// Interval is how often Run looks for drift; 0 is 5 s.
	Interval time.Duration
	// Settle is how long a query may take that was asked before rules were put in
	// or removed: the agent's whole time for one, and a little more; 0 is 5 s.
	Settle time.Duration
	// FailClosed leaves the rules in when Keep ends, so that queries are refused, or
	// wait in open sockets, until there is an agent again.
	FailClosed bool
}

// Family returns the choice for a family.
func (c Config) Family(f Family) Choice {
	if f == IPv4 {
		return c.IPv4
	}
	return c.IPv6
}

// Without returns the configuration without a family.
func (c Config) Without(f Family) Config {
	if f == IPv4 {
		c.IPv4 = Off
	} else {
		c.IPv6 = Off
	}
	return c
}

// Serves reports whether a listener at an address receives the queries of its family that
// the rules redirect: to loopback, or with virtual interfaces to the addresses of these,
// too.
func (c Config) Serves(listener netip.AddrPort) bool {
	addr := listener.Addr()
	loopback := addr == netip.AddrFrom4([4]byte{127, 0, 0, 1}) || addr == netip.IPv6Loopback()
	return listener.Port() == c.Port && (addr.IsUnspecified() || loopback && len(c.VirtualInterfaces) == 0)
}

// withDefaults returns c with defaults for what is not set and has one.
func (c Config) withDefaults() Config {
	defaults := DefaultConfig()
	c.Backend = cmp.Or(c.Backend, defaults.Backend)
	c.Interval = cmp.Or(c.Interval, defaults.Interval)
	c.Settle = cmp.Or(c.Settle, defaults.Settle)
	return c
}

// DefaultConfig captures the queries of everybody but uid and gid 1337, to any
// server, and gives them to port 15053.
func DefaultConfig() Config {
	return Config{
		Port:      15053,
		AgentUIDs: []uint32{1337},
		AgentGIDs: []uint32{1337},
		Zone:      53,
		IPv4:      IfAvailable,
		IPv6:      IfAvailable,
		Backend:   Auto,
		Interval:  5 * time.Second,
		Settle:    5 * time.Second,
	}
}

// validate returns the first thing about c that makes no rule, with the value
// and what was expected.
func (c Config) validate() error {
	if c.Port == 0 || c.Port == dnsPort {
		return fmt.Errorf("capture port %d: want the agent's DNS port, not 0 and not %d", c.Port, dnsPort)
	}
	if len(c.AgentUIDs)+len(c.AgentGIDs) == 0 {
		return errors.New("capture needs the agent's uid or gid, or its own queries would come back to it")
	}
	for _, a := range c.Servers {
		if err := checkServer(a); err != nil {
			return err
		}
	}
	for _, p := range c.ExcludeCIDRs {
		if !p.IsValid() || !plain(p.Masked().Addr()) {
			return fmt.Errorf("excluded CIDR %q: want an IPv4 or IPv6 prefix, not one with IPv4 within IPv6", p)
		}
	}
	for _, p := range c.ExcludeSourcePorts {
		if p == 0 {
			return errors.New("excluded source port 0: want 1 to 65535")
		}
	}
	for _, name := range slices.Concat(c.ExcludeInterfaces, c.VirtualInterfaces) {
		if err := checkInterface(name); err != nil {
			return err
		}
	}
	return c.validateModes()
}

func (c Config) validateModes() error {
	for _, f := range families() {
		if err := new(Choice).UnmarshalText([]byte(c.Family(f))); c.Family(f) != "" && err != nil {
			return fmt.Errorf("capture of %s %q: %w", f, c.Family(f), err)
		}
	}
	if c.IPv4 == Off && c.IPv6 == Off {
		return errors.New("capture of neither IPv4 nor IPv6: want one of them at least")
	}
	if err := new(Backend).UnmarshalText([]byte(c.Backend)); c.Backend != "" && err != nil {
		return fmt.Errorf("iptables backend %q: %w", c.Backend, err)
	}
	if c.Interval < 0 || c.Settle < 0 {
		return fmt.Errorf("reconcile interval %v, settle time %v: want none below 0", c.Interval, c.Settle)
	}
	return nil
}

func checkServer(a netip.Addr) error {
	if !a.IsValid() || a.IsUnspecified() || !plain(a) {
		return fmt.Errorf("capture server %q: want an IPv4 or IPv6 address, not IPv4 within IPv6", a)
	}
	if a.Zone() != "" {
		if err := checkInterface(a.Zone()); err != nil {
			return fmt.Errorf("capture server %q: %w", a, err)
		}
	}
	return nil
}

// plain says whether an address is printed by iptables-save as we print it. It
// writes ::1:2 as ::0.1.0.2, since that may be IPv4 (RFC 4291, section 2.5.5.1,
// which deprecates such addresses).
func plain(a netip.Addr) bool {
	b := a.As16()
	compatible := a.Is6() && [12]byte(b[:12]) == [12]byte{} && (b[12] != 0 || b[13] != 0)
	return !compatible && !a.Is4In6()
}

// checkInterface refuses what is no name of an interface for the kernel
// (dev_valid_name), what iptables-restore or iptables-save would quote, and a
// single "+", which iptables-save leaves out.
func checkInterface(name string) error {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+@"
	if name == "" || len(name) > 15 || name[0] == '-' || name == "+" || strings.Trim(name, plain) != "" {
		return fmt.Errorf("interface %q: want 1 to 15 letters, digits and ._-@, with + at the end for all that begin so", name)
	}
	return nil
}
