package forward

import (
	"net/netip"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Query is a query on its way through the forwarder. The caller sets the exported fields. [Forwarder.Lookup] stores
// what it finds in the field found, and [Forwarder.Begin] and [Forwarder.Answer] continue from there.
type Query struct {
	// Name is the question's name.
	Name wire.Name
	// Cacheable is true if the reply may be given to other clients. Key then identifies
	// the question in the cache.
	Key       cache.Key
	Cacheable bool
	// Message is the query as the client sent it.
	Message []byte
	// Server is the nameserver to ask; if it is not valid, the nameservers of
	// resolv.conf and the settings are asked.
	Server netip.AddrPort
	// Mode says over which transport the client has sent the query. A message that is relayed is sent over the same
	// transport.
	Mode upstream.Mode
	// Send is set for zone transfers over TCP. It sends the client all messages except
	// the last.
	Send func(message []byte) error
	// Otherwise is true if the caller has an answer of its own for when nameservers fail. It then gets an error early:
	// when a client would get a stale reply.
	Otherwise bool

	found lookup
}

// RefreshDue reports whether the caller of [Forwarder.Lookup] must call
// [Forwarder.Refresh].
func (q *Query) RefreshDue() bool { return q.found.refresh }

// Stale returns the expired reply that [Forwarder.Lookup] found, nil if there is none. It is for
// queries that cannot wait for nameservers.
func (q *Query) Stale() *Result {
	if q.found.state != cache.Stale {
		return nil
	}
	return &q.found.result
}

// Key returns the key of a query in the cache. It is valid as long as q.
func Key(q *wire.Query) cache.Key {
	return cache.Key{Name: string(q.Name), Type: q.Type, Class: q.Class, DO: q.DO, CD: q.CD}
}

// A lookup is what the cache has for a question.
type lookup struct {
	state  cache.State
	result Result // the answer if the method final reports true; otherwise a stale reply, or none
	// refresh is true if this caller, and no other, is to ask nameservers again.
	refresh bool
	// generation is how often the cache was flushed before the lookup began (cache.Generation).
	generation uint64
}

// note notes what the cache has.
func (l *lookup) note(hit cache.Hit) {
	l.state, l.refresh = hit.State, hit.Refresh
	r := &l.result
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

// final reports whether the cache has the answer, so that nameservers need not be asked.
func (l *lookup) final() bool { return l.state != cache.Miss && l.state != cache.Stale }
