package forward

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clock"
)

// A Forwarder answers queries from the cache or by asking nameservers. Make one with
// [New] and start it with [Forwarder.Run]. Its methods are safe for concurrent use.
type Forwarder struct {
	config    Config // what New got, with defaults; what Configure changes is in the field settings
	client    *upstream.Client
	cache     *cache.Cache
	flights   *flights
	longBytes atomic.Int64 // how many bytes ReserveMemory has reserved for long queries
	metrics   *metrics
	clock     *clock.Clock
	routing   atomic.Pointer[routing]

	mu              sync.Mutex       // held while the routing is made
	settings        Config           // guarded by mu
	listeners       []netip.AddrPort // guarded by mu
	resolvedDomains []wire.Name      // see SetReturned; guarded by mu
}

// New checks cfg and reads its resolv.conf. If the file cannot be read, New logs this and returns
// no error: mesh names can be answered without nameservers.
func New(cfg Config) (*Forwarder, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.SetDefaults()
	f := &Forwarder{config: cfg, settings: cfg, metrics: newMetrics(), clock: cfg.Clock, cache: cache.New(cfg.limits())}
	client := cfg.client()
	client.Clock, client.Logger, client.Control = cfg.Clock, cfg.Logger, cfg.Control
	client.Observe = func(_ upstream.Spec, rtt time.Duration) { f.metrics.upstreamDuration.Observe(rtt.Seconds()) }
	client.Check = new(reply.Checker).Check
	f.client = upstream.NewClient(client)
	f.flights = &flights{forwarder: f, byKey: map[flightKey]*flight{}}
	f.flights.ends.older, f.flights.ends.newer = &f.flights.ends, &f.flights.ends
	f.metrics.register(cfg.Registerer, f.flights.count, &collector{f.Status, f.cache.Stats})
	conf, err := f.files().Read()
	if err != nil {
		cfg.Logger.Warn(
			"resolv.conf cannot be used: there is no search list, and only nameservers of --upstream are used",
			"path", cfg.ResolvConf, "error", err)
		conf = resolvconf.Parse(nil)
	}
	f.useResolvConf(conf)
	return f, nil
}

// Configure changes Upstreams, Routes, Order, RootCA, Timeout, CacheSize and ServeStale, and ignores the other
// fields of cfg. Queries that arrive after it has returned are answered by the new settings. If a question now goes to
// other nameservers than before, the cache is flushed. On an error nothing changes.
func (f *Forwarder) Configure(cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	cfg.SetDefaults()
	f.mu.Lock()
	defer f.mu.Unlock()
	previous := f.settings
	f.settings = cfg
	f.client.Configure(cfg.client())
	if limits := cfg.limits(); limits != previous.limits() {
		f.cache.Configure(limits, f.clock.Now())
	}
	f.useLocked(f.routing.Load().conf, f.readLocalLocked())
	return nil
}

// Run applies changes of resolv.conf and of the addresses of this host, until ctx ends. It then closes the sockets to
// nameservers, which ends the queries in flight. Queries may be answered before Run, but not after the end of ctx.
func (f *Forwarder) Run(ctx context.Context) error {
	defer f.client.Close()
	watcher := &resolvconf.Watcher{
		Files: f.files(), Clock: f.config.Clock, Current: f.routing.Load().conf,
		Changed: func(conf *resolvconf.Config) {
			f.config.Logger.Info("resolv.conf has changed", "path", f.config.ResolvConf,
				"nameservers", conf.Servers, "search", conf.Search)
			f.useResolvConf(conf)
		},
		Failed: func(err error) {
			f.metrics.resolvConfErrors.Inc()
			f.config.Logger.Warn("resolv.conf cannot be used any more: its previous content stays in use",
				"path", f.config.ResolvConf, "error", err)
		},
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return watcher.Run(ctx) })
	group.Go(func() error {
		f.followAddresses(ctx)
		return nil
	})
	return group.Wait()
}

// Lookup looks up the Key of a query in the cache. It reports whether the cache has the answer. The result is stored
// in q, and is valid as long as q is. Lookup does not allocate memory if it finds a reply.
func (f *Forwarder) Lookup(q *Query) (found *Result, ok bool) {
	q.found.generation = f.cache.Generation()
	q.found.note(f.cache.Get(q.Key, f.clock.Now()))
	return &q.found.result, q.found.final()
}

// Refresh begins to ask nameservers for a new reply to a question whose reply in the cache is about to expire. It does
// not wait for the reply, and does not refer to q after it has returned.
func (f *Forwarder) Refresh(q *Query) { f.renew(q, cache.Fresh) }

// Begin begins to answer a query by the rules in the package comment, and returns. It does not refer to q after it has
// returned. It does not use q.Send. The client receives the result, perhaps before Begin returns. If nameservers fail or
// are slow, it is the stale reply that the cache has (RFC 8767).
func (f *Forwarder) Begin(q *Query, client Client) {
	switch {
	case f.client.Echo(q.Name, q.Message, q.Server):
		client.Receive(&Result{Err: ErrEcho, Source: SourceSelf})
		return
	case q.Server.IsValid() || !q.Cacheable:
		f.relay(q, client)
		return
	case q.found.generation != f.cache.Generation():
		q.found = lookup{} // the cache was flushed after the lookup
	}
	if q.found.final() {
		found := q.found.result
		client.Receive(&found)
		return
	}
	state, s := q.found.state, seat{client: client, otherwise: q.Otherwise}
	group := f.routing.Load().group(q.Name)
	if q.found.result.Reply != nil {
		old := q.found.result
		if s.staleReply = &old; group.Down() {
			old.failure = errDown.Error()
			f.renew(q, state)
			client.Receive(&old)
			return
		}
	} else if q.Otherwise && group.Down() {
		f.renew(q, state)
		client.Receive(&Result{Err: errDown, Source: SourceUpstream})
		return
	}
	l, first := f.flights.join(flightKey{Key: q.Key}, s, !group.Full())
	if first { // otherwise another client, or a nameserver that forwards to this agent, asks the same
		f.launch(l, state)
	}
	if l != nil && (s.staleReply != nil || s.otherwise) {
		time.AfterFunc(staleAfter-time.Since(l.began), func() { f.flights.giveStale(l) })
	}
}

// Answer is like Begin, but waits for the result and returns it. If q.Send is set, it makes a zone transfer.
func (f *Forwarder) Answer(q *Query) Result {
	if q.Send != nil {
		return f.transfer(q)
	}
	result := make(waiter, 1)
	f.Begin(q, result)
	return *<-result
}

// A waiter is the client of Answer.
type waiter chan *Result

// Receive passes the result to Answer.
func (w waiter) Receive(result *Result) { w <- result }

// renew asks nameservers a question so that the cache has a new reply; no client waits for the reply. It does so only
// if a place is free, and evicts no flight. state is the state of the question in the cache.
func (f *Forwarder) renew(q *Query, state cache.State) {
	if l, first := f.flights.join(flightKey{Key: q.Key}, seat{}, false); first {
		f.launch(l, state)
	}
}

// launch finds the answer to the question of a new flight. state is what the caller has found in the cache. If the
// cache has an answer, launch asks nameservers for a newer one.
func (f *Forwarder) launch(l *flight, state cache.State) {
	key := l.key.Key
	if renew := (&lookup{state: state}).final(); !renew {
		// After the caller looked into the cache, and before it began this flight, another flight for the question
		// may have landed. So the cache may have the answer now. Without this second look, a burst of equal
		// questions could become two queries to nameservers.
		again := lookup{}
		if again.note(f.cache.Look(key, f.clock.Now())); again.final() && !again.refresh {
			result := again.result
			f.flights.land(l, &result)
			return
		}
	}
	l.generation = f.cache.Generation() // before the nameservers are chosen
	r := f.routing.Load()
	f.flights.setCall(l, r.group(wire.Name(key.Name)).Start(r.query(key), upstream.UDPThenTCP, l))
}

// Receive implements [upstream.Receiver]. It caches the answer and gives it to the clients.
func (l *flight) Receive(answer upstream.Answer, err error) {
	f, result := l.forwarder, &Result{Source: SourceUpstream, Server: answer.Server, Err: err, call: answer.Call}
	if l.relays {
		result.Relayed = answer.Reply
		f.flights.land(l, result)
		return
	}
	value := cache.Value{Generation: l.generation, MaxTTL: f.routing.Load().maxTTL(wire.Name(l.key.Name), answer.Provisional)}
	result.Age.Max = uint32(value.MaxTTL / time.Second) //nolint:gosec // a TTL
	if err == nil {
		if result.Reply, err = reply.Parse(answer.Reply); err != nil {
			result.Err = fmt.Errorf("%w: %s: %w", ErrBadReply, answer.Server, err)
		}
	}
	switch {
	case result.Err == nil && answer.Plain && l.key.DO:
		// Not cached, because it lacks signatures, which a later reply may have.
	case result.Err == nil:
		value.Reply, value.Server, value.Provisional = result.Reply, result.Server, answer.Provisional
		value.Failure = result.Failure()
		f.cache.Put(l.key.Key, value, f.clock.Now())
	case nameserversFailed(result.Err):
		value.Failure = result.Failure()
		f.cache.Put(l.key.Key, value, f.clock.Now())
	}
	f.flights.land(l, result)
}

// nameserversFailed reports whether nameservers were asked and failed to answer. If so, the question is not asked again
// for a moment (RFC 9520). A query that was not sent, for example because there is no nameserver, is no such failure.
func nameserversFailed(err error) bool {
	for _, failure := range []error{
		ErrBadReply, upstream.ErrMalformed, upstream.ErrTimeout,
		unix.ECONNREFUSED, unix.ECONNRESET, unix.EPIPE, io.EOF,
		unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EHOSTDOWN, unix.ENETDOWN, unix.EADDRNOTAVAIL, unix.EPERM, unix.EACCES,
	} {
		if errors.Is(err, failure) {
			return true
		}
	}
	return false
}

// relay sends the message of a query to a nameserver, and passes the reply to the client. Only the OPT record of the
// message is changed, because an OPT record is for two neighbours (RFC 6891, section 6.2.1). If several clients send
// the same message at the same time, it is sent once, and all of them get the reply. This also ends loops: if a
// nameserver forwards the message to this agent, the agent does not send it again.
func (f *Forwarder) relay(q *Query, client Client) {
	packet := reply.Hop(q.Message, true, ednsUDPSize)
	group := func() *upstream.Group {
		if q.Server.IsValid() {
			return f.client.Elsewhere(q.Server)
		}
		return f.routing.Load().group(q.Name)
	}
	l, first := f.flights.join(relayKey(packet, q), seat{client: client}, !group().Full())
	if !first {
		return
	}
	l.relays = true
	if q.Server.IsValid() {
		f.metrics.direct.Inc()
	}
	// The function group is called a second time, because nameservers must be chosen after join: see flush.
	f.flights.setCall(l, group().Start(packet, q.Mode|upstream.Verbatim, l))
}

// transfer requests a zone transfer over TCP. It sends all messages except the last one to the client, and returns
// the last one.
func (f *Forwarder) transfer(q *Query) Result {
	if !f.flights.take() {
		return Result{Err: ErrTooMany, Source: SourceSelf}
	}
	defer f.flights.release()
	group := f.routing.Load().group(q.Name)
	if q.Server.IsValid() {
		f.metrics.direct.Inc()
		group = f.client.Elsewhere(q.Server)
	}
	last, err := group.Transfer(reply.Hop(q.Message, true, ednsUDPSize), q.Send)
	return Result{Relayed: last.Reply, Source: SourceUpstream, Server: last.Server, Err: err}
}

// Hold takes a place for a query that waits for the first table. If ok is true, the caller
// must call release.
func (f *Forwarder) Hold() (release func(), ok bool) { return f.flights.release, f.flights.take() }

// Overflow counts a query that was refused because too many queries are in flight.
func (f *Forwarder) Overflow() { f.metrics.overflow(1) }

// Full reports whether q would fail at once if it asked nameservers now, because all of them are silent.
func (f *Forwarder) Full(q *Query) bool { return f.routing.Load().group(q.Name).Full() }

const (
	// shortQuery is the length of a query, in bytes, above which its memory is bounded. Nearly all queries are
	// shorter; for these, the bound of their number suffices.
	shortQuery = 1 << 10
	// maxLongQueries bounds the bytes of all longer queries that wait. A query is copied
	// about five times on its way to nameservers.
	maxLongQueries = 8 << 20
)

// ReserveMemory reserves memory for a query of n bytes that waits, unless long queries have too much memory already. If
// it reports true, the caller must call [Forwarder.ReleaseMemory].
func (f *Forwarder) ReserveMemory(n int) bool {
	if n > shortQuery && f.longBytes.Add(int64(n)) > maxLongQueries {
		f.longBytes.Add(-int64(n))
		return false
	}
	return true
}

// ReleaseMemory releases the memory that [Forwarder.ReserveMemory] has reserved.
func (f *Forwarder) ReleaseMemory(n int) {
	if n > shortQuery {
		f.longBytes.Add(-int64(n))
	}
}

// Status returns the state of each nameserver that was ever configured, except addresses of this
// agent.
func (f *Forwarder) Status() []upstream.Status {
	self := f.routing.Load().self
	return slices.DeleteFunc(f.client.Status(), func(s upstream.Status) bool { return slices.Contains(self, s.Spec) })
}

// FlushCache removes the entries of the selected questions from the cache, and returns the number of entries.
// Replies that are on their way at this moment still go to the clients that wait for them, but they are not cached.
// Clients that ask from now on do not wait for these replies.
func (f *Forwarder) FlushCache(selection CacheSelection) (int, error) {
	match, err := selection.match()
	if err != nil {
		return 0, err
	}
	_, total := f.cache.Entries(match, 0, f.clock.Now())
	f.flush(match)
	return total, nil
}

// flush removes from the cache the replies to the questions for which match returns true, or all if match is nil.
// Clients that ask from now on do not join flights that have begun. They begin new flights, and these ask the
// nameservers that are in use now, because the nameservers of a flight are chosen after its first client has joined.
func (f *Forwarder) flush(match func(cache.Key) bool) {
	f.flights.shut()
	f.cache.Flush(match)
	if f.config.Flushed != nil {
		f.config.Flushed()
	}
}
