package forward

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// Errors of a [Result].
var (
	// ErrTooMany says that too many queries are in flight.
	ErrTooMany = errors.New("too many queries are in flight")
	// ErrBadReply says that a nameserver's reply cannot be parsed.
	ErrBadReply = errors.New("a nameserver's reply cannot be read")
	// ErrEcho says that the query is a loop probe of this agent that came back.
	ErrEcho = errors.New("this query is a probe of this agent that a nameserver sent back")

	errTooManyForms = errors.New("too many queries with this question are in flight")
)

// A CachedFailure says why nameservers did not answer the same question a moment ago.
type CachedFailure string

// Error returns the text.
func (e CachedFailure) Error() string { return string(e) }

// The values of Result.Source.
const (
	SourceCache    = "cache"
	SourceUpstream = "upstream"
	SourceSelf     = "self" // nameservers were not asked
)

// A Query is a query on its way through the forwarder. The caller sets the exported
// fields. [Forwarder.Lookup] and [Forwarder.Overloaded] keep what they find in the others,
// and [Forwarder.Answer] starts from there.
type Query struct {
	// Name is the question's name.
	Name wire.Name
	// Key identifies the question in the cache, if Cacheable says that its reply may be
	// given to other clients.
	Key       cache.Key
	Cacheable bool
	// Message is the query as the client sent it.
	Message []byte
	// Server is the nameserver to ask; if it is not valid, those of resolv.conf and the
	// settings are asked.
	Server netip.AddrPort
	// Client is where the query came from.
	Client netip.AddrPort
	// How is the transport of the client's query. Nameservers are asked over the same
	// unless the reply is cached.
	How upstream.How
	// Send is set for zone transfers over TCP. It sends the client all messages except
	// the last.
	Send func(message []byte) error

	found  lookup
	slot   slot
	hashed bool // slot is that of Name
}

// A Result is what a query came to.
type Result struct {
	Reply *reply.Reply
	Age   reply.Age // of Reply, for [reply.Reply.Append]
	// Relayed is a message instead of Reply, for clients that sent the same one. They share it, and it has
	// the ID of one of them.
	Relayed []byte
	Source  string
	Err     error // why there is neither; nil otherwise

	unsure bool // Reply is negative, and a preferred nameserver did not answer
}

// Rcode returns the response code; Err must be nil.
func (r *Result) Rcode() int {
	if r.Relayed != nil {
		return reply.Rcode(r.Relayed)
	}
	return r.Reply.Rcode()
}

// Size returns how many bytes the reply has, about; Err must be nil.
func (r *Result) Size() int {
	if r.Relayed != nil {
		return len(r.Relayed)
	}
	return r.Reply.Size()
}

// usable reports whether r says what the name has.
func (r *Result) usable() bool {
	return r.Err == nil && (r.Rcode() == dns.RcodeSuccess || r.Rcode() == dns.RcodeNameError)
}

// Answer answers a query by the rules in the package comment. It blocks until nameservers
// have answered or failed.
func (f *Forwarder) Answer(q *Query) Result {
	switch {
	case f.client.Echo(q.Name, upstream.Arrival{From: q.Client, To: q.Server}):
		return Result{Err: ErrEcho, Source: SourceSelf}
	case q.Send != nil:
		return f.transfer(q)
	case q.Server.IsValid() || !q.Cacheable:
		return f.relay(q)
	}
	return f.resolve(q)
}

// slotOf returns the slot of a query, which has yet to be taken.
func (f *Forwarder) slotOf(q *Query) slot {
	if !q.hashed {
		q.slot, q.hashed = f.slots.slotFor(q.Name), true
	}
	return q.slot
}

// Overloaded reports whether q would fail at once if it were to ask nameservers now.
func (f *Forwarder) Overloaded(q *Query) bool {
	wanted := f.slotOf(q)
	return !wanted.available() || f.routing.Load().group(q.Name).Overloaded()
}

// relay sends a message as it is, except for its OPT record, which is between neighbours
// (RFC 6891, section 6.2.1), and returns the reply as it is. Clients that send the same
// message at the same time get the same reply.
func (f *Forwarder) relay(q *Query) Result {
	taken, ok := f.acquire(f.slotOf(q))
	if !ok {
		return Result{Err: ErrTooMany, Source: SourceSelf}
	}
	defer taken.release()
	packet := reply.Hop(q.Message, true, ednsUDPSize)
	flight, first := f.joinRelay(relayKey(packet, q))
	group := f.routing.Load().group(q.Name) // not before: see flush
	if q.Server.IsValid() {
		group = f.client.Elsewhere(q.Server)
	}
	switch {
	case flight == nil:
		return Result{Err: errTooManyForms, Source: SourceSelf}
	case !first:
		flight.suspectLater(group)
		<-flight.done
		return flight.result
	case flight.forms >= suspectForms:
		group.Suspect()
	}
	if q.Server.IsValid() {
		f.metrics.direct.Inc()
	}
	result := Result{Source: SourceUpstream}
	result.Relayed, _, result.Err = group.Exchange(context.Background(), packet, q.How|upstream.Verbatim)
	f.flights.land(flight, result)
	return result
}

// joinRelay returns the flight of a relayed message, nil if too many messages with the
// same question were in flight for as long as a query may take. The same message is not
// sent twice at a time, or it would circle forever if a nameserver forwards to this agent.
// A forwarder may also change what it forwards, so the number of messages with one
// question is bounded; further ones wait.
func (f *Forwarder) joinRelay(key flightKey) (flight *flight, first bool) {
	flight, first, crowd := f.flights.joinWithin(key, maxForms)
	if flight != nil {
		return flight, first
	}
	timeout := time.NewTimer(f.routing.Load().timeout)
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

// transfer requests a zone transfer over TCP and sends the client all messages except the
// last, which it returns.
func (f *Forwarder) transfer(q *Query) Result {
	taken, ok := f.acquire(f.slotOf(q))
	if !ok {
		return Result{Err: ErrTooMany, Source: SourceSelf}
	}
	defer taken.release()
	group := f.routing.Load().group(q.Name)
	if q.Server.IsValid() {
		f.metrics.direct.Inc()
		group = f.client.Elsewhere(q.Server)
	}
	result := Result{Source: SourceUpstream}
	result.Relayed, result.Err = group.Transfer(reply.Hop(q.Message, true, ednsUDPSize), q.Send)
	return result
}
