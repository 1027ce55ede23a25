package forward

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"slices"
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

// staleAfter is how long clients wait for nameservers before they get a stale answer. It is the client response
// timer of RFC 8767, section 5, and runs from the first client's query. If nameservers are down, or failed to answer
// the question the last time, clients do not wait.
const staleAfter = 1800 * time.Millisecond

// Reasons for stale replies. An error of nameservers is another reason.
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

	// Attempts has what was sent to nameservers: see [upstream.Answer.Attempts]. It has everything only if Query.Trace
	// was set. If several clients have sent the same query, the Query of the first client counts.
	Attempts []upstream.Attempt

	failure string // why a stale reply is used; for the method Failure
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

// Exists reports whether a nameserver has the name of the question: it has answered, but not NXDOMAIN. If the name is
// that of a CNAME record, NXDOMAIN is about another name (RFC 6604).
func (r *Result) Exists() bool {
	switch {
	case !r.usable():
		return false
	case r.Rcode() == dns.RcodeSuccess:
		return true
	case r.Relayed != nil:
		return wire.Count(r.Relayed, wire.AnswerSection) > 0
	}
	return r.Reply.Answers() > 0
}

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

// withFailure returns a copy of the stale reply r. In the copy, the reason for using a stale reply is the failure in
// result.
func (r *Result) withFailure(result *Result) *Result {
	stale := *r
	stale.failure, stale.Attempts = result.Failure(), result.Attempts
	return &stale
}

// usable reports whether r is an answer: NOERROR or NXDOMAIN.
func (r *Result) usable() bool {
	return r.Err == nil && (r.Rcode() == dns.RcodeSuccess || r.Rcode() == dns.RcodeNameError)
}

// Derive returns a copy of r whose reply the function edit has changed. r must be the result of a question for name
// with the type and class of key, and its Relayed and Err must be nil. The TTLs in the copy are already counted
// down.
//
// A long reply is cut to limit bytes before edit gets it, so that unpacking it does not cost more than the response
// needs.
func (r *Result) Derive(name wire.Name, key cache.Key, limit int, edit func(*dns.Msg)) (Result, error) {
	msg, err := r.message(name, key, limit)
	if err != nil {
		return Result{}, err
	}
	edit(msg)
	msg.Compress = true
	if truncated := msg.Truncated; msg.Len() > dns.MaxMsgSize {
		msg.Truncate(dns.MaxMsgSize)
		msg.Truncated = truncated // Truncate may have set it, but a client cannot ask for more than 64 KiB
	}
	packed, err := msg.Pack()
	if err != nil {
		return Result{}, err
	}
	derived := *r
	if derived.Reply, err = reply.Parse(packed); err != nil {
		return Result{}, err
	}
	derived.Age.Cached, derived.Age.Seconds = r.Age.Stale, 0
	return derived, nil
}

// message returns r's reply as a message of the DNS library. Its question has the given name, and the type and class
// of key. When TTLs are counted down, a second that has begun counts as a whole one.
func (r *Result) message(name wire.Name, key cache.Key, limit int) (*dns.Msg, error) {
	query := wire.AppendQuestion(make([]byte, wire.HeaderLen), name, key.Type, key.Class)
	age := r.Age
	if age.Cached {
		age.Seconds++
	}
	packed := r.Reply.Append(nil, &reply.Request{Query: query, Limit: limit}, age)
	return unpack(packed)
}

// unpack unpacks a message that is well-formed, except perhaps for the data of its records. It parses the data of a
// record only if there may be compressed names in it.
func unpack(packed []byte) (*dns.Msg, error) {
	questionEnd, err := wire.WalkQuestions(packed)
	if err != nil {
		return nil, err
	}
	header := slices.Clone(packed[:questionEnd])
	wire.PutCounts(header, &[wire.Sections]uint16{uint16(wire.Count(packed, 0))}) //nolint:gosec // the count has 16 bits
	msg := new(dns.Msg)
	if err := msg.Unpack(header); err != nil {
		return nil, err
	}
	sections := map[int]*[]dns.RR{wire.AnswerSection: &msg.Answer, wire.AuthoritySection: &msg.Ns,
		wire.AdditionalSection: &msg.Extra}
	w := wire.Walk(packed, questionEnd)
	for w.Next() {
		rr, err := unpackRecord(packed, &w)
		if err != nil {
			return nil, err
		}
		*sections[w.Section] = append(*sections[w.Section], rr)
	}
	return msg, w.Err
}

func unpackRecord(packed []byte, w *wire.Walker) (dns.RR, error) {
	if w.Type() == dns.TypeOPT || slices.Contains(compressing[:], w.Type()) {
		rr, _, err := dns.UnpackRR(packed, w.Owner)
		return rr, err
	}
	owner, _, err := dns.UnpackDomainName(packed, w.Owner)
	fixed := packed[w.Fixed:]
	return &dns.RFC3597{
		Hdr: dns.RR_Header{
			Name: owner, Rrtype: w.Type(), Class: binary.BigEndian.Uint16(fixed[2:]), Ttl: binary.BigEndian.Uint32(fixed[4:]),
		},
		Rdata: hex.EncodeToString(packed[w.Fixed+wire.FixedLen : w.End]),
	}, err
}

// compressing lists the types whose data may have compressed names: the types of RFC 1035, and the
// types that RFC 3597, section 4, adds.
var compressing = [...]uint16{ //nolint:gochecknoglobals // a constant
	dns.TypeNS, dns.TypeMD, dns.TypeMF, dns.TypeCNAME, dns.TypeSOA, dns.TypeMB, dns.TypeMG, dns.TypeMR, dns.TypePTR,
	dns.TypeMINFO, dns.TypeMX, dns.TypeRP, dns.TypeAFSDB, dns.TypeRT, dns.TypeSIG, dns.TypePX, dns.TypeNXT, dns.TypeNAPTR,
	dns.TypeSRV,
}
