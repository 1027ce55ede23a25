package dnsproxy

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
)

// The defaults of a Config, used for zero values.
const (
	DefaultAddr            = "localhost:15053"
	DefaultDomain          = "cluster.local"
	DefaultResolvConf      = "/etc/resolv.conf"
	DefaultTTL             = 30 * time.Second
	DefaultEDNSUDPSize     = 1232 // bytes; fits an IPv6 packet everywhere (DNS flag day 2020)
	DefaultMaxTCPConns     = 1000
	DefaultMaxInflight     = 10_000
	DefaultUpstreamTimeout = 4 * time.Second
)

// A Config says how a [Server] listens and answers. The zero value of a field
// means the default that it names.
type Config struct {
	// Addr is the host:port to listen on, UDP and TCP. The host is an IP address,
	// "localhost" (127.0.0.1 and ::1) or empty (all addresses, both families).
	// Port 0 takes a free one. Default localhost:15053.
	Addr string
	// Namespace is the client's own, in which short names of one label answer.
	// Default none.
	Namespace string
	// Domain is the cluster domain, with or without "namespace.svc." before it.
	// Default cluster.local.
	Domain string
	// ResolvConf is the path of the resolv.conf(5) that gives the search list and
	// the nameservers. Default /etc/resolv.conf.
	ResolvConf string
	// Upstreams replace the nameservers of ResolvConf. Default those.
	Upstreams []netip.AddrPort
	// TTL of the records that we make, 1 s to about 68 years, in whole seconds.
	// Default 30 s.
	TTL time.Duration
	// EDNSUDPSize is the longest UDP response in bytes, 512 to 65534. Default 1232.
	EDNSUDPSize int
	// MaxTCPConns bounds the open client connections, 1 or more. Default 1,000.
	MaxTCPConns int
	// MaxInflight bounds the queries that wait for a nameserver or for the first
	// table; beyond it they get SERVFAIL at once. 1 or more, default 10,000.
	MaxInflight int
	// UpstreamTimeout bounds a forwarded query over all nameservers. Default 4 s,
	// below the 5 s after which glibc gives a server up.
	UpstreamTimeout time.Duration
	// BeforeSync says what is answered before the first table. Default forward.
	BeforeSync BeforeSync
	// Version and ID answer version.bind and id.server. Default none: refused.
	Version, ID string
	// Logger takes what an operator should know. Default slog's.
	Logger *slog.Logger
	// Registerer takes the metrics. Default none.
	Registerer prometheus.Registerer
}

// A Server answers DNS queries on its listeners. Make one with [New], give it
// tables with [Server.Load] and start it with [Server.Run].
type Server struct {
	handler handler
	config  Config
	log     *slog.Logger
	ready   chan struct{} // closed when the listeners are open

	// listeners is written once before ready is closed.
	listeners []listener
}

// New checks cfg and reads its resolv.conf. A file that cannot be read is logged
// and no error: own names can be answered without nameservers.
func New(cfg Config) (*Server, error) {
	cfg.setDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cluster, err := newCluster(cfg.Namespace, cfg.Domain)
	if err != nil {
		return nil, err
	}
	tables := new(atomic.Pointer[Table])
	metrics, err := newMetrics(cfg.Registerer, func() float64 {
		if table := tables.Load(); table != nil {
			return float64(len(table.Collisions()))
		}
		return 0
	})
	if err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	s := &Server{
		handler: handler{
			answerer: answerer{
				ttl:         uint32(cfg.TTL / time.Second), //nolint:gosec // validate bounds it
				ednsUDPSize: uint16(cfg.EDNSUDPSize),       //nolint:gosec // validate bounds it
				cluster:     cluster,
				soaData:     newSOAData(cluster.domain, uint32(cfg.TTL/time.Second)), //nolint:gosec // validate bounds it
			},
			forwarder:  newForwarder(cfg.UpstreamTimeout, cfg.MaxInflight, metrics),
			metrics:    metrics,
			table:      tables,
			beforeSync: cfg.BeforeSync,
			version:    cfg.Version,
			id:         cfg.ID,
			synced:     make(chan struct{}),
		},
		config: cfg,
		log:    cfg.Logger,
		ready:  make(chan struct{}),
	}
	s.readResolvConf()
	return s, nil
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
	case c.UpstreamTimeout < 0:
		return fmt.Errorf("upstream time-out %s: want more than 0", c.UpstreamTimeout)
	}
	_, err := ParseBeforeSync(string(c.BeforeSync))
	return err
}

// readResolvConf puts the resolv.conf's search list and nameservers to use.
func (s *Server) readResolvConf() {
	conf, err := readResolvConf(s.config.ResolvConf)
	if err != nil {
		s.log.Warn("resolv.conf cannot be used: no search list, and no nameservers but those set",
			"path", s.config.ResolvConf, "error", err)
		conf = &resolvConf{}
	}
	for _, value := range conf.ignored {
		s.log.Warn("resolv.conf: a value is left out", "path", s.config.ResolvConf, "value", value)
	}
	if len(s.config.Upstreams) > 0 {
		conf.servers = s.config.Upstreams
	}
	s.handler.resolvConf.Store(conf)
}

// Run opens the listeners and answers queries until ctx ends, then finishes the
// queries it has. It returns after its goroutines have: nil at the end of ctx,
// an error if no listener could be opened or one died.
func (s *Server) Run(ctx context.Context) error {
	listeners, err := s.listen(ctx)
	if err != nil {
		return err
	}
	s.listeners = listeners
	s.handler.metrics.listeners.Set(float64(len(listeners)))

	close(s.ready) // the kernel keeps what comes before the sockets are read
	group, ctx := errgroup.WithContext(ctx)
	for _, l := range listeners {
		group.Go(l.serve)
	}
	group.Go(func() error {
		<-ctx.Done()
		for _, l := range listeners {
			l.stop()
		}
		return nil
	})
	return group.Wait()
}

// Ready is closed once the listeners are open.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Synced is closed once the first table is in use.
func (s *Server) Synced() <-chan struct{} { return s.handler.synced }

// Addrs returns the address of every listener, IPv4 before IPv6 and UDP before
// TCP; it is empty before Ready.
func (s *Server) Addrs() []Addr {
	select {
	case <-s.ready:
	default:
		return nil
	}
	addrs := make([]Addr, 0, len(s.listeners))
	for _, l := range s.listeners {
		addrs = append(addrs, l.addr())
	}
	return addrs
}

// Upstreams returns the nameservers that queries are forwarded to.
func (s *Server) Upstreams() []netip.AddrPort {
	return append([]netip.AddrPort(nil), s.handler.upstreams()...)
}

// Load builds a table from the NameTables of one push, in wire form, and makes
// it effective: every query that starts after Load has returned is answered from
// it. On an error the table before stays. Load must not be called concurrently;
// it does not keep resources.
func (s *Server) Load(resources [][]byte) error {
	start := time.Now()
	before := s.handler.table.Load()
	if before == nil {
		before = newTable(s.handler.cluster)
	}
	table, err := before.next(resources)
	if err != nil {
		return err
	}
	first := s.handler.table.Swap(table) == nil
	if first {
		close(s.handler.synced)
	}
	s.handler.metrics.buildDuration.Observe(time.Since(start).Seconds())
	s.handler.metrics.hosts.Set(float64(table.Len()))
	skipped := table.Skipped()
	s.handler.metrics.skipped.Set(float64(len(skipped)))
	s.logSkipped(skipped)
	return nil
}

// maxLoggedSkips bounds what one push can write to the log.
const maxLoggedSkips = 20

func (s *Server) logSkipped(skipped []Skipped) {
	for _, skip := range skipped[:min(len(skipped), maxLoggedSkips)] {
		s.log.Warn("left out of the table", "key", skip.Key, "reason", skip.Reason)
	}
	if more := len(skipped) - maxLoggedSkips; more > 0 {
		s.log.Warn("left out of the table: more", "count", more)
	}
}

// Table returns the table in use, nil before the first.
func (s *Server) Table() *Table { return s.handler.table.Load() }
