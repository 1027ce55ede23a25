package dnsproxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Server answers DNS queries on its listeners. Make one with [New], give it
// tables with [Server.Load] and start it with [Server.Run].
type Server struct {
	handler handler
	config  Config
	clients *tcpClients // of all TCP listeners
	log     *slog.Logger
	ready   chan struct{} // closed when the listeners are open

	mu        sync.Mutex
	listeners []listener // empty before Ready
	stopped   bool       // no listener is added any more
}

// New checks cfg and reads its resolv.conf. A file that cannot be read is logged
// and no error: own names can be answered without nameservers.
func New(cfg Config) (*Server, error) {
	cfg.setDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cluster, err := table.NewCluster(cfg.Namespace, cfg.Domain)
	if err != nil {
		return nil, err
	}
	if _, ok := soaMailbox.Join(cluster.Domain); !ok { // the longest name that an SOA record adds to it
		return nil, fmt.Errorf("domain %q: %w", cfg.Domain, wire.ErrLongName)
	}
	bypass, err := table.ParseSuffixes("bypass", cfg.Bypass)
	if err != nil {
		return nil, err
	}
	localOnly, err := table.ParseSuffixes("local-only", cfg.LocalOnly)
	if err != nil {
		return nil, err
	}
	forwarder, err := forward.New(cfg.Forward)
	if err != nil {
		return nil, err
	}
	s := &Server{
		handler: handler{
			answerer: answerer{
				ttl:         uint32(cfg.TTL / time.Second), //nolint:gosec // validate bounds it
				ednsUDPSize: uint16(cfg.EDNSUDPSize),       //nolint:gosec // validate bounds it
				cluster:     cluster,
				soaData:     newSOAData(cluster.Domain, uint32(cfg.TTL/time.Second)), //nolint:gosec // validate bounds it
			},
			forwarder:  forwarder,
			table:      new(atomic.Pointer[table.Table]),
			beforeSync: cfg.BeforeSync,
			autopath:   cfg.Autopath,
			suffixes:   table.Suffixes{Bypass: bypass, LocalOnly: localOnly},

			meantSpecial: meantSpecial(append(forwarder.Suffixes(), bypass...)),

			version: cfg.Version,
			id:      cfg.ID,
			log:     cfg.Logger,

			synced: make(chan struct{}),
		},
		config: cfg,
		log:    cfg.Logger,
		ready:  make(chan struct{}),
	}
	s.handler.metrics = newMetrics()
	if cfg.OriginalDestination {
		s.handler.origins = newOrigins(s.log, s.handler.metrics.originErrors)
	}
	if err := s.handler.register(cfg.Registerer); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	return s, nil
}

// Run opens the listeners and answers queries until ctx ends, then finishes the
// queries it has. It returns after its goroutines have: nil at the end of ctx,
// an error if no listener could be opened or one died.
func (s *Server) Run(ctx context.Context) error {
	s.clients = newTCPClients(s.config.MaxTCPConns, s.log)
	defer s.clients.close()
	listeners, missing, err := s.listen(ctx)
	if err != nil {
		return err
	}
	s.listeners = listeners
	s.listenersChanged()
	reopen := s.openOrigins()
	defer s.closeOrigins()

	// The listeners finish the queries that they have, so the forwarder ends after them.
	forwarding, endForwarding := context.WithCancel(context.WithoutCancel(ctx))
	defer endForwarding()
	var forwarder errgroup.Group
	forwarder.Go(func() error { return s.handler.forwarder.Run(forwarding) })

	close(s.ready) // the kernel keeps what arrives before the sockets are read
	group, ctx := errgroup.WithContext(ctx)
	for _, l := range listeners {
		group.Go(l.serve)
	}
	group.Go(func() error {
		s.openMissing(ctx, group, missing)
		return nil
	})
	if reopen {
		group.Go(func() error {
			s.handler.origins.keepOpening(ctx)
			return nil
		})
	}
	group.Go(func() error {
		<-ctx.Done()
		s.stopListeners()
		return nil
	})
	err = group.Wait()
	endForwarding()
	return errors.Join(err, forwarder.Wait())
}

// stopListeners ends all listeners once they have answered what they have read.
func (s *Server) stopListeners() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	for _, l := range s.listeners {
		l.stop()
	}
}

// listenersChanged counts the listeners, and tells the forwarder on which addresses they
// are open: a nameserver with such an address is this agent.
func (s *Server) listenersChanged() {
	s.mu.Lock()
	open := slices.Clone(s.listeners)
	s.mu.Unlock()
	s.handler.metrics.listeners.Set(float64(len(open)))
	addrs := make([]netip.AddrPort, 0, len(open))
	for _, l := range open {
		if addr, err := netip.ParseAddrPort(l.addr().Address); err == nil { // always, for a listener
			addrs = append(addrs, addr)
		}
	}
	s.handler.forwarder.SetListeners(addrs)
}

// openOrigins asks the kernel to be told where captured UDP queries were on their way to.
// It reports whether that is to be tried again.
func (s *Server) openOrigins() (again bool) {
	return s.handler.origins != nil && !s.handler.origins.tryOpen()
}

// closeOrigins ends what openOrigins began.
func (s *Server) closeOrigins() {
	if s.handler.origins != nil {
		s.handler.origins.close()
	}
}

// Ready is closed once the listeners are open.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Synced is closed once the first table is in use.
func (s *Server) Synced() <-chan struct{} { return s.handler.synced }

// Addrs returns the address of every listener that is open now, IPv4 before IPv6 and UDP before
// TCP; it is empty before Ready.
func (s *Server) Addrs() []Addr {
	select {
	case <-s.ready:
	default:
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	addrs := make([]Addr, 0, len(s.listeners))
	for _, l := range s.listeners {
		addrs = append(addrs, l.addr())
	}
	return addrs
}

// Upstreams returns the nameservers that queries are forwarded to, except those of routes.
func (s *Server) Upstreams() []upstream.Spec { return s.handler.forwarder.Upstreams() }

// UpstreamStatus returns the state of each nameserver that was ever configured.
func (s *Server) UpstreamStatus() []upstream.Status { return s.handler.forwarder.Status() }

// CacheContent is [forward.Forwarder.CacheContent].
func (s *Server) CacheContent(selection forward.CacheSelection, limit int) (forward.CacheContent, error) {
	return s.handler.forwarder.CacheContent(selection, limit)
}

// FlushCache is [forward.Forwarder.FlushCache].
func (s *Server) FlushCache(selection forward.CacheSelection) (int, error) {
	return s.handler.forwarder.FlushCache(selection)
}

// Load builds a table from the NameTables of one push, in wire form, and makes
// it effective: every query that starts after Load has returned is answered from
// it. On an error the table before stays. Load must not be called concurrently;
// it does not keep resources.
func (s *Server) Load(resources [][]byte) error {
	start := time.Now()
	previous := s.handler.table.Load()
	if previous == nil {
		previous = table.Empty(s.handler.cluster)
	}
	next, err := previous.Next(resources)
	if err != nil {
		return err
	}
	first := s.handler.table.Swap(next) == nil
	s.handler.forwarder.TableChanged()
	if first {
		close(s.handler.synced)
	}
	s.handler.metrics.buildDuration.Observe(time.Since(start).Seconds())
	s.handler.metrics.hosts.Set(float64(next.Len()))
	skipped := next.Skipped()
	s.handler.metrics.skipped.Set(float64(len(skipped)))
	s.logSkipped(skipped)
	return nil
}

// maxLoggedSkips bounds what one push can write to the log.
const maxLoggedSkips = 20

func (s *Server) logSkipped(skipped []table.Skipped) {
	for _, skip := range skipped[:min(len(skipped), maxLoggedSkips)] {
		s.log.Warn("left out of the table", "key", skip.Key, "reason", skip.Reason)
	}
	if more := len(skipped) - maxLoggedSkips; more > 0 {
		s.log.Warn("left out of the table: more", "count", more)
	}
}

// Table returns the table in use, nil before the first.
func (s *Server) Table() *table.Table { return s.handler.table.Load() }
