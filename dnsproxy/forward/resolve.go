package forward

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// staleAfter is how long nameservers have before clients get a stale answer: the client
// response timer of RFC 8767, section 5. It runs from the first client's query. No client
// waits while nameservers are down, or if they failed to answer the question the last time.
const staleAfter = 1800 * time.Millisecond

// A lookup is what the cache has for a question.
type lookup struct {
	state  cache.State
	result Result // the answer if final, otherwise a stale reply or none
	// refresh says that this caller, and no other, is to ask nameservers again.
	refresh bool
	// generation is the cache's from before the lookup.
	generation uint64
}

// final reports whether nameservers need not be asked.
func (l *lookup) final() bool { return l.state != cache.Miss && l.state != cache.Stale }

// look looks a question up in the cache.
func (f *Forwarder) look(key cache.Key, found *lookup) {
	found.generation = f.cache.Generation()
	hit := f.cache.Get(key, f.config.Clock.Now())
	found.state, found.refresh = hit.State, hit.Refresh
	r := &found.result
	r.Reply, r.Age, r.Source = hit.Reply, hit.Age, SourceCache
	if hit.State == cache.Failed {
		r.Err = CachedFailure(hit.Failure)
	}
}

// Key returns the key of a query in the cache. It is valid as long as q.
func Key(q *wire.Query) cache.Key {
	return cache.Key{Name: string(q.Name), Type: q.Type, Class: q.Class, DO: q.DO, CD: q.CD}
}

// Lookup looks a query up in the cache, by its Key, once. It reports whether the cache
// answers it. The result belongs to q. Lookup does not allocate for replies.
func (f *Forwarder) Lookup(q *Query) (found *Result, ok bool) {
	f.look(q.Key, &q.found)
	return &q.found.result, q.found.final()
}

// RefreshDue reports whether the caller of [Forwarder.Lookup] must call
// [Forwarder.Refresh].
func (q *Query) RefreshDue() bool { return q.found.refresh }

// Stale returns a reply that [Forwarder.Lookup] found expired, nil if there is none. It is for
// queries that cannot wait for nameservers.
func (q *Query) Stale() *Result {
	if q.found.state != cache.Stale {
		return nil
	}
	return &q.found.result
}

// Refresh asks nameservers in the background for a reply that is in the cache and is about
// to expire. It keeps nothing of q.
func (f *Forwarder) Refresh(q *Query) {
	taken, ok := f.acquire(f.slotOf(q))
	if !ok {
		return // clients that wait come first
	}
	flight, first := f.flights.join(flightKey{Key: q.Key})
	if !first {
		taken.release()
		return
	}
	f.background.Go(func() {
		defer taken.release()
		f.ask(flight, cache.Fresh)
	})
}

// resolve answers a question from the cache or by asking nameservers, which are asked once
// for all clients that wait for the same. If they fail or are slow, clients get what the
// cache has, stale (RFC 8767).
func (f *Forwarder) resolve(q *Query) Result {
	if q.found.generation != f.cache.Generation() {
		q.found = lookup{} // flushed since
	}
	if q.found.final() {
		return q.found.result
	}
	return f.fetch(q)
}

// fetch is resolve for a query whose answer is not in the cache, or whose reply there is
// stale or to be renewed. That reply goes out if no more queries may be in flight.
func (f *Forwarder) fetch(q *Query) Result {
	found, old := &q.found.result, q.found.result.Reply != nil
	taken, ok := f.acquire(f.slotOf(q))
	if !ok {
		f.cache.CountMiss(q.found.state)
		if old {
			return *found
		}
		return Result{Err: ErrTooMany, Source: SourceSelf}
	}
	defer taken.release()
	flying := flightKey{Key: q.Key}
	if f.cache.Off() {
		flying.how = q.How
	}
	flight, first := f.flights.join(flying)
	switch {
	case !first:
		// Another client asks the same, or a nameserver that forwards to this agent.
		f.cache.CountMiss(q.found.state)
		flight.suspectLater(f.routing.Load().group(q.Name))
	case old:
		state := q.found.state
		f.background.Go(func() { f.ask(flight, state) })
	default:
		f.ask(flight, q.found.state)
	}
	if !old {
		<-flight.done
		return flight.result
	}
	if found.Age.Stale && f.routing.Load().group(q.Name).Down() {
		return *found
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
	return *found
}

// ask finds the answer to the question of a flight that the caller leads, caches it and
// lands the flight. state is what the caller found in the cache: if it was an answer, that
// is renewed.
func (f *Forwarder) ask(flight *flight, state cache.State) {
	key := flight.key.Key
	if renew := (&lookup{state: state}).final(); !renew {
		// Another flight for the question may have landed after the caller looked into
		// the cache and before it joined this one. The leader looks again, so that a burst
		// of equal questions is one query to nameservers; no other goroutine does.
		var again lookup
		f.look(key, &again)
		switch {
		case again.final() && !again.refresh:
			f.flights.land(flight, again.result)
			return
		case !again.final():
			f.cache.CountMiss(again.state)
		}
	}
	value := cache.Value{Generation: f.cache.Generation()} // before the nameservers are chosen
	result := f.exchange(key, flight.key.how)
	switch {
	case result.Err == nil:
		value.Reply, value.Unsure = result.Reply, result.unsure
		f.cache.Put(key, value, f.config.Clock.Now())
	case nameserversFailed(result.Err):
		value.Failure = result.Err.Error()
		f.cache.Put(key, value, f.config.Clock.Now())
	}
	f.flights.land(flight, result)
}

// nameserversFailed reports whether nameservers were asked and failed to answer, so that
// the question is not asked again for a moment (RFC 9520). A query that was not sent, such
// as for lack of slots or nameservers, says nothing about them.
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

// exchange asks nameservers a question. how is the client's transport, which is used if
// there is no cache.
func (f *Forwarder) exchange(key cache.Key, how upstream.How) Result {
	if !f.cache.Off() {
		how = upstream.UDPThenTCP
	}
	r := f.routing.Load()
	found := Result{Source: SourceUpstream}
	answer, err := r.group(wire.Name(key.Name)).Ask(context.Background(), r.query(key), how)
	if err != nil {
		found.Err = err
		return found
	}
	if found.Reply, err = reply.Parse(answer.Reply); err != nil {
		found.Err = fmt.Errorf("%w: %s: %w", ErrBadReply, answer.Server, err)
	}
	if answer.Unsure && !f.cache.Off() {
		// A client with a cache must not keep it for longer than this one does.
		found.unsure, found.Age = true, reply.Age{Cached: true, Max: uint32(cache.MaxUnsure / time.Second)}
	}
	return found
}
