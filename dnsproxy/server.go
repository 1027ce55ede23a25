package dnsproxy

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/nat64"
)

// A Server answers DNS queries. Make one with [New], give it tables with [Server.Load] and
// start it with [Server.Run]. Its other methods are safe for concurrent use.
type Server struct {
	handler front
	config  Config // the Config that New got; settings that Configure changes are in the handler in use
	cluster table.Cluster
	log     *slog.Logger

	building  sync.Mutex   // held while a table or a handler is made and stored
	empty     *table.Table // a table without hosts, from which the first table is built; guarded by building
	listeners *listeners
	ready     chan struct{} // closed when the listeners are open

	abandoned     context.Context // ends when forwarded queries in flight must fail
	endForwarding func()          // ends abandoned; may be called any number of times
}

// New checks cfg and reads its resolv.conf. If the file cannot be read, New logs this and returns
// no error: mesh names can be answered without nameservers.
func New(cfg Config) (*Server, error) {
	cfg.setDefaults()
	names, err := cfg.check()
	if err != nil {
		return nil, err
	}
	s := new(Server)
	finder := nat64.NewFinder(func(ctx context.Context) ([]netip.Addr, error) {
		addrs, _, err := s.Resolve(ctx, nat64.Name, dns.TypeAAAA, false)
		return addrs, err
	})
	cfg.Forward.Flushed = finder.Renew
	forwarder, err := forward.New(cfg.Forward)
	if err != nil {
		return nil, err
	}
	shared := &common{
		forwarder: forwarder,
		metrics:   newMetrics(),
		seen:      seen.New(),
		version:   cfg.Version,
		id:        cfg.ID,
		log:       cfg.Logger,
		nat64:     finder,
		synced:    make(chan struct{}),
		began:     time.Now(),
	}
	*s = Server{
		handler: front{common: shared},
		config:  cfg,
		cluster: names.cluster,
		log:     cfg.Logger,
		empty:   table.Empty(names.cluster),
		ready:   make(chan struct{}),
	}
	s.abandoned, s.endForwarding = context.WithCancel(context.Background())
	s.useSettings(&cfg, names.suffixes)
	if s.listeners, err = newListeners(&s.config, &s.handler); err != nil {
		return nil, err
	}
	s.handler.origins = newOrigins(s.log, s.handler.metrics.originErrors)
	s.handler.metrics.register(cfg.Registerer, s.handler.collisions)
	return s, nil
}

// Configure changes the settings of answers (Bypass, LocalOnly, TTL, EDNSUDPSize
// and BeforeSync) and the settings that [forward.Forwarder.Configure] changes. It
// ignores the other fields of cfg. On an error nothing changes.
//
// Queries that arrive after Configure has returned are answered by the
// new settings. For a query that arrived earlier, the previous settings decide what is done with it. If it is
// forwarded, and was not sent yet, it is sent to the new nameservers.
func (s *Server) Configure(cfg Config) error {
	cfg.setDefaults()
	names, err := cfg.check()
	if err != nil {
		return err
	}
	s.building.Lock()
	defer s.building.Unlock()
	previous := s.handler.inUse.Load()
	// A name may be local-only in one of the two configurations, and have its own nameservers in the other. While the
	// forwarder changes, such a name must not be sent to other nameservers. So during this time it is local-only.
	between := *previous
	between.suffixes = previous.suffixes.Strictest(names.suffixes)
	s.handler.inUse.Store(&between)
	if err := s.handler.forwarder.Configure(cfg.Forward); err != nil {
		s.handler.inUse.Store(previous)
		return err
	}
	s.useSettings(&cfg, names.suffixes)
	return nil
}

// useSettings makes a handler with the settings of cfg and stores it for the
// next queries. The defaults of cfg must be set, and the forwarder must have the settings of cfg.Forward already.
func (s *Server) useSettings(cfg *Config, suffixes table.Suffixes) {
	ttl := uint32(cfg.TTL / time.Second) //nolint:gosec // validate bounds it
	s.handler.inUse.Store(&handler{
		common: s.handler.common,
		answerer: answerer{
			nat64:       s.handler.nat64,
			ttl:         ttl,
			ednsUDPSize: uint16(cfg.EDNSUDPSize), //nolint:gosec // validate bounds it
			soaData:     newSOAData(s.cluster.Domain, ttl),
		},
		guarded:  answerer{ttl: guardTTL, ednsUDPSize: uint16(cfg.EDNSUDPSize)}, //nolint:gosec // as above
		guardSOA: newGuardSOA(),
		rules: rules{
			resolvConf:   s.handler.forwarder,
			guard:        s.config.Guard,
			cluster:      s.cluster,
			beforeSync:   cfg.BeforeSync,
			suffixes:     suffixes,
			meantSpecial: meantSpecial(append(s.handler.forwarder.Suffixes(), suffixes.Bypass...)),
		},
	})
}

// Run opens the listeners and answers queries until ctx ends. Then it answers the queries that it
// has read, and returns nil. It returns an error if it could open no listener, or if a listener failed. All its
// goroutines have ended when it returns.
func (s *Server) Run(ctx context.Context) error {
	if err := s.listeners.open(ctx); err != nil {
		return err
	}
	defer s.listeners.limit.Close() // releases spare descriptors, after all listeners have ended
	reopen := !s.handler.origins.tryOpen()
	defer s.handler.origins.close()

	// The listeners finish the queries that they have, so the forwarder ends after them.
	forwarding, endForwarding := context.WithCancel(context.WithoutCancel(ctx))
	defer endForwarding()
	defer context.AfterFunc(s.abandoned, endForwarding)()
	var forwarder errgroup.Group
	forwarder.Go(func() error { return s.handler.forwarder.Run(forwarding) })
	var others sync.WaitGroup
	others.Go(func() { s.handler.seen.Run(forwarding) })
	others.Go(func() { s.handler.nat64.Follow(forwarding, s.config.NAT64) })

	close(s.ready) // packets that arrive before the sockets are read wait in the kernel
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.listeners.Serve(ctx, s.listeners.serve) })
	if reopen {
		group.Go(func() error {
			s.handler.origins.keepOpening(ctx)
			return nil
		})
	}
	err := group.Wait()
	endForwarding()
	others.Wait()
	return errors.Join(err, forwarder.Wait())
}

// HandOver makes Run leave unread packets in the sockets when it ends. HandOver is for a server whose sockets another
// process also has, and will read.
func (s *Server) HandOver() { s.handler.handOver.Store(true) }

// EndForwarding fails the forwarded queries in flight, and all later ones, so that Run can end
// without waiting for nameservers.
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
	return s.listeners.Addrs()
}

// Upstreams returns the nameservers that queries are forwarded to, except the nameservers of
// routes.
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

// Read adds a reader of the queries that are answered, as [seen.Recorder.Read] does.
func (s *Server) Read(filter *seen.Filter) *seen.Reader { return s.handler.seen.Read(filter) }

// ReadOwn adds a reader of the queries that are answered, as [seen.Recorder.ReadOwn] does.
func (s *Server) ReadOwn(filter *seen.Filter) *seen.Reader { return s.handler.seen.ReadOwn(filter) }

// ReadMessages adds a reader of all queries with their messages, as [seen.Recorder.ReadMessages] does.
func (s *Server) ReadMessages(onDrop func(messages int)) *seen.Reader {
	return s.handler.seen.ReadMessages(seen.All(), onDrop)
}

// Load replaces shards of the table and puts the new table into use. The argument maps the number of a shard
// (digest.ShardOf) to all entries of this shard: a NameTable in wire form. Shards that are not in the map stay as
// they are. Every query that arrives after Load has returned is answered from the new table. On an error the current
// table stays in use. The cost depends only on the shards that differ.
//
// Load logs the entries that the new table leaves out, unless the previous table left them out, too. Load must not be
// called concurrently. It does not keep the memory of shards.
func (s *Server) Load(shards map[int][]byte) error {
	s.building.Lock()
	defer s.building.Unlock()
	current := s.latestLocked()
	next, err := current.With(shards)
	if err != nil {
		return err
	}
	s.use(next)
	known := map[table.Skipped]bool{}
	for _, skip := range current.Skipped() {
		known[skip] = true
	}
	s.logSkipped(slices.DeleteFunc(next.Skipped(), func(skip table.Skipped) bool { return known[skip] }))
	return nil
}

// latestLocked returns the current table, or an empty one before the first push.
func (s *Server) latestLocked() *table.Table {
	if current := s.handler.table.Load(); current != nil {
		return current
	}
	return s.empty
}

// use stores a table for the next queries.
func (s *Server) use(next *table.Table) {
	first := s.handler.table.Swap(next) == nil
	if first {
		close(s.handler.synced)
	}
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
	return strings.TrimSuffix(s.cluster.Domain.String(), ".")
}

// LocalOnly returns the suffixes whose names are never forwarded.
func (s *Server) LocalOnly() []wire.Name {
	return slices.Clone(s.handler.inUse.Load().suffixes.LocalOnly)
}

// SetReturned sets the domains for which systemd-resolved queries this server. Queries for names
// below them are not forwarded to systemd-resolved's stub, which would send them back.
func (s *Server) SetReturned(domains []string) { s.handler.forwarder.SetReturned(domains) }

// Table returns the current table, nil before the first one.
func (s *Server) Table() *table.Table { return s.handler.table.Load() }
