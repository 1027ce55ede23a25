package forward

import (
	"errors"
	"time"

	"github.com/miekg/dns"

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

// staleAfter is how long clients wait for nameservers before they get a stale answer. It is the client response
// timer of RFC 8767, section 5, and runs from the first client's query. If nameservers are down, or failed to answer
// the question the last time, clients do not wait.
const staleAfter = 1800 * time.Millisecond

// Reasons for stale replies. An error of nameservers is another reason.
var (
	errDown = errors.New("no nameserver answered: all are down")
	errLate = errors.New("no nameserver answered: none within " + staleAfter.String())
)

// A CachedFailure says why nameservers did not answer the same question a moment ago.
type CachedFailure string

// Error returns the text.
func (e CachedFailure) Error() string { return string(e) }

// The values of Result.Source.
const (
	SourceCache         = "cache"          // a reply that has not expired
	SourceStale         = "stale"          // a reply of the cache that has expired
	SourceCachedFailure = "cached_failure" // the cache has noted that nameservers failed a moment ago
	SourceUpstream      = "upstream"
	SourceSelf          = "self" // nameservers were not asked
)

// A Result is the result of a query: a reply or an error.
type Result struct {
	Reply *reply.Reply
	Age   reply.Age // of Reply, for [reply.Reply.Append]
	// Relayed is the nameserver's message if the query was relayed; then Reply is nil. Clients that sent the
	// same message share it, so each must copy it and set the ID of its own query.
	Relayed []byte
	Source  string
	// Server names the nameserver that sent the reply, in the form of [upstream.Spec.String].
	Server string
	Err    error // why there is no reply; nil if there is one

	call    upstream.Call // for the method Attempts
	failure string        // why a stale reply is used; for the method Failure
}

// Attempts returns what was sent to nameservers: see [upstream.Call.Attempts]. It is nil if they were not asked.
func (r *Result) Attempts() []upstream.Attempt { return r.call.Attempts() }

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

// Denied reports whether nameservers say that the name of the question does not exist. If the name is that of a CNAME
// record, NXDOMAIN is about another name (RFC 6604).
func (r *Result) Denied() bool {
	return r.Err == nil && r.Rcode() == dns.RcodeNameError && (r.Relayed != nil || r.Reply.Answers() == 0)
}

// Exists reports whether a nameserver has the name of the question.
func (r *Result) Exists() bool { return r.usable() && !r.Denied() }

// Failure says why nameservers have not answered. It is empty if they have answered, and may be empty for a stale
// reply.
func (r *Result) Failure() string {
	switch {
	case r.usable():
		return r.failure
	case r.Err != nil:
		return r.Err.Error()
	}
	return r.Server + ": " + wire.RcodeName(r.Rcode())
}

// Size returns about how many bytes the reply has; Err must be nil.
func (r *Result) Size() int {
	if r.Relayed != nil {
		return len(r.Relayed)
	}
	return r.Reply.Size()
}

// usable reports whether r is an answer: NOERROR or NXDOMAIN.
func (r *Result) usable() bool {
	return r.Err == nil && (r.Rcode() == dns.RcodeSuccess || r.Rcode() == dns.RcodeNameError)
}
