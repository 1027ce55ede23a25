package forward

import (
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
	// ErrTooMany is returned if too many queries are in flight.
	ErrTooMany = errors.New("too many queries are in flight")
	// ErrBadReply is returned if a nameserver's reply cannot be parsed.
	ErrBadReply = errors.New("a nameserver's reply cannot be read")
	// ErrEcho is returned for a loop probe of this agent that came back as a query.
	ErrEcho = errors.New("this query is a probe of this agent that a nameserver sent back")
)

// The reasons, besides errors, for stale replies.
var (
	errDown = errors.New("all nameservers are down")
	errLate = errors.New("no nameserver answered within " + staleAfter.String())
)

// A CachedFailure says why nameservers did not answer the same question a moment ago.
type CachedFailure string

// Error returns the text.
func (e CachedFailure) Error() string { return string(e) }

// The values of Result.Source.
const (
	SourceCache         = "cache"          // a reply that has not expired
	SourceStale         = "stale"          // a reply of the cache that has expired
	SourceCachedFailure = "cached_failure" // the cache: nameservers failed a moment ago
	SourceUpstream      = "upstream"
	SourceSelf          = "self" // nameservers were not asked
)

// A Query is a query on its way through the forwarder. The caller sets the exported
// fields. [Forwarder.Lookup] keeps what it finds in the others, and [Forwarder.Begin] and
// [Forwarder.Answer] start from there.
type Query struct {
	// Name is the question's name.
	Name wire.Name
	// Key identifies the question in the cache, if Cacheable is set: then its reply may
	// be given to other clients.
	Key       cache.Key
	Cacheable bool
	// Message is the query as the client sent it.
	Message []byte
	// Server is the nameserver to ask; if it is not valid, the nameservers of
	// resolv.conf and the settings are asked.
	Server netip.AddrPort
	// Client is where the query came from.
	Client netip.AddrPort
	// How is the transport of the client's query. Nameservers are asked over the same
	// unless the reply is cached.
	How upstream.How
	// Send is set for zone transfers over TCP. It sends the client all messages except
	// the last.
	Send func(message []byte) error
	// Trace asks for Result.Attempts.
	Trace bool

	found lookup
}

// A Result is what a query came to.
type Result struct {
	Reply *reply.Reply
	Age   reply.Age // of Reply, for [reply.Reply.Append]
	// Relayed is a message instead of Reply, for clients that sent the same one. They share it, and it has
	// the ID of one of them.
	Relayed []byte
	Source  string
	// Server names the nameserver that sent the reply, as [upstream.Spec.String] does.
	Server string
	Err    error // why there is no reply; nil otherwise

	// Attempts are what nameservers were sent, as [upstream.Answer.Attempts]: all of them if the first of the clients
	// that sent the same query has asked for it.
	Attempts []upstream.Attempt

	failure string // of a stale reply, see Failure
}

// Expired returns how long ago a stale reply has expired.
func (r *Result) Expired() time.Duration {
	ttl, _ := r.Reply.TTL()
	return time.Duration(r.Age.Seconds)*time.Second - min(ttl, time.Duration(r.Age.Max)*time.Second)
}

// Rcode returns the response code; Err must be nil.
func (r *Result) Rcode() int {
	if r.Relayed != nil {
		return reply.Rcode(r.Relayed)
	}
	return r.Reply.Rcode()
}

// because returns a stale reply that is used since asking nameservers came to result.
func (r *Result) because(result *Result) *Result {
	stale := *r
	stale.failure, stale.Attempts = result.Failure(), result.Attempts
	return &stale
}

// Failure says why nameservers have no answer. It is empty if they have one, and may be for a stale reply.
func (r *Result) Failure() string {
	switch {
	case r.usable():
		return r.failure
	case r.Err != nil:
		return r.Err.Error()
	}
	return r.Server + ": " + upstream.RcodeName(r.Rcode())
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

// Begin begins to answer a query by the rules in the package comment, and returns. It keeps nothing of q;
// q.Send is not used. The client receives the result, perhaps before Begin returns.
func (f *Forwarder) Begin(q *Query, client Client) {
	switch {
	case f.client.Echo(q.Name, upstream.Arrival{From: q.Client, To: q.Server}):
		client.Receive(&Result{Err: ErrEcho, Source: SourceSelf})
	case q.Server.IsValid() || !q.Cacheable:
		f.relay(q, client)
	default:
		f.resolve(q, client)
	}
}

// Answer is Begin for a caller that waits, and for zone transfers.
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

// Receive passes the result on.
func (w waiter) Receive(result *Result) { w <- result }

// Full reports whether q would fail at once if it were to ask nameservers now, since all of them are
// silent.
func (f *Forwarder) Full(q *Query) bool { return f.routing.Load().group(q.Name).Full() }

// board seats a client in a flight. If there is no place the client gets its old reply, or an error, and
// flight is nil. group has the nameservers that will be asked: if they are silent, others keep their places.
func (f *Forwarder) board(key flightKey, who seat, group *upstream.Group) boarding {
	b := f.flights.join(f, key, who, who.client != nil && !group.Full())
	f.metrics.overflows.Add(uint64(b.end())) //nolint:gosec // a length
	if b.flight == nil && who.client != nil {
		f.metrics.overflows.Add(1)
		who.give(&Result{Err: ErrTooMany, Source: SourceSelf})
	}
	return b
}

// relay sends a message as it is, except for its OPT record, which is between neighbours
// (RFC 6891, section 6.2.1), and returns the reply as it is. Clients that send the same
// message at the same time get the same reply: the same message is not
// sent twice at a time, or it would circle forever if a nameserver forwards to this agent.
func (f *Forwarder) relay(q *Query, client Client) {
	packet := reply.Hop(q.Message, true, ednsUDPSize)
	group := func() *upstream.Group {
		if q.Server.IsValid() {
			return f.client.Elsewhere(q.Server)
		}
		return f.routing.Load().group(q.Name)
	}
	b := f.board(relayKey(packet, q), seat{client: client}, group())
	switch {
	case b.flight == nil:
		return
	case !b.first:
		f.flights.suspectLater(b.flight, group())
		return
	}
	b.flight.traced = q.Trace
	asked := group() // not before: see flush
	if b.forms >= suspectForms {
		asked.Suspect()
	}
	if q.Server.IsValid() {
		f.metrics.direct.Inc()
	}
	f.flights.lead(b.flight, asked.Start(packet, b.flight.how(q.How|upstream.Verbatim), b.flight))
}

// transfer requests a zone transfer over TCP and sends the client all messages except the
// last, which it returns.
func (f *Forwarder) transfer(q *Query) Result {
	release, ok := f.Hold()
	if !ok {
		return Result{Err: ErrTooMany, Source: SourceSelf}
	}
	defer release()
	group := f.routing.Load().group(q.Name)
	if q.Server.IsValid() {
		f.metrics.direct.Inc()
		group = f.client.Elsewhere(q.Server)
	}
	last, err := group.Transfer(reply.Hop(q.Message, true, ednsUDPSize), q.Send)
	return Result{Relayed: last.Reply, Source: SourceUpstream, Server: last.Server, Err: err}
}
