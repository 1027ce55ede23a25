package forward

import (
	"cmp"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clock"
)

// The defaults of a Config, used for zero values.
const (
	defaultMaxInflight = 10_000
	defaultCacheSize   = 8 << 20 // bytes; about 20,000 replies
	defaultServeStale  = 24 * time.Hour
)

// A Config configures a [Forwarder]. The zero value of a field means the default named in
// its comment.
type Config struct {
	// ResolvConf is the path of the resolv.conf(5) that gives the search list, the
	// nameservers and their options. Changes take effect within a second. Default
	// /etc/resolv.conf.
	ResolvConf string
	// Upstreams replaces the nameservers of ResolvConf. Default none.
	Upstreams []upstream.Spec
	// Routes sends queries for names below some suffixes to other nameservers. If a name has several of these
	// suffixes, the longest one decides. Default none.
	Routes []Route
	// Order says which nameserver is queried first. Default strict.
	Order Order
	// RootCA is the path of a PEM file with the root certificates of TLS nameservers. It is read
	// for every new connection. By default, the system's certificates are used.
	RootCA string
	// Timeout bounds the time of a forwarded query, however many nameservers are asked. Default 4 s, which is less
	// than the 5 s after which glibc tries the next server.
	Timeout time.Duration
	// MaxInflight bounds the number of queries that wait for a nameserver or for the first table. It must be 1
	// or more. If that many wait, a further query takes the place of the oldest question in flight, which ends with
	// SERVFAIL or a stale answer. Default 10,000.
	MaxInflight int
	// CacheSize bounds the memory of the cache in bytes; negative disables the cache.
	// Default 8 MiB.
	CacheSize int
	// ServeStale is how long after its expiry a cached reply may be used if no nameserver
	// answers; negative means never. Default 24 h.
	ServeStale time.Duration
	// OwnDomains are domains whose names may become mesh names at any time. TTLs of records in replies about names
	// at or below them are at most OwnTTL, and so is the time for which such replies are cached. Default none.
	OwnDomains []wire.Name
	OwnTTL     time.Duration
	// Control is called for each socket to a nameserver before the socket is connected, like
	// the Control function of a net.Dialer. Default none.
	Control func(network, address string, conn syscall.RawConn) error
	// Clock tells the age of cached replies and of sockets. Default clock.New().
	Clock *clock.Clock
	// AddressesChanged receives a value when addresses of this host may have changed. If it is nil, changes
	// take effect after up to 10 s.
	AddressesChanged <-chan struct{}
	// Flushed is called after replies were removed from the cache, as when nameservers have changed. Default none.
	Flushed func()
	// Logger logs what operators should know. Default slog.Default().
	Logger *slog.Logger
	// Registerer registers the metrics. Default none.
	Registerer prometheus.Registerer
}

// SetDefaults replaces zero values by the defaults.
func (c *Config) SetDefaults() {
	c.ResolvConf = cmp.Or(c.ResolvConf, resolvconf.DefaultPath)
	c.Order = cmp.Or(c.Order, OrderStrict)
	c.Timeout = cmp.Or(c.Timeout, 4*time.Second)
	c.MaxInflight = cmp.Or(c.MaxInflight, defaultMaxInflight)
	c.CacheSize = cmp.Or(c.CacheSize, defaultCacheSize)
	c.ServeStale = cmp.Or(c.ServeStale, defaultServeStale)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.Clock == nil {
		c.Clock = clock.New()
	}
}

// Validate returns the error that [New] returns if a setting is wrong.
func (c Config) Validate() error {
	c.SetDefaults()
	switch {
	case c.MaxInflight < 1:
		return fmt.Errorf("limit of %d queries in flight: want 1 or more", c.MaxInflight)
	case c.Timeout < 0:
		return fmt.Errorf("upstream timeout %s: want more than 0", c.Timeout)
	}
	for _, r := range c.Routes {
		if len(r.Servers) == 0 {
			return fmt.Errorf("route for %q: want a nameserver", r.Suffix)
		}
		if _, err := wire.ParseHostname(r.Suffix); err != nil {
			return fmt.Errorf("upstream for %q: want a domain name: %w", r.Suffix, err)
		}
	}
	if err := new(Order).UnmarshalText([]byte(c.Order)); err != nil {
		return fmt.Errorf("upstream-order %q: %w", c.Order, err)
	}
	return nil
}

// An Order says which of several nameservers is queried first.
type Order string

// The values of Order.
const (
	// OrderStrict queries nameservers in the order of resolv.conf or of the settings. When a nameserver is late, the
	// next one is queried, too. A negative answer of the next one is not used while the first one may answer. A
	// positive answer is used, but is cached for 30 s at most. OrderStrict is the default.
	OrderStrict Order = "strict"
	// OrderFastest queries the fastest nameserver, and takes the first answer. The option rotate
	// of resolv.conf(5) has the same effect.
	OrderFastest Order = "fastest"
)

// MarshalText returns the text of o, such as "strict".
func (o Order) MarshalText() ([]byte, error) { return []byte(o), nil }

// UnmarshalText parses the output of MarshalText. The error says what was expected; the caller should add
// the setting and its value.
func (o *Order) UnmarshalText(text []byte) error {
	switch v := Order(text); v {
	case OrderStrict, OrderFastest:
		*o = v
		return nil
	}
	return fmt.Errorf("want %s or %s", OrderStrict, OrderFastest)
}

// A Route says which nameservers are asked for names below a suffix.
type Route struct {
	// Suffix is a domain name; the route applies to it and all names below it.
	Suffix string
	// Servers are the nameservers, at least one.
	Servers []upstream.Spec
}

// client returns the settings of the upstream client.
func (c *Config) client() upstream.Config {
	return upstream.Config{TLSRootsFile: c.RootCA, Timeout: c.Timeout}
}

// limits returns the settings of the cache.
func (c *Config) limits() cache.Config {
	return cache.Config{MaxBytes: int64(max(c.CacheSize, 0)), Stale: max(c.ServeStale, 0)}
}
