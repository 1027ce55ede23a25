package dnsproxy

import (
	"encoding"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/dnsproxy/upstream"
)

// The defaults of a Config, used for zero values.
const (
	DefaultAddr            = "localhost:15053"
	DefaultDomain          = "cluster.local"
	DefaultResolvConf      = resolvconf.DefaultPath
	DefaultTTL             = 30 * time.Second
	DefaultEDNSUDPSize     = 1232 // bytes; fits an IPv6 packet everywhere (DNS flag day 2020)
	DefaultMaxTCPConns     = 1000
	DefaultMaxInflight     = 10_000
	DefaultUpstreamTimeout = 4 * time.Second
	DefaultCacheSize       = 8 << 20 // bytes; some 20,000 replies
	DefaultServeStale      = 24 * time.Hour
	DefaultMaxTTL          = cache.DefaultMaxTTL
	DefaultMaxNegativeTTL  = cache.DefaultMaxNegativeTTL
)

// A Config says how a [Server] listens and answers. The zero value of a field
// means the default that it names.
type Config struct {
	// Addr is the host:port to listen on, UDP and TCP. The host is an IP address,
	// "localhost" (127.0.0.1 and ::1) or empty (all addresses, both families).
	// Port 0 takes a free one. Default localhost:15053.
	Addr string
	// Sockets are open already, by a service manager that keeps them while we are not
	// there: UDP, and TCP that listens, all on the port of Addr, in whose place they are
	// served. Run closes them. Default none.
	Sockets []*os.File
	// OpenOthers has those sockets of Addr opened that are not among Sockets, as if there
	// were no Sockets. Default false: what a service manager leaves out is not wanted.
	OpenOthers bool
	// Namespace is the client's own, in which short names of one label answer.
	// Default none.
	Namespace string
	// Domain is the cluster domain, with or without "namespace.svc." before it.
	// Default cluster.local.
	Domain string
	// ResolvConf is the path of the resolv.conf(5) that gives the search list, the
	// nameservers and their options. Changes are in use within a second. Default
	// /etc/resolv.conf.
	ResolvConf string
	// Upstreams replace the nameservers of ResolvConf. Default those.
	Upstreams []upstream.Spec
	// Routes send suffixes to nameservers of their own; of several that a name is
	// below, the longest. Default none.
	Routes []Route
	// Bypass are suffixes whose names are forwarded as if the table had no hosts below
	// them. Where LocalOnly has a longer suffix, that decides. Default none.
	Bypass []string
	// LocalOnly are suffixes whose names are never forwarded: what the table does
	// not have is NXDOMAIN. Default none.
	LocalOnly []string
	// Autopath says for which names the search list is walked on the client's
	// behalf. Default mesh.
	Autopath Autopath
	// TTL of the records that we make, 1 s to about 68 years, in whole seconds.
	// Default 30 s.
	TTL time.Duration
	// EDNSUDPSize is the longest UDP response in bytes, 512 to 65534. Default 1232.
	EDNSUDPSize int
	// MaxTCPConns bounds the open client connections of all listeners together, 1 or
	// more. At the bound the connection that has been idle for longest makes room for a
	// new one. Half of the descriptors that the process may have are the bound, if that
	// is less. Default 1,000.
	MaxTCPConns int
	// MaxInflight bounds the queries that wait for a nameserver or for the first
	// table; beyond it they get SERVFAIL at once. One domain has at most half of it.
	// 1 or more, default 10,000.
	MaxInflight int
	// UpstreamTimeout bounds a forwarded query over all nameservers. Default 4 s,
	// below the 5 s after which glibc gives a server up.
	UpstreamTimeout time.Duration
	// Order says which nameserver is asked first. Default strict.
	Order Order
	// Parallel asks all nameservers at once instead of one after the other; the order
	// is of no account then.
	Parallel bool
	// UpstreamRootCA is a PEM file with the root certificates of TLS nameservers, which is
	// read for every new connection. Default those of the system.
	UpstreamRootCA string
	// MixCase sends questions in random case, which a forger has to guess as well
	// (draft-vixie-dnsext-dns0x20).
	MixCase bool
	// OriginalDestination forwards captured queries that were on their way to a
	// nameserver that ResolvConf does not name to just that. For UDP it takes
	// CAP_NET_ADMIN; without, that is logged and done without.
	OriginalDestination bool
	// CacheSize bounds the replies that are kept, in bytes with all they need; less
	// than 0 is no cache. Default 8 MiB.
	CacheSize int
	// CacheMaxTTL and CacheMaxNegativeTTL bound for how long answers are kept, and the TTLs
	// of those that are given from the cache: positive ones, and those that say that there
	// is nothing. Default 7 days and 3 h.
	CacheMaxTTL, CacheMaxNegativeTTL time.Duration
	// ServeStale is for how long a reply that has expired may be given if no
	// nameserver answers; less than 0 is never. Default 24 h.
	ServeStale time.Duration
	// BeforeSync says what is answered before the first table. Default forward.
	BeforeSync BeforeSync
	// Version and ID answer version.bind and id.server. Default none: refused.
	Version, ID string
	// Logger takes what an operator should know. Default slog's.
	Logger *slog.Logger
	// Registerer takes the metrics. Default none.
	Registerer prometheus.Registerer
}

// BeforeSync says what happens to queries before the first table.
type BeforeSync string

// The values of BeforeSync.
const (
	// BeforeSyncForward forwards what is not below the cluster domain and holds
	// the rest for up to 2 s, then SERVFAIL. It is the zero value's meaning.
	BeforeSyncForward BeforeSync = "forward"
	// BeforeSyncHold holds every query for up to 2 s, then SERVFAIL.
	BeforeSyncHold BeforeSync = "hold"
	// BeforeSyncServfail answers SERVFAIL at once.
	BeforeSyncServfail BeforeSync = "servfail"
)

// MarshalText returns what UnmarshalText reads.
func (b BeforeSync) MarshalText() ([]byte, error) { return []byte(b), nil }

// UnmarshalText reads one of the values. The error says what was expected; the caller
// names the setting and its value.
func (b *BeforeSync) UnmarshalText(text []byte) error {
	switch v := BeforeSync(text); v {
	case BeforeSyncForward, BeforeSyncHold, BeforeSyncServfail:
		*b = v
		return nil
	}
	return fmt.Errorf("want %s, %s or %s", BeforeSyncForward, BeforeSyncHold, BeforeSyncServfail)
}

// Autopath says for which names the search list is walked on the client's behalf.
type Autopath string

// The values of Autopath.
const (
	// AutopathMesh is for names of the table. It is the zero value's meaning.
	AutopathMesh Autopath = "mesh"
	// AutopathAll is for names of nameservers as well.
	AutopathAll Autopath = "all"
	// AutopathOff leaves the search list to the clients.
	AutopathOff Autopath = "off"
)

// MarshalText returns what UnmarshalText reads.
func (a Autopath) MarshalText() ([]byte, error) { return []byte(a), nil }

// UnmarshalText reads one of the values. The error says what was expected; the caller
// names the setting and its value.
func (a *Autopath) UnmarshalText(text []byte) error {
	switch v := Autopath(text); v {
	case AutopathMesh, AutopathAll, AutopathOff:
		*a = v
		return nil
	}
	return fmt.Errorf("want %s, %s or %s", AutopathMesh, AutopathAll, AutopathOff)
}

// Order says which of several nameservers is asked first.
type Order string

// The values of Order.
const (
	// OrderStrict asks the first one that answers, in the order of resolv.conf or of
	// the settings. The next one is asked too when it is late, but only the former may
	// say that there is nothing. It is the zero value's meaning.
	OrderStrict Order = "strict"
	// OrderFastest asks the fastest one, and takes the first answer.
	OrderFastest Order = "fastest"
)

// MarshalText returns what UnmarshalText reads.
func (o Order) MarshalText() ([]byte, error) { return []byte(o), nil }

// UnmarshalText reads one of the values. The error says what was expected; the caller
// names the setting and its value.
func (o *Order) UnmarshalText(text []byte) error {
	switch v := Order(text); v {
	case OrderStrict, OrderFastest:
		*o = v
		return nil
	}
	return fmt.Errorf("want %s or %s", OrderStrict, OrderFastest)
}

// A Route sends the names of a suffix to nameservers of their own.
type Route struct {
	// Suffix is a domain name; the route is for it and all names below it.
	Suffix string
	// Servers are asked, at least one.
	Servers []upstream.Spec
}

// DefaultConfig returns the Config that the zero value stands for.
func DefaultConfig() Config {
	var c Config
	c.setDefaults()
	return c
}

func (c *Config) setDefaults() {
	setDefault(&c.Addr, DefaultAddr)
	setDefault(&c.Domain, DefaultDomain)
	setDefault(&c.ResolvConf, DefaultResolvConf)
	setDefault(&c.TTL, DefaultTTL)
	setDefault(&c.EDNSUDPSize, DefaultEDNSUDPSize)
	setDefault(&c.MaxTCPConns, DefaultMaxTCPConns)
	setDefault(&c.MaxInflight, DefaultMaxInflight)
	setDefault(&c.UpstreamTimeout, DefaultUpstreamTimeout)
	setDefault(&c.BeforeSync, BeforeSyncForward)
	setDefault(&c.Autopath, AutopathMesh)
	setDefault(&c.Order, OrderStrict)
	setDefault(&c.CacheSize, DefaultCacheSize)
	setDefault(&c.CacheMaxTTL, DefaultMaxTTL)
	setDefault(&c.CacheMaxNegativeTTL, DefaultMaxNegativeTTL)
	setDefault(&c.ServeStale, DefaultServeStale)
	setDefault(&c.Logger, slog.Default())
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func (c *Config) validate() error {
	const maxTTL = (1<<31 - 1) * time.Second // RFC 2181, section 8
	switch {
	case c.TTL < time.Second || c.TTL > maxTTL:
		return fmt.Errorf("TTL %s: want 1s to %s", c.TTL, maxTTL)
	case c.EDNSUDPSize < dns.MinMsgSize || c.EDNSUDPSize > dns.MaxMsgSize-1:
		return fmt.Errorf("EDNS UDP size %d: want %d to %d bytes", c.EDNSUDPSize, dns.MinMsgSize, dns.MaxMsgSize-1)
	case c.MaxTCPConns < 1:
		return fmt.Errorf("at most %d TCP connections: want 1 or more", c.MaxTCPConns)
	case c.MaxInflight < 1:
		return fmt.Errorf("at most %d forwarded queries: want 1 or more", c.MaxInflight)
	case c.CacheMaxTTL < time.Second || c.CacheMaxTTL > maxTTL:
		return fmt.Errorf("longest TTL in the cache %s: want 1s to %s", c.CacheMaxTTL, maxTTL)
	case c.CacheMaxNegativeTTL < time.Second || c.CacheMaxNegativeTTL > maxTTL:
		return fmt.Errorf("longest negative TTL in the cache %s: want 1s to %s", c.CacheMaxNegativeTTL, maxTTL)
	case c.UpstreamTimeout < 0:
		return fmt.Errorf("upstream time-out %s: want more than 0", c.UpstreamTimeout)
	}
	for _, r := range c.Routes {
		if len(r.Servers) == 0 {
			return fmt.Errorf("route for %q: want a nameserver", r.Suffix)
		}
	}
	return errors.Join(
		checkText("before-sync", &c.BeforeSync),
		checkText("autopath", &c.Autopath),
		checkText("upstream-order", &c.Order),
	)
}

// A textValue is one of a few texts.
type textValue interface {
	encoding.TextMarshaler
	encoding.TextUnmarshaler
}

// checkText returns an error that names the setting unless v is one of its values.
func checkText(setting string, v textValue) error {
	text, err := v.MarshalText()
	if err == nil {
		err = v.UnmarshalText(text)
	}
	if err != nil {
		return fmt.Errorf("%s %q: %w", setting, text, err)
	}
	return nil
}
