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

// A Config configures a [Server]. The zero value of a field means the default named in its
// comment.
type Config struct {
	// Addr is the host:port to listen on, UDP and TCP. The host is an IP address,
	// "localhost" (127.0.0.1 and ::1) or empty (all addresses, both families).
	// Port 0 takes a free one. Default localhost:15053.
	Addr string
	// Sockets are served instead of opening Addr: UDP sockets and listening TCP sockets,
	// all on the port of Addr, that a service manager keeps open across restarts. Run
	// closes them. Default none.
	Sockets []*os.File
	// OpenOthers also opens the sockets of Addr that are not among Sockets. Default false:
	// a service manager leaves out what is not wanted.
	OpenOthers bool
	// Namespace is the clients' namespace, in which short names of one label are found.
	// Default none.
	Namespace string
	// Domain is the cluster domain, with or without "namespace.svc." before it.
	// Default cluster.local.
	Domain string
	// ResolvConf is the path of the resolv.conf(5) that gives the search list, the
	// nameservers and their options. Changes take effect within a second. Default
	// /etc/resolv.conf.
	ResolvConf string
	// Upstreams replaces the nameservers of ResolvConf. Default none.
	Upstreams []upstream.Spec
	// Routes sends queries for names below a suffix to other nameservers; the longest
	// suffix wins. Default none.
	Routes []Route
	// Bypass lists suffixes whose names are forwarded as if the table had no hosts below
	// them. A longer suffix in LocalOnly wins. Default none.
	Bypass []string
	// LocalOnly lists suffixes whose names are never forwarded: a name that the table does
	// not have is NXDOMAIN. Default none.
	LocalOnly []string
	// Autopath says for which names nametap walks the search list on behalf of the client.
	// Default mesh.
	Autopath Autopath
	// TTL is that of the records of mesh names, 1 s to about 68 years, in whole seconds.
	// Default 30 s.
	TTL time.Duration
	// EDNSUDPSize is the length of the longest UDP response in bytes, 512 to 65534.
	// Default 1232.
	EDNSUDPSize int
	// MaxTCPConns bounds the client connections of all listeners together, 1 or more. At
	// the bound, a new connection replaces the one that has been idle the longest. The
	// bound is at most half of the process's limit of open files. Default 1,000.
	MaxTCPConns int
	// MaxInflight bounds the queries that wait for a nameserver or for the first table, 1
	// or more; further ones get SERVFAIL at once. One domain gets at most half of it.
	// Default 10,000.
	MaxInflight int
	// UpstreamTimeout bounds the time of a forwarded query, over all nameservers. Default
	// 4 s, less than the 5 s after which glibc tries the next server.
	UpstreamTimeout time.Duration
	// Order says which nameserver is queried first. Default strict.
	Order Order
	// Parallel queries all nameservers at once and ignores Order.
	Parallel bool
	// UpstreamRootCA is the path of a PEM file with the root certificates of TLS
	// nameservers, read for every new connection. Default the system's certificates.
	UpstreamRootCA string
	// MixCase sends questions in random case, which makes replies harder to forge
	// (draft-vixie-dnsext-dns0x20).
	MixCase bool
	// OriginalDestination forwards a captured query to the nameserver it was sent to, if
	// ResolvConf does not name that one. For UDP this needs CAP_NET_ADMIN; without it,
	// the Server logs that and forwards UDP queries as if they were not captured.
	OriginalDestination bool
	// CacheSize bounds the memory of the cache in bytes; negative disables the cache.
	// Default 8 MiB.
	CacheSize int
	// CacheMaxTTL and CacheMaxNegativeTTL bound how long positive and negative answers are
	// cached, and their TTLs when they are answered from the cache. Default 7 days and 3 h.
	CacheMaxTTL, CacheMaxNegativeTTL time.Duration
	// ServeStale is how long after its expiry a cached reply may be used if no nameserver
	// answers; negative means never. Default 24 h.
	ServeStale time.Duration
	// BeforeSync says how queries are answered before the first table. Default forward.
	BeforeSync BeforeSync
	// Version and ID are the answers for version.bind and id.server (RFC 4892). Default
	// none: REFUSED.
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
	// BeforeSyncForward holds names below the cluster domain for up to 2 s, then answers
	// SERVFAIL, and forwards all others. It is the default.
	BeforeSyncForward BeforeSync = "forward"
	// BeforeSyncHold holds every query for up to 2 s, then answers SERVFAIL.
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

// An Autopath says for which names nametap walks the search list on behalf of the client.
type Autopath string

// The values of Autopath.
const (
	// AutopathMesh means mesh names. It is the default.
	AutopathMesh Autopath = "mesh"
	// AutopathAll means forwarded names, too.
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

// An Order says which of several nameservers is queried first.
type Order string

// The values of Order.
const (
	// OrderStrict queries them in the order of resolv.conf or of the settings. When one is
	// late the next is queried, too, but a negative answer of the first one wins. It is the
	// default.
	OrderStrict Order = "strict"
	// OrderFastest queries the fastest one, and takes the first answer.
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

// A Route sends queries for the names of a suffix to other nameservers.
type Route struct {
	// Suffix is a domain name; the route applies to it and all names below it.
	Suffix string
	// Servers are those nameservers, at least one.
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
		return fmt.Errorf("limit of %d TCP connections: want 1 or more", c.MaxTCPConns)
	case c.MaxInflight < 1:
		return fmt.Errorf("limit of %d queries in flight: want 1 or more", c.MaxInflight)
	case c.CacheMaxTTL < time.Second || c.CacheMaxTTL > maxTTL:
		return fmt.Errorf("maximum TTL in the cache %s: want 1s to %s", c.CacheMaxTTL, maxTTL)
	case c.CacheMaxNegativeTTL < time.Second || c.CacheMaxNegativeTTL > maxTTL:
		return fmt.Errorf("maximum negative TTL in the cache %s: want 1s to %s", c.CacheMaxNegativeTTL, maxTTL)
	case c.UpstreamTimeout < 0:
		return fmt.Errorf("upstream timeout %s: want more than 0", c.UpstreamTimeout)
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
