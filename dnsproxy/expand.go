package dnsproxy

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

var (
	// errUnknown is the result for a local-only name that the table does not have.
	errUnknown = errors.New("a local name that is not in the table")
	// errAnsweredHere is the result for a name of a walk that is not to be forwarded.
	errAnsweredHere = errors.New("the name is answered without nameservers")
)

// key is what the cache knows a query by. Its name lives as long as the query.
func (h *handler) key(q *wire.Query) cache.Key {
	key := cache.Key{Name: string(q.Name), Type: q.Type, Class: q.Class, DO: q.DO, CD: q.CD}
	if h.expandable(q) {
		key.Walk = h.forwarder.walks.Load()
	}
	return key
}

// expandable reports whether the search list is to be walked for a query, whose name is
// not in the table: the rules are in the package comment. The CNAME record that the
// answer begins with is not signed, so clients that validate walk themselves.
func (h *handler) expandable(q *wire.Query) bool {
	if h.autopath != AutopathAll || q.DO || q.CD || q.Type != dns.TypeA && q.Type != dns.TypeAAAA {
		return false
	}
	return h.forwarder.routing.Load().walks(q.Name)
}

// walks reports whether a client's resolver that asks for name is at the start of a walk:
// name is below the first domain of the search list, and what is before that has too few
// dots to be tried as it is first.
func (r *routing) walks(name wire.Name) bool {
	if len(r.search) == 0 {
		return false
	}
	base, ok := name.CutSuffix(r.search[0])
	return ok && base.Dots() < r.conf.Ndots
}

// candidates returns the names that the resolver tries, in its order, when name does not
// exist: the name without a domain stands where the search list has the root, otherwise
// last. It returns none for a name that is not at the start of a walk (any more).
func (r *routing) candidates(name wire.Name) []wire.Name {
	if !r.walks(name) {
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

// A walk tries names in the order of the search list for one client's question.
type walk struct {
	*forwarder
	key   cache.Key // of the question, as if it were not walked for
	renew bool      // ask for what is about to expire
	timer *time.Timer
	left  time.Duration // how long all that was looked at stays as it is
	dead  bool          // the time is up
}

// failureLeft is for how long the result of a walk is kept that passed a name over whose
// nameservers failed.
const failureLeft = 2 * time.Second

// expand walks the search list for the question of key, as the rules in the package
// comment say. left of its result is for how long it may be kept.
func (f *forwarder) expand(key cache.Key, renew bool) resolution {
	key.Walk = 0
	w := &walk{forwarder: f, key: key, renew: renew, timer: time.NewTimer(f.timeout), left: math.MaxInt64}
	defer w.timer.Stop()
	name := wire.Name(key.Name)
	asked := w.wait(w.lookup(name, dns.TypeA))
	if !asked.absent() {
		w.note(&asked)
		return w.result(name, asked, dns.TypeA)
	}
	w.note(&asked)
	names := f.routing.Load().candidates(name)
	lookups := make([]<-chan resolution, len(names))
	for i, candidate := range names {
		lookups[i] = w.lookup(candidate, dns.TypeA)
	}
	failed := false
	for i, candidate := range names {
		found, qtype := w.wait(lookups[i]), dns.TypeA
		if found.empty() {
			w.note(&found)
			found, qtype = w.wait(w.lookup(candidate, dns.TypeAAAA)), dns.TypeAAAA
		}
		w.note(&found)
		switch {
		case found.err == errAnsweredHere: //nolint:errorlint // it is ours, and never wrapped
			// The client comes to it by itself.
			return w.result(name, asked, key.Type)
		case found.usable() && found.reply.HasType(qtype):
			return w.result(candidate, found, qtype)
		case found.err != errUnknown && !found.usable(): //nolint:errorlint // it is ours, and never wrapped
			failed = true
		}
	}
	if failed {
		w.left = 0 // the client walks by itself, and is told which names fail
	}
	return w.result(name, asked, key.Type)
}

// absent reports whether a name is known not to exist.
func (r *resolution) absent() bool {
	return r.err == errUnknown || r.err == nil && r.reply.Rcode() == dns.RcodeNameError //nolint:errorlint // it is ours, and never wrapped
}

// empty reports whether a name exists that has no A record.
func (r *resolution) empty() bool {
	return r.err == nil && r.reply.Rcode() == dns.RcodeSuccess && !r.reply.HasType(dns.TypeA)
}

// lookup starts to look up what a client would be told of a name. The search goes on if
// the walk ends before, for the cache.
func (w *walk) lookup(name wire.Name, qtype uint16) <-chan resolution {
	found := make(chan resolution, 1)
	key := w.key
	key.Name, key.Type = string(name), qtype
	switch w.decides(wire.Question{Name: name, Type: qtype, Class: key.Class}) {
	case actForward:
	case actUnknown:
		found <- resolution{err: errUnknown, source: sourceSelf}
		return found
	default:
		found <- resolution{err: errAnsweredHere, source: sourceSelf}
		return found
	}
	result, ok := w.cached(key)
	if ok && (!w.renew || !result.aging) {
		found <- result
		return found
	}
	w.background.Go(func() { found <- w.fetch(key, overUDP, result) })
	return found
}

// wait returns what a lookup has found, or an error when the time of the walk is up.
func (w *walk) wait(lookup <-chan resolution) resolution {
	late := resolution{err: upstream.ErrTimeout, source: sourceSelf}
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

// note takes into account for how long a part of the walk stays as it is.
func (w *walk) note(found *resolution) {
	switch {
	case found.err == errUnknown || found.err == errAnsweredHere: //nolint:errorlint // they are ours, and never wrapped
		// It stays so for as long as the table does, and with that the key of the walk.
	case found.usable():
		w.left = min(w.left, found.left)
	default:
		w.left = min(w.left, failureLeft)
	}
}

// result makes the answer to the question of the walk: what target, the name asked for or
// an alias of it, has of the type asked for. found is what it has of the type qtype.
func (w *walk) result(target wire.Name, found resolution, qtype uint16) resolution {
	if qtype != w.key.Type {
		found = w.wait(w.lookup(target, w.key.Type))
		w.note(&found)
	}
	name := wire.Name(w.key.Name)
	switch {
	case found.err != nil || !found.usable(), target == name && !found.age.Cached:
	default:
		found = w.derive(target, found)
	}
	if found.age.Stale || !found.usable() {
		w.left = 0
	}
	found.left = max(0, w.left)
	return found
}

// derive makes a reply to the question of the walk of what was found for target, with the
// TTLs that are left. If target is another name a CNAME record leads to its addresses.
func (w *walk) derive(target wire.Name, found resolution) resolution {
	failed := func(err error) resolution { return resolution{err: err, source: found.source} }
	msg, err := found.message(target, w.key)
	if err != nil {
		return failed(err)
	}
	if name := wire.Name(w.key.Name); target != name {
		w.alias(msg, name, target)
		msg.Rcode = dns.RcodeSuccess // also of servers that say NXDOMAIN for want of an AAAA record (RFC 4074)
	}
	msg.Compress = true
	wire, err := msg.Pack()
	if err != nil {
		return failed(err)
	}
	if found.reply, err = reply.Parse(wire); err != nil {
		return failed(err)
	}
	found.age.Cached, found.age.Seconds = found.age.Stale, 0
	return found
}

// alias makes msg, an answer for target, one for name. Without an address of the type
// asked for it has no CNAME record: glibc ends a walk at one, also if it asks for one
// family only and a later name has what it wants.
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

// message returns what was found for the question of key about another name, as a
// message. Of TTLs that began a part of a second ago the whole second is gone.
func (r *resolution) message(name wire.Name, key cache.Key) (*dns.Msg, error) {
	query := make([]byte, wire.HeaderLen, wire.HeaderLen+len(name)+1+4)
	query = append(append(query, name...), 0)
	query = binary.BigEndian.AppendUint16(query, key.Type)
	query = binary.BigEndian.AppendUint16(query, key.Class)
	age := r.age
	if age.Cached {
		age.Seconds++
	}
	wire := r.reply.Append(nil, &reply.Request{Query: query, Limit: dns.MaxMsgSize}, age)
	msg := new(dns.Msg)
	return msg, msg.Unpack(wire)
}
