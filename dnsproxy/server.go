package dnsproxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
)

// A Server answers DNS queries. Make one with [New], give it tables with [Server.Load] and
// start it with [Server.Run]. Its other methods are safe for concurrent use.
type Server struct {
	handler handler
	config  Config
	log     *slog.Logger

	empty     *table.Table // the predecessor of the first table
	listeners listeners
	ready     chan struct{} // closed when the listeners are open

	endForwarding func()        // closes abandoned; may be called any number of times
	abandoned     chan struct{} // closed when queries in flight are to fail
}

// New checks cfg and reads its resolv.conf. It logs a file that cannot be read and returns no
// error for it: mesh names can be answered without nameservers.
func New(cfg Config) (*Server, error) {
	cfg.setDefaults()
	names, err := cfg.check()
	if err != nil {
		return nil, err
	}
	cluster, suffixes := names.cluster, names.suffixes
	forwarder, err := forward.New(cfg.Forward)
	if err != nil {
		return nil, err
	}
	s := &Server{
		handler: handler{
			answerer: answerer{
				ttl:         uint32(cfg.TTL / time.Second), //nolint:gosec // validate bounds it
				maxAnswers:  cfg.MaxAnswers,
				ednsUDPSize: uint16(cfg.EDNSUDPSize),                                 //nolint:gosec // validate bounds it
				soaData:     newSOAData(cluster.Domain, uint32(cfg.TTL/time.Second)), //nolint:gosec // validate bounds it
			},
			rules: rules{
				forwarder:    forwarder,
				cluster:      cluster,
				beforeSync:   cfg.BeforeSync,
				autopath:     cfg.Autopath,
				suffixes:     suffixes,
				meantSpecial: meantSpecial(append(forwarder.Suffixes(), suffixes.Bypass...)),
			},
			metrics: newMetrics(),
			version: cfg.Version,
			id:      cfg.ID,
			log:     cfg.Logger,
			table:   new(atomic.Pointer[table.Table]),
			synced:  make(chan struct{}),
		},
		config: cfg,
		log:    cfg.Logger,
		empty:  table.Empty(cluster),
		ready:  make(chan struct{}),

		abandoned: make(chan struct{}),
	}
	if len(suffixes.LocalOnly) > 0 {
		s.empty.IndexAncestors() // a local-only name is NODATA if mesh names are below it
	}
	s.endForwarding = sync.OnceFunc(func() { close(s.abandoned) })
	s.listeners = listeners{config: &s.config, handler: &s.handler}
	if cfg.OriginalDestination {
		s.handler.origins = newOrigins(s.log, s.handler.metrics.originErrors)
	}
	if err := s.handler.metrics.register(cfg.Registerer, s.handler.collisions); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	return s, nil
}

// Run opens the listeners, answers queries until ctx ends, and finishes the queries that it
// has. It returns after all its goroutines: nil after the end of ctx, an error if it could
// open no listener or if a listener failed.
func (s *Server) Run(ctx context.Context) error {
	if err := s.listeners.open(ctx); err != nil {
		return err
	}
	defer s.listeners.close()
	reopen := s.openOrigins()
	defer s.closeOrigins()

	// The listeners finish the queries that they have, so the forwarder ends after them.
	forwarding, endForwarding := context.WithCancel(context.WithoutCancel(ctx))
	defer endForwarding()
	var forwarder errgroup.Group
	forwarder.Go(func() error { return s.handler.forwarder.Run(forwarding) })
	forwarder.Go(func() error {
		select {
		case <-s.abandoned:
			endForwarding()
		case <-forwarding.Done():
		}
		return nil
	})

	close(s.ready) // the kernel keeps what arrives before the sockets are read
	group, ctx := errgroup.WithContext(ctx)
	s.listeners.run(ctx, group)
	if reopen {
		group.Go(func() error {
			s.handler.origins.keepOpening(ctx)
			return nil
		})
	}
	err := group.Wait()
	endForwarding()
	return errors.Join(err, forwarder.Wait())
}

// openOrigins opens the lookup of captured queries' original destinations. It reports
// whether a later attempt may succeed.
func (s *Server) openOrigins() (again bool) {
	return s.handler.origins != nil && !s.handler.origins.tryOpen()
}

// closeOrigins closes what openOrigins has opened.
func (s *Server) closeOrigins() {
	if s.handler.origins != nil {
		s.handler.origins.close()
	}
}

// HandOver makes the end of Run leave the packets in the sockets that were not read yet, for
// another process that has the same sockets.
func (s *Server) HandOver() { s.handler.handOver.Store(true) }

// EndForwarding fails the forwarded queries in flight, and all later ones, so that an end of Run
// does not wait for nameservers.
func (s *Server) EndForwarding() { s.endForwarding() }

// Ready is closed once the listeners are open.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Synced is closed once the first table is in use.
func (s *Server) Synced() <-chan struct{} { return s.handler.synced }

// Addrs returns the addresses of the open listeners, IPv4 before IPv6 and UDP before TCP. It
// returns none before Ready.
func (s *Server) Addrs() []Addr {
	select {
	case <-s.ready:
	default:
		return nil
	}
	return s.listeners.addrs()
}

// Upstreams returns the nameservers that queries are forwarded to, except those of routes.
func (s *Server) Upstreams() []upstream.Spec { return s.handler.forwarder.Upstreams() }

// UpstreamStatus returns the state of each nameserver that was ever configured.
func (s *Server) UpstreamStatus() []upstream.Status { return s.handler.forwarder.Status() }

// SelfUpstreams returns the nameservers that are left out because they are this agent.
func (s *Server) SelfUpstreams() []upstream.Spec { return s.handler.forwarder.Self() }

// CacheContent is [forward.Forwarder.CacheContent].
func (s *Server) CacheContent(selection forward.CacheSelection, limit int) (forward.CacheContent, error) {
	return s.handler.forwarder.CacheContent(selection, limit)
}

// FlushCache is [forward.Forwarder.FlushCache].
func (s *Server) FlushCache(selection forward.CacheSelection) (int, error) {
	return s.handler.forwarder.FlushCache(selection)
}

// Load replaces shards of the table (digest.ShardOf) and puts the result into use: shards has all entries of
// each, a NameTable in wire form, and the other shards stay. Every query that arrives after Load has returned
// is answered from the new table. It costs as much as the shards that differ. On an error the current table
// stays in use. It logs only what the current table does not leave out, too. Load must not be called
// concurrently. It does not keep shards.
func (s *Server) Load(shards map[int][]byte) error {
	start := time.Now()
	current := s.latest()
	next, err := current.With(shards)
	if err != nil {
		return err
	}
	s.use(next, start)
	known := map[table.Skipped]bool{}
	for _, skip := range current.Skipped() {
		known[skip] = true
	}
	s.logSkipped(slices.DeleteFunc(next.Skipped(), func(skip table.Skipped) bool { return known[skip] }))
	return nil
}

// latest returns the current table, an empty one before the first.
func (s *Server) latest() *table.Table {
	if current := s.handler.table.Load(); current != nil {
		return current
	}
	return s.empty
}

// use puts a table into use, which was built from start on.
func (s *Server) use(next *table.Table, start time.Time) {
	first := s.handler.table.Swap(next) == nil
	if first {
		close(s.handler.synced)
	}
	s.handler.metrics.buildDuration.Observe(time.Since(start).Seconds())
	s.handler.metrics.hosts.Set(float64(next.Len()))
	s.handler.metrics.skipped.Set(float64(len(next.Skipped())))
}

// maxLoggedSkips bounds the log lines of one push.
const maxLoggedSkips = 20

func (s *Server) logSkipped(skipped []table.Skipped) {
	for _, skip := range skipped[:min(len(skipped), maxLoggedSkips)] {
		s.log.Warn("left out of the table", "key", skip.Key, "reason", skip.Reason)
	}
	if more := len(skipped) - maxLoggedSkips; more > 0 {
		s.log.Warn("left out of the table: further entries", "count", more)
	}
}

// ClusterDomain returns the cluster domain, without a trailing dot.
func (s *Server) ClusterDomain() string {
	return strings.TrimSuffix(s.handler.cluster.Domain.String(), ".")
}

// SetReturned says for which domains systemd-resolved queries this server. They are not
// forwarded to systemd-resolved's stub, which would send them back.
func (s *Server) SetReturned(domains []string) { s.handler.forwarder.SetReturned(domains) }

// Table returns the current table, nil before the first one.
func (s *Server) Table() *table.Table { return s.handler.table.Load() }
