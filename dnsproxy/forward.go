package dnsproxy

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

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// staleAfter is how long nameservers have before all clients that could be given a
// stale answer are given it: the client response timer of RFC 8767, section 5. It runs
// from the first client's query. No client waits for nameservers that are down, or for a
// name that they failed to answer the last time.
const staleAfter = 1800 * time.Millisecond

var (
	errTooManyQuery = errors.New("too many queries are in flight")
	errTooManyForms = errors.New("too many queries with this question are in flight")
	errBadReply     = errors.New("a nameserver's reply cannot be read")
	errEcho         = errors.New("a nameserver forwards to this agent, and this is the probe that proved it")
)

// A forwarder answers what is not the table's: from the cache, or by asking
// nameservers. Its methods may be called from any goroutine.
type forwarder struct {
	client  *upstream.Client
	cache   *cache.Cache // nil: none
	routing atomic.Pointer[routing]
	flights flights
	slots   *slots // for queries in flight or held
	long    longQueries
	metrics *metrics
	timeout time.Duration // of a query
	// decides says what becomes of a question.
	decides func(wire.Question) action
	// walks numbers the search lists and tables that there were: the Walk of keys. It
	// changes after them.
	walks atomic.Uint32

	// background is what goes on after its client was answered.
	background sync.WaitGroup
}

// acquire takes a slot for a query for name, unless there is none for it. The caller
// releases it.
func (f *forwarder) acquire(name wire.Name) (taken slot, ok bool) {
	taken = f.slots.slotFor(name)
	if !taken.take() {
		f.metrics.overflows.Inc()
		return taken, false
	}
	return taken, true
}

// overloaded reports whether a question for nameservers would fail at once.
func (f *forwarder) overloaded(name wire.Name) bool {
	wanted := f.slots.slotFor(name)
	return !wanted.available() || f.routing.Load().group(name).Overloaded()
}

// close ends what is asked in the background and returns when it has ended.
func (f *forwarder) close() {
	f.client.Close()
	f.background.Wait()
}

// A resolution is what a question came to.
type resolution struct {
	reply   *reply.Reply
	age     reply.Age
	relayed []byte // a message that goes back as it came, instead of a reply
	source  string
	err     error // why there is neither; nil otherwise

	left  time.Duration // for how long the cache has reply; 0 if it has not
	aging bool          // that is the last tenth of its time

	unsure bool // reply says that there is nothing, and better nameservers did not answer
}

// A cachedFailure says why nameservers did not answer a question that was asked a
// moment ago.
type cachedFailure string

// Error returns the text.
func (e cachedFailure) Error() string { return string(e) }

// cached returns what the cache has for a question. ok is false if nameservers are
// to be asked; found may then be a stale reply.
func (f *forwarder) cached(key cache.Key) (found resolution, ok bool) {
	return f.hit(key, f.cache.Get(key, time.Now()))
}

// tryCached is cached for who hands on what it has no answer to, to be looked for again.
func (f *forwarder) tryCached(key cache.Key) (found resolution, ok bool) {
	return f.hit(key, f.cache.Try(key, time.Now()))
}

// hit returns what the cache said of a question.
func (f *forwarder) hit(key cache.Key, hit cache.Hit) (found resolution, ok bool) {
	if hit.Refresh {
		f.refresh(key)
	}
	found = resolution{reply: hit.Reply, age: hit.Age, source: sourceCache, left: hit.Left, aging: hit.Aging}
	if hit.State == cache.Failed {
		found.err = cachedFailure(hit.Failure)
	}
	return found, hit.State != cache.Miss && hit.State != cache.Stale
}

// flush forgets what the cache has for the questions that match, all if match is nil.
// Clients that ask from now on do not get what was asked before. A flight's nameservers
// are chosen after it was joined, so one that begins from now on asks those in use now.
func (f *forwarder) flush(match func(cache.Key) bool) {
	f.flights.shut()
	f.cache.Flush(match)
}

// refresh asks for what is in the cache and about to expire.
func (f *forwarder) refresh(key cache.Key) {
	taken, ok := f.acquire(wire.Name(key.Name))
	if !ok {
		return // there is more pressing work
	}
	if flight, first := f.flights.join(flightKey{Key: key}); first {
		f.background.Go(func() {
			defer taken.release()
			f.ask(flight, true)
		})
		return
	}
	taken.release()
}

// resolve returns the answer to a question, from the cache or from nameservers, of
// which it is asked once for all clients that wait for it. When they fail, or are
// slow, what was in the cache goes out stale (RFC 8767).
func (f *forwarder) resolve(key cache.Key, over transport) resolution {
	found, ok := f.cached(key)
	if ok {
		return found
	}
	return f.fetch(key, over, found)
}

// fetch is resolve for a question that the cache has no answer to, or found, an old one,
// which goes out too if no more queries may be in flight.
func (f *forwarder) fetch(key cache.Key, over transport, found resolution) resolution {
	taken, ok := f.acquire(wire.Name(key.Name))
	switch {
	case !ok && found.reply != nil:
		return found
	case !ok:
		return resolution{err: errTooManyQuery, source: sourceSelf}
	}
	defer taken.release()
	flying := flightKey{Key: key}
	if f.cache == nil {
		flying.over = over
	}
	flight, first := f.flights.join(flying)
	stale := found.reply != nil
	switch {
	case !first:
		// Another client asks the same, or a nameserver that forwards to us.
		flight.suspectLater(f.routing.Load().group(wire.Name(key.Name)))
	case stale:
		f.background.Go(func() { f.ask(flight, false) })
	default:
		f.ask(flight, false)
	}
	if !stale {
		<-flight.done
		return flight.result
	}
	if found.age.Stale && f.routing.Load().group(wire.Name(key.Name)).Down() {
		return found
	}
	timer := time.NewTimer(staleAfter - time.Since(flight.began))
	defer timer.Stop()
	select {
	case <-flight.done:
		if flight.result.usable() {
			return flight.result
		}
	case <-timer.C:
	}
	return found
}

// ask finds the answer to a question, puts it in the cache and lands the flight. renew
// says that the cache has an answer that is about to expire.
func (f *forwarder) ask(flight *flight, renew bool) {
	key := flight.key.Key
	value := cache.Value{Generation: f.cache.Generation()} // before the nameservers are chosen
	var result resolution
	if key.Walk != 0 {
		result = f.expand(key, renew)
		value.Derived = &cache.Derived{Left: result.left}
	} else {
		result = f.exchange(key, flight.key.over)
	}
	switch {
	case result.err == nil && (value.Derived == nil || result.left > 0):
		value.Reply, value.Unsure = result.reply, result.unsure
		result.left = f.cache.Put(key, value, time.Now())
	case value.Derived != nil: // its parts are in the cache
	case nameserversFailed(result.err):
		value.Failure = result.err.Error()
		f.cache.Put(key, value, time.Now())
	}
	f.flights.land(flight, result)
}

// nameserversFailed reports whether nameservers were asked and failed to answer, so that
// the question need not be asked again for a moment (RFC 9520). Of what we refuse to ask,
// such as for want of slots or of nameservers, nothing is learned.
func nameserversFailed(err error) bool {
	for _, failure := range []error{
		errBadReply, upstream.ErrMalformed, upstream.ErrTimeout,
		unix.ECONNREFUSED, unix.ECONNRESET, unix.EPIPE, io.EOF,
		unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EHOSTDOWN, unix.ENETDOWN, unix.EADDRNOTAVAIL, unix.EPERM, unix.EACCES,
	} {
		if errors.Is(err, failure) {
			return true
		}
	}
	return false
}

// exchange asks nameservers a question.
func (f *forwarder) exchange(key cache.Key, over transport) resolution {
	how := upstream.UDPThenTCP
	if f.cache == nil {
		how = howOver(over)
	}
	r := f.routing.Load()
	found := resolution{source: sourceUpstream}
	answer, err := r.group(wire.Name(key.Name)).Ask(context.Background(), r.query(key), how)
	if err != nil {
		found.err = err
		return found
	}
	if found.reply, err = reply.Parse(answer.Reply); err != nil {
		found.err = fmt.Errorf("%w: %s: %w", errBadReply, answer.Server, err)
	}
	if answer.Unsure && f.cache != nil {
		// Clients that have a cache must not keep it for longer than ours.
		found.unsure, found.age = true, reply.Age{Cached: true, Max: uint32(cache.MaxUnsure / time.Second)}
	}
	return found
}

// howOver asks nameservers as the client asked us.
func howOver(over transport) upstream.How {
	if over == overTCP {
		return upstream.TCPOnly
	}
	return upstream.UDPOnly
}

// relay sends a message on as it came but for its OPT record, which is between neighbours,
// and returns the reply as it came, which others may get too: one that no
// cache can answer. It is asked over what the client asked over; server is the
// nameserver it is for, if that is known, otherwise one for name is chosen.
func (f *forwarder) relay(packet []byte, name wire.Name, server netip.AddrPort, over transport) resolution {
	taken, ok := f.acquire(name)
	if !ok {
		return resolution{err: errTooManyQuery, source: sourceSelf}
	}
	defer taken.release()
	packet = reply.Hop(packet, true, DefaultEDNSUDPSize)
	flight, first := f.joinRelay(relayKey(packet, name, over, server))
	group := f.routing.Load().group(name) // not before: see flush
	if server.IsValid() {
		group = f.client.Elsewhere(server)
	}
	switch {
	case flight == nil:
		return resolution{err: errTooManyForms, source: sourceSelf}
	case !first:
		flight.suspectLater(group)
		<-flight.done
		return flight.result.relayedTo(packet)
	case flight.forms >= suspectForms:
		group.Suspect()
	}
	if server.IsValid() {
		f.metrics.direct.Inc()
	}
	result := resolution{source: sourceUpstream}
	result.relayed, _, result.err = group.Exchange(context.Background(), packet, howOver(over)|upstream.Verbatim)
	f.flights.land(flight, result)
	return result
}

// transfer asks for a zone on behalf of a client that asked over TCP, and sends it all
// messages of the response but the last, which is relayed as any other.
func (f *forwarder) transfer(packet []byte, name wire.Name, server netip.AddrPort, send func([]byte) error) resolution {
	taken, ok := f.acquire(name)
	if !ok {
		return resolution{err: errTooManyQuery, source: sourceSelf}
	}
	defer taken.release()
	group := f.routing.Load().group(name)
	if server.IsValid() {
		f.metrics.direct.Inc()
		group = f.client.Elsewhere(server)
	}
	result := resolution{source: sourceUpstream}
	result.relayed, result.err = group.Transfer(reply.Hop(packet, true, DefaultEDNSUDPSize), send)
	return result
}

// joinRelay returns the flight of a message that is relayed. A message that is in flight
// is not sent again, or a nameserver that forwards to us would have it go round and
// round; and only so many messages with one question are in flight at a time, for a
// forwarder that changes what it forwards. Others wait; flight is nil if they waited for
// as long as a query may take.
func (f *forwarder) joinRelay(key flightKey) (flight *flight, first bool) {
	flight, first, crowd := f.flights.joinWithin(key, maxForms)
	if flight != nil {
		return flight, first
	}
	timeout := time.NewTimer(f.timeout)
	defer timeout.Stop()
	for flight == nil {
		select {
		case <-crowd:
			flight, first, crowd = f.flights.joinWithin(key, maxForms)
		case <-timeout.C:
			return nil, false
		}
	}
	return flight, first
}

// relayedTo returns the result for another client that sent the same message.
func (r resolution) relayedTo(packet []byte) resolution {
	if r.relayed != nil {
		r.relayed = slices.Clone(r.relayed)
		copy(r.relayed, packet[:2]) // the ID
	}
	return r
}

// usable reports whether something was found that says what the name has.
func (r *resolution) usable() bool {
	return r.err == nil && (r.rcode() == dns.RcodeSuccess || r.rcode() == dns.RcodeNameError)
}

// rcode returns the response code of what was found.
func (r *resolution) rcode() int {
	if r.relayed != nil {
		return reply.Rcode(r.relayed)
	}
	return r.reply.Rcode()
}

// elsewhere returns the nameserver that a captured query goes on to: the one it was on
// its way to, unless resolv.conf's are asked instead. It is not valid if they are, or if
// the query was not captured.
func (f *forwarder) elsewhere(from *arrival) (netip.AddrPort, error) {
	if from.original == nil {
		return netip.AddrPort{}, nil
	}
	server, err := from.original()
	if err != nil || f.routing.Load().standsFor(server) {
		return netip.AddrPort{}, err
	}
	return server, nil
}

// mayGoElsewhere reports whether a captured query goes on to the nameserver that it was on
// its way to, or may do so.
func (f *forwarder) mayGoElsewhere(from *arrival) bool {
	server, err := f.elsewhere(from)
	return err != nil || server.IsValid()
}
