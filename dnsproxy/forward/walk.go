package forward

import (
	"errors"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Step is one name of a walk of the search list, and what happens to it.
type Step struct {
	Name wire.Name
	Fate Fate
}

// A Fate says how the name of a [Step] is looked up.
type Fate uint8

// The values of Fate.
const (
	// Forwarded: by asking nameservers.
	Forwarded Fate = iota
	// Absent: not at all, it does not exist.
	Absent
	// AnsweredHere: not by the forwarder. The walk ends there, and the client asks for it.
	AnsweredHere
)

// errAnsweredHere is the error of a lookup of an AnsweredHere name.
var errAnsweredHere = errors.New("the name is answered without nameservers")

// StartsWalk reports whether a resolver that asks for name is at the start of a walk of the
// search list: name is below the first domain of the list, and what is before that domain
// has too few dots to be tried as it is first.
func (f *Forwarder) StartsWalk(name wire.Name) bool { return f.routing.Load().startsWalk(name) }

// WalkNames returns name and then the names that a resolver tries, in its order, if name
// does not exist. There are none if name is not (or no longer) at the start of a walk. The
// names do not share memory with name.
func (f *Forwarder) WalkNames(name wire.Name) []wire.Name {
	name = wire.Name(strings.Clone(string(name)))
	return append([]wire.Name{name}, f.routing.Load().candidates(name)...)
}

func (r *routing) startsWalk(name wire.Name) bool {
	if len(r.search) == 0 {
		return false
	}
	base, ok := name.CutSuffix(r.search[0])
	return ok && base.Dots() < r.conf.Ndots
}

// candidates returns the names of a walk after name. The name without a domain stands where
// the search list has the root, otherwise last.
func (r *routing) candidates(name wire.Name) []wire.Name {
	if !r.startsWalk(name) {
		return nil
	}
	base, _ := name.CutSuffix(r.search[0])
	var names []wire.Name
	for i, domain := range r.search[1:] {
		if 1+i == r.asIs {
			names = append(names, base)
		}
		if joined, ok := base.Join(domain); ok {
			names = append(names, joined)
		}
	}
	if r.asIs == 0 || r.asIs >= len(r.search) {
		names = append(names, base)
	}
	return names
}

// A walk tries names in the order of the search list for the question of one client.
type walk struct {
	*Forwarder
	key   cache.Key // of the question, as if it were not walked for
	renew bool      // ask for what is about to expire
	timer *time.Timer
	left  time.Duration // how long everything that the walk has seen stays valid
	dead  bool          // the time is up
}

// failureLeft is how long the result of a walk is cached that passed over a name whose
// nameservers failed.
const failureLeft = 2 * time.Second

// walk walks the search list for the question of key, by the rules in the package comment.
// steps has the question's name first. The left of the result is how long it may be cached.
func (f *Forwarder) walk(key cache.Key, steps []Step, renew bool) Result {
	key.Walk = 0
	w := &walk{Forwarder: f, key: key, renew: renew, timer: time.NewTimer(f.config.Timeout), left: math.MaxInt64}
	defer w.timer.Stop()
	itself, steps := steps[0], steps[1:]
	asked := w.wait(w.lookup(itself, dns.TypeA))
	w.note(&asked)
	if !asked.absent() {
		return w.result(itself, asked, dns.TypeA)
	}
	lookups := make([]<-chan Result, len(steps))
	for i, step := range steps {
		lookups[i] = w.lookup(step, dns.TypeA)
	}
	failed := false
	for i, step := range steps {
		found, qtype := w.wait(lookups[i]), dns.TypeA
		if found.empty() {
			w.note(&found)
			found, qtype = w.wait(w.lookup(step, dns.TypeAAAA)), dns.TypeAAAA
		}
		w.note(&found)
		switch {
		case found.Err == errAnsweredHere: //nolint:errorlint // never wrapped
			return w.result(itself, asked, key.Type)
		case found.usable() && found.Reply.HasType(qtype):
			return w.result(step, found, qtype)
		case found.Err != ErrAbsent && !found.usable(): //nolint:errorlint // never wrapped
			failed = true
		}
	}
	if failed {
		w.left = 0 // the client walks by itself and sees which names fail
	}
	return w.result(itself, asked, key.Type)
}

// absent reports whether a name is known not to exist.
func (r *Result) absent() bool {
	return r.Err == ErrAbsent || r.Err == nil && r.Reply.Rcode() == dns.RcodeNameError //nolint:errorlint // never wrapped
}

// empty reports whether a name exists that has no A record.
func (r *Result) empty() bool {
	return r.Err == nil && r.Reply.Rcode() == dns.RcodeSuccess && !r.Reply.HasType(dns.TypeA)
}

// lookup starts to look a name up. It continues for the cache if the walk ends before.
func (w *walk) lookup(step Step, qtype uint16) <-chan Result {
	found := make(chan Result, 1)
	switch step.Fate {
	case Absent:
		found <- Result{Err: ErrAbsent, Source: SourceSelf}
		return found
	case AnsweredHere:
		found <- Result{Err: errAnsweredHere, Source: SourceSelf}
		return found
	case Forwarded:
	}
	q := &Query{Name: step.Name, Key: w.key, Cacheable: true, How: upstream.UDPOnly}
	q.Key.Name, q.Key.Type = string(step.Name), qtype
	result, ok := w.Lookup(q)
	if q.RefreshDue() {
		w.Refresh(q)
	}
	if ok && (!w.renew || !result.aging) {
		found <- *result
		return found
	}
	w.background.Go(func() { found <- w.fetch(q) })
	return found
}

// wait returns what a lookup has found, or an error when the time of the walk is up.
func (w *walk) wait(lookup <-chan Result) Result {
	late := Result{Err: upstream.ErrTimeout, Source: SourceSelf}
	if w.dead {
		select {
		case found := <-lookup:
			return found
		default:
			return late
		}
	}
	select {
	case found := <-lookup:
		return found
	case <-w.timer.C:
		w.dead = true
		return w.wait(lookup)
	}
}

// note takes into account how long a part of the walk stays valid.
func (w *walk) note(found *Result) {
	switch {
	case found.Err == ErrAbsent || found.Err == errAnsweredHere: //nolint:errorlint // never wrapped
		// As long as the table and the search list, and with them the key of the walk.
	case found.usable():
		w.left = min(w.left, found.left)
	default:
		w.left = min(w.left, failureLeft)
	}
}

// result makes the answer to the question of the walk: what target, the question's name or
// another, has of the question's type. found is what it has of the type qtype.
func (w *walk) result(target Step, found Result, qtype uint16) Result {
	if qtype != w.key.Type {
		found = w.wait(w.lookup(target, w.key.Type))
		w.note(&found)
	}
	switch {
	case !found.usable(), target.Name == wire.Name(w.key.Name) && !found.Age.Cached:
	default:
		found = w.derive(target.Name, found)
	}
	if found.Age.Stale || !found.usable() {
		w.left = 0
	}
	found.left = max(0, w.left)
	return found
}

// derive makes a reply to the question of the walk from what was found for target, with the
// TTLs that are left. If target is another name, a CNAME record points to it.
func (w *walk) derive(target wire.Name, found Result) Result {
	derived, err := found.Derive(target, w.key, dns.MaxMsgSize, func(msg *dns.Msg) {
		if name := wire.Name(w.key.Name); target != name {
			w.alias(msg, name, target)
			msg.Rcode = dns.RcodeSuccess // also of servers that say NXDOMAIN for want of an AAAA record (RFC 4074)
		}
	})
	if err != nil {
		return Result{Err: err, Source: found.Source}
	}
	return derived
}

// Derive returns a result with another reply, which edit makes of r's, with the TTLs that are left. r has
// what was found for name and the other fields of the question of key. Its Relayed and Err are nil. Of r's
// reply, edit gets what fits in limit bytes, so that the cost follows from the response.
func (r *Result) Derive(name wire.Name, key cache.Key, limit int, edit func(*dns.Msg)) (Result, error) {
	msg, err := r.message(name, key, limit)
	if err != nil {
		return Result{}, err
	}
	edit(msg)
	msg.Compress = true
	if truncated := msg.Truncated; msg.Len() > dns.MaxMsgSize {
		msg.Truncate(dns.MaxMsgSize)
		msg.Truncated = truncated // over TCP a client could do nothing about it
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

// alias turns msg, an answer for target, into one for name. Without an address of the
// question's type it has no CNAME record: glibc ends its walk at one, even if it asks for
// one family only and a later name has an address of that family.
func (w *walk) alias(msg *dns.Msg, name, target wire.Name) {
	msg.Question[0].Name = name.String()
	if !slices.ContainsFunc(msg.Answer, func(rr dns.RR) bool { return rr.Header().Rrtype == w.key.Type }) {
		msg.Answer = nil
		return
	}
	ttl := uint32(max(0, min(w.left, math.MaxInt32*time.Second)) / time.Second)
	for _, records := range [][]dns.RR{msg.Answer, msg.Ns} {
		for _, rr := range records {
			ttl = min(ttl, rr.Header().Ttl)
		}
	}
	hdr := dns.RR_Header{Name: msg.Question[0].Name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: ttl}
	msg.Answer = append([]dns.RR{&dns.CNAME{Hdr: hdr, Target: target.String()}}, msg.Answer...)
}

// message returns what was found for name and the question of key as a message. A second
// that has begun counts as a whole one in TTLs.
func (r *Result) message(name wire.Name, key cache.Key, limit int) (*dns.Msg, error) {
	query := wire.AppendQuestion(make([]byte, wire.HeaderLen), name, key.Type, key.Class)
	age := r.Age
	if age.Cached {
		age.Seconds++
	}
	packed := r.Reply.Append(nil, &reply.Request{Query: query, Limit: limit}, age)
	return unpack(packed)
}
