package dnsproxy

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/listen"
)

// The defaults of a Config, used for zero values.
const (
	defaultAddr        = "localhost:15053"
	defaultDomain      = "cluster.local"
	defaultTTL         = 30 * time.Second
	defaultMaxTCPConns = 1000
)

// DefaultEDNSUDPSize is the default of Config.EDNSUDPSize, in bytes. It fits an IPv6 packet
// everywhere (DNS flag day 2020).
const DefaultEDNSUDPSize = 1232

// A Config configures a [Server]. The zero value of a field means the default named in its
// comment.
type Config struct {
	// Addr is the host:port to listen on, over UDP and TCP. The host is an IP address, "localhost" (127.0.0.1 and ::1)
	// or empty (all addresses, both families). For port 0 the kernel chooses a free port. Default localhost:15053.
	Addr string
	// Inherited has sockets that another process holds. The server serves those on the port of Addr. Default none.
	Inherited *listen.Inherited
	// Namespace is the clients' namespace, in which short names of one label are found.
	// Default none.
	Namespace string
	// Domain is the cluster domain, with or without "namespace.svc." before it.
	// Default cluster.local.
	Domain string
	// Forward configures what happens to queries that the table does not answer. The fields
	// Logger, Registerer, OwnDomains and OwnTTL of Forward are not used: those of this Config take their place. The
	// search list of Forward.ResolvConf is also used for mesh names.
	Forward forward.Config
	// Bypass lists suffixes. Names below them are forwarded as if the table had no hosts there. A longer suffix in
	// LocalOnly takes precedence. Default none.
	Bypass []string
	// LocalOnly lists suffixes. Names below them are never forwarded; if the table does not have such a name, the
	// answer is NXDOMAIN. Default none.
	LocalOnly []string
	// TTL is the TTL of the records of mesh names, 1 s to about 68 years, in whole
	// seconds. Default 30 s.
	TTL time.Duration
	// EDNSUDPSize bounds the length of a UDP response in bytes, 512 to 65534.
	// Default 1232.
	EDNSUDPSize int
	// MaxTCPConns is the largest number of client connections that all listeners together keep open. It must be at
	// least 1. If there are that many, a new connection replaces another one (package connlimit). The server
	// never keeps more connections open than half of the process's limit of open files. Default 1,000.
	MaxTCPConns int
	// BeforeSync says how queries are answered before the first table. Default forward.
	BeforeSync BeforeSync
	// NAT64 reports whether AAAA queries for hosts that have IPv4 addresses only are answered with the addresses of the
	// network's NAT64, if nameservers show one. After again, NAT64 is called and nameservers are asked again. Default
	// none: there is no such answer.
	NAT64 func() (again time.Duration, useful bool)
	// Guard has the policy about the names that nameservers may be asked for. Default none: they may be asked for all.
	Guard *guard.Guard
	// Version and ID are the answers to queries for version.bind and id.server (RFC 4892). Default none: such queries
	// are REFUSED.
	Version, ID string
	// Logger logs what operators should know. Default slog.Default().
	Logger *slog.Logger
	// Registerer registers the metrics. Default none.
	Registerer prometheus.Registerer
}

// A BeforeSync says how queries are answered before the first table.
type BeforeSync string

// The values of BeforeSync.
const (
	// BeforeSyncForward holds queries for names below the cluster domain, and for local-only names, for up to 2 s, but not
	// later than 10 s after the start, and then answers SERVFAIL. It forwards all other queries. It is the default.
	BeforeSyncForward BeforeSync = "forward"
	// BeforeSyncHold holds every query so, and then answers SERVFAIL.
	BeforeSyncHold BeforeSync = "hold"
	// BeforeSyncServfail answers SERVFAIL at once.
	BeforeSyncServfail BeforeSync = "servfail"
)

// BeforeSyncs returns the values of BeforeSync.
func BeforeSyncs() []BeforeSync {
	return []BeforeSync{BeforeSyncForward, BeforeSyncHold, BeforeSyncServfail}
}

// DefaultConfig returns the Config that the zero value stands for.
func DefaultConfig() Config {
	var c Config
	c.setDefaults()
	return c
}

// configNames has the domain names of a Config, in wire form.
type configNames struct {
	cluster  table.Cluster
	suffixes table.Suffixes
}

func (c *Config) setDefaults() {
	c.Addr = cmp.Or(c.Addr, defaultAddr)
	c.Domain = cmp.Or(c.Domain, defaultDomain)
	c.TTL = cmp.Or(c.TTL, defaultTTL)
	c.EDNSUDPSize = cmp.Or(c.EDNSUDPSize, DefaultEDNSUDPSize)
	c.MaxTCPConns = cmp.Or(c.MaxTCPConns, defaultMaxTCPConns)
	c.BeforeSync = cmp.Or(c.BeforeSync, BeforeSyncForward)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	c.Forward.Logger, c.Forward.Registerer = c.Logger, c.Registerer
	c.Forward.SetDefaults()
}

// Validate returns the error that [New] returns if a setting is wrong.
func (c Config) Validate() error {
	c.setDefaults()
	_, err := c.check()
	return err
}

// check returns the names of c, or an error if a setting is wrong. It sets what Forward needs of the other settings. The
// defaults of c must be set.
func (c *Config) check() (names configNames, err error) {
	_, _, addrErr := listen.SplitAddr(addrSetting, c.Addr)
	names.cluster, err = table.NewCluster(c.Namespace, c.Domain)
	if err == nil {
		c.Forward.OwnDomains, c.Forward.OwnTTL = names.cluster.Zones(), c.TTL
		if _, ok := soaMailbox.Join(names.cluster.Domain); !ok { // the longest name in an SOA record
			err = fmt.Errorf("domain %q: %w", c.Domain, wire.ErrLongName)
		}
	}
	var bypassErr, localErr error
	names.suffixes.Bypass, bypassErr = table.ParseSuffixes("bypass", c.Bypass)
	names.suffixes.LocalOnly, localErr = table.ParseSuffixes("local-only", c.LocalOnly)
	return names, errors.Join(addrErr, c.validate(), c.Forward.Validate(), err, bypassErr, localErr)
}

func (c *Config) validate() error {
	const maxTTL = (1<<31 - 1) * time.Second // RFC 2181, section 8
	switch {
	case c.TTL < time.Second || c.TTL > maxTTL:
		return fmt.Errorf("TTL %s: want 1s to %s", c.TTL, maxTTL)
	case c.EDNSUDPSize < dns.MinMsgSize || c.EDNSUDPSize > dns.MaxMsgSize-1:
		return fmt.Errorf("EDNS UDP size %d: want %d to %d bytes", c.EDNSUDPSize, dns.MinMsgSize, dns.MaxMsgSize-1)
	case c.MaxTCPConns < 1:
		return fmt.Errorf("limit of %d TCP connections: want 1 or more", c.MaxTCPConns)
	case !slices.Contains(BeforeSyncs(), c.BeforeSync):
		return fmt.Errorf("before-sync %q: want one of %q", c.BeforeSync, BeforeSyncs())
	}
	return nil
}
