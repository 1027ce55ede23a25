package forward

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// ednsUDPSize is the UDP payload size in bytes that queries to nameservers offer. It fits
// an IPv6 packet everywhere (DNS flag day 2020).
const ednsUDPSize = 1232

// A Forwarder answers queries from the cache or by asking nameservers. Make one with
// [New] and start it with [Forwarder.Run]. Its methods are safe for concurrent use.
type Forwarder struct {
	config  Config // of New; what Configure changes is in settings
	client  *upstream.Client
	cache   *cache.Cache
	routing atomic.Pointer[routing]
	flights *flights
	long    longQueries
	metrics *metrics

	changing  sync.Mutex       // held while the routing is made
	settings  settings         // guarded by changing
	listeners []netip.AddrPort // guarded by changing
	returned  []wire.Name      // of SetReturned; guarded by changing
}

// New checks cfg and reads its resolv.conf. It logs a file that cannot be read and returns
// no error for it: mesh names can be answered without nameservers.
func New(cfg Config) (*Forwarder, error) {
	next, err := newSettings(cfg)
	if err != nil {
		return nil, err
	}
	cfg = next.Config
	f := &Forwarder{config: cfg, settings: next, flights: newFlights(cfg.MaxInflight), metrics: newMetrics()}
	client := next.client()
	client.Clock, client.Logger, client.Control = cfg.Clock, cfg.Logger, cfg.Control
	client.Observe, client.Check = f.metrics.observe, new(reply.Checker).Check
	f.client = upstream.NewClient(client)
	f.cache = cache.New(next.limits())
	if err := f.register(cfg.Registerer); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	f.readResolvConf()
	return f, nil
}

// Configure changes Upstreams, Routes, Order, RootCA, Timeout, CacheSize, CacheMaxTTL,
// CacheMaxNegativeTTL and ServeStale, and ignores the other fields of cfg. Queries that arrive after it has
// returned are answered by the new settings. Cached replies stay, except those to questions for which
// other nameservers are asked now. On an error nothing changes.
func (f *Forwarder) Configure(cfg Config) error {
	next, err := newSettings(cfg)
	if err != nil {
		return err
	}
	f.changing.Lock()
	defer f.changing.Unlock()
	previous := f.settings
	f.settings = next
	f.client.Configure(next.client())
	if limits := next.limits(); limits != previous.limits() {
		f.cache.Configure(limits, f.config.Clock.Now())
	}
	f.useLocked(f.routing.Load().conf, f.readLocalLocked())
	return nil
}

// Run follows resolv.conf and the addresses of this host until ctx ends. It then closes
// the sockets to nameservers, which ends the queries in flight. Queries may
// be answered before Run, but not after the end of ctx.
func (f *Forwarder) Run(ctx context.Context) error {
	defer f.client.Close()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return f.watcher().Run(ctx) })
	group.Go(func() error {
		f.followAddresses(ctx)
		return nil
	})
	return group.Wait()
}

// Search returns the search list of resolv.conf without the root. The caller must not
// change it.
func (f *Forwarder) Search() []wire.Name { return f.routing.Load().search }

// Suffixes returns the suffixes that have nameservers of their own.
func (f *Forwarder) Suffixes() []wire.Name {
	routes := f.routing.Load().routes
	suffixes := make([]wire.Name, len(routes))
	for i, r := range routes {
		suffixes[i] = r.suffix
	}
	return suffixes
}

// TrustAD reports whether clients may see the AD bit of nameservers' replies (trust-ad in
// resolv.conf(5)).
func (f *Forwarder) TrustAD() bool { return f.routing.Load().conf.TrustAD }

// Upstreams returns the nameservers that queries are forwarded to, except the nameservers of
// routes.
func (f *Forwarder) Upstreams() []upstream.Spec {
	return slices.Clone(f.routing.Load().fallback.servers)
}

// Groups returns the nameservers in use: first the group for all names, then the groups for
// suffixes.
func (f *Forwarder) Groups() []Group {
	r := f.routing.Load()
	groups := []Group{{Servers: slices.Clone(r.fallback.servers)}}
	for _, route := range r.routes {
		groups = append(groups, Group{Suffix: strings.TrimSuffix(route.suffix.String(), "."), Servers: slices.Clone(route.servers)})
	}
	return groups
}

// A Group is the nameservers for the names of a suffix, "" for all others.
type Group struct {
	Suffix  string
	Servers []upstream.Spec
}

// Status returns the state of each nameserver that was ever configured, except addresses of this
// agent.
func (f *Forwarder) Status() []upstream.Status {
	self := f.routing.Load().self
	return slices.DeleteFunc(f.client.Status(), func(s upstream.Status) bool { return slices.Contains(self, s.Spec) })
}

// Self returns the nameservers that are left out because they are this agent.
func (f *Forwarder) Self() []upstream.Spec { return slices.Clone(f.routing.Load().self) }

// Elsewhere reports whether a captured query goes to original, the nameserver that it was
// sent to, rather than to the nameservers of resolv.conf. It is false if original is not
// valid.
func (f *Forwarder) Elsewhere(original netip.AddrPort) bool {
	return original.IsValid() && !f.routing.Load().standsFor(original)
}

// Overflow counts a query that was refused because too many are in flight.
func (f *Forwarder) Overflow() { f.metrics.overflows.Add(1) }

// Overflows returns how many queries were refused for a limit.
func (f *Forwarder) Overflows() uint64 { return f.metrics.overflows.Load() }

// Hold takes the place of a query that waits for the first table. The caller releases it if
// ok.
func (f *Forwarder) Hold() (release func(), ok bool) {
	if ok = f.flights.take(); !ok {
		f.metrics.overflows.Add(1)
	}
	return f.flights.release, ok
}

// flush removes the replies to the questions that match from the cache, all if match is
// nil. Clients that ask from now on do not get what was asked before. A flight's
// nameservers are chosen after it was joined, so a flight that begins from now on asks the
// nameservers in use now.
func (f *Forwarder) flush(match func(cache.Key) bool) {
	f.flights.shut()
	f.cache.Flush(match)
}

// ReserveMemory reserves memory for a query of n bytes that waits, unless long queries
// have too much of it already. The caller calls [Forwarder.ReleaseMemory] if it reports true.
func (f *Forwarder) ReserveMemory(n int) bool { return f.long.take(n) }

// ReleaseMemory ends what [Forwarder.ReserveMemory] began.
func (f *Forwarder) ReleaseMemory(n int) { f.long.release(n) }
