package forward

import (
	"crypto/sha256"
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
	// refresh is true if this caller, and no other, is to ask nameservers again.
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
	r.Reply, r.Age, r.Server = hit.Reply, hit.Age, hit.Server
	switch hit.State {
	case cache.Stale, cache.StaleNow:
		r.Source, r.failure = SourceStale, hit.Failure
	case cache.Failed:
		r.Source = SourceCachedFailure
		if r.Reply == nil {
			r.Err = CachedFailure(hit.Failure)
		}
	case cache.Fresh, cache.Miss:
		r.Source = SourceCache
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

// Refresh asks nameservers for a reply that is in the cache and is about
// to expire, and returns. It keeps nothing of q.
func (f *Forwarder) Refresh(q *Query) { f.renew(q, cache.Fresh) }

// renew asks nameservers for what no client waits for, if there is a place: clients that wait come first.
// state is what was found in the cache.
func (f *Forwarder) renew(q *Query, state cache.State) {
	switch b := f.board(f.questionKey(q), seat{}, nil); {
	case b.first:
		f.lead(b.flight, state)
	case state != cache.Fresh:
		f.cache.CountMiss(state)
	}
}

// questionKey returns the key of a question.
func (f *Forwarder) questionKey(q *Query) flightKey {
	key := flightKey{Key: q.Key}
	if f.cache.Off() {
		key.relay = string([]byte{byte(q.How)})
	}
	return key
}

// resolve answers a question from the cache or by asking nameservers, which are asked once
// for all clients that wait for the same. If they fail or are slow, clients get what the
// cache has, stale (RFC 8767).
func (f *Forwarder) resolve(q *Query, client Client) {
	if q.found.generation != f.cache.Generation() {
		q.found = lookup{} // flushed since
	}
	if q.found.final() {
		found := q.found.result
		client.Receive(&found)
		return
	}
	state, who := q.found.state, seat{client: client}
	group := f.routing.Load().group(q.Name)
	if q.found.result.Reply != nil {
		old := q.found.result
		if who.old = &old; group.Down() {
			old.failure = errDown.Error()
			f.renew(q, state)
			client.Receive(&old)
			return
		}
	}
	b := f.board(f.questionKey(q), who, group)
	switch {
	case b.first:
		b.flight.traced = q.Trace
		f.lead(b.flight, state)
	case b.flight != nil:
		// Another client asks the same, or a nameserver that forwards to this agent.
		f.cache.CountMiss(state)
		f.flights.suspectLater(b.flight, group)
	default:
		f.cache.CountMiss(state)
		return
	}
	if who.old != nil {
		time.AfterFunc(staleAfter-time.Since(b.flight.began), func() { f.flights.giveOld(b.flight) })
	}
}

// lead finds the answer to the question of a new flight. state is what the caller found in the cache: if it
// was an answer, that is renewed.
func (f *Forwarder) lead(led *flight, state cache.State) {
	key := led.key.Key
	if renew := (&lookup{state: state}).final(); !renew {
		// Another flight for the question may have landed after the caller looked into
		// the cache and before it joined this one. The leader looks again, so that a burst
		// of equal questions is one query to nameservers; no other goroutine does.
		var again lookup
		f.look(key, &again)
		switch {
		case again.final() && !again.refresh:
			result := again.result
			f.flights.land(led, &result)
			return
		case !again.final():
			f.cache.CountMiss(again.state)
		}
	}
	led.generation = f.cache.Generation() // before the nameservers are chosen
	how := upstream.UDPThenTCP
	if led.key.relay != "" {
		how = upstream.How(led.key.relay[0])
	}
	r := f.routing.Load()
	f.flights.lead(led, r.group(wire.Name(key.Name)).Start(r.query(key), led.how(how), led))
}

// Receive takes the nameservers' answer: it is cached, and given to the clients.
func (l *flight) Receive(answer upstream.Answer, err error) {
	f := l.forwarder
	result := &Result{Source: SourceUpstream, Server: answer.Server, Err: err, Attempts: answer.Attempts}
	if l.relays() {
		result.Relayed = answer.Reply
		f.flights.land(l, result)
		return
	}
	value := cache.Value{Generation: l.generation}
	if err == nil {
		if result.Reply, err = reply.Parse(answer.Reply); err != nil {
			result.Err = fmt.Errorf("%w: %s: %w", ErrBadReply, answer.Server, err)
		}
	}
	if answer.Provisional && !f.cache.Off() {
		// A client with a cache must not keep it for longer than this one does.
		result.Age = reply.Age{Cached: true, Max: uint32(cache.MaxProvisional / time.Second)}
	}
	switch {
	case result.Err == nil && answer.Plain && l.key.DO: // without signatures, which other clients may get
	case result.Err == nil:
		value.Reply, value.Server, value.Provisional = result.Reply, result.Server, answer.Provisional
		value.Failure = result.Failure()
		f.cache.Put(l.key.Key, value, f.config.Clock.Now())
	case nameserversFailed(result.Err):
		value.Failure = result.Failure()
		f.cache.Put(l.key.Key, value, f.config.Clock.Now())
	}
	f.flights.land(l, result)
}

// how returns how nameservers are asked, which is traced if the first client has asked for that.
func (l *flight) how(how upstream.How) upstream.How {
	if l.traced {
		return how | upstream.Traced
	}
	return how
}

// relays reports whether the flight relays its message.
func (l *flight) relays() bool { return len(l.key.relay) > sha256.Size }

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
