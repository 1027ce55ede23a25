package dnsproxy

import (
	"encoding/binary"
	"errors"
	"math"
	"sync"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/reply"
)

// errUnknown is the result for a name that is not to be forwarded and that nobody has.
var errUnknown = errors.New("a local name that nobody has")

// key is what the cache knows a query by. Its name lives as long as the query.
func (h *handler) key(q *query) cache.Key {
	return cache.Key{
		Name: string(q.name), Type: q.qtype, Class: q.class, DO: q.do, CD: q.cd,
		Expand: h.expandable(q.question),
	}
}

// expandable reports whether the search list is to be walked for a question, whose
// name is none of the table's.
func (h *handler) expandable(q question) bool {
	if h.autopath != AutopathAll || q.qtype != dns.TypeA && q.qtype != dns.TypeAAAA {
		return false
	}
	_, _, ok := h.forwarder.routing.Load().cutSearch(q.name)
	return ok
}

// cutSearch cuts the first domain of the search list off that name is below.
func (r *routing) cutSearch(name wireName) (base, domain wireName, ok bool) {
	for _, domain := range r.search {
		if base, ok := name.cutSuffix(domain); ok {
			return base, domain, true
		}
	}
	return rootName, rootName, false
}

// candidates returns the names that a client's resolver tries beside name, which is
// below a domain of the search list, in its order.
func (r *routing) candidates(name wireName) []wireName {
	base, domain, _ := r.cutSearch(name)
	var names []wireName
	for _, other := range r.search {
		if joined, ok := base.join(other); ok && other != domain {
			names = append(names, joined)
		}
	}
	if base.dots() >= r.conf.Ndots {
		return append([]wireName{base}, names...)
	}
	return append(names, base)
}

// expand walks the search list for a name below one of its domains, as the client's
// resolver would if it were told that the name does not exist. The result is, in
// this order: what the name itself has, if it exists; an alias to the first name of
// the walk that has records of the type; an alias to the first that exists; what was
// said of the name itself.
func (f *forwarder) expand(key cache.Key) resolution {
	key.Expand = false
	asked := f.candidate(key)
	if asked.err != errUnknown && (asked.err != nil || asked.reply.Rcode() != dns.RcodeNameError) { //nolint:errorlint // it is ours, and never wrapped
		return asked
	}
	names := f.routing.Load().candidates(wireName(key.Name))
	found := make([]resolution, len(names))
	var asking sync.WaitGroup
	for i, name := range names {
		candidate := key
		candidate.Name = string(name)
		asking.Go(func() { found[i] = f.candidate(candidate) })
	}
	asking.Wait()
	exists := -1
	for i := range found {
		switch r := found[i].reply; {
		case found[i].err != nil || r.Rcode() != dns.RcodeSuccess:
		case r.HasType(key.Type):
			return alias(key, names[i], found[i])
		case exists < 0:
			exists = i
		}
	}
	if exists >= 0 {
		return alias(key, names[exists], found[exists])
	}
	return asked
}

// candidate is what one name of a walk has.
func (f *forwarder) candidate(key cache.Key) resolution {
	if !f.forwards(question{name: wireName(key.Name), qtype: key.Type, class: key.Class}) {
		return resolution{err: errUnknown, source: sourceSelf}
	}
	return f.resolve(key, overUDP)
}

// alias makes the reply to a question of a CNAME to target and what was found there.
func alias(key cache.Key, target wireName, found resolution) resolution {
	msg, err := found.message(target, key)
	if err != nil {
		return resolution{err: err, source: found.source}
	}
	name := wireName(key.Name).String()
	hdr := dns.RR_Header{Name: name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: leastTTL(msg)}
	msg.Question[0].Name = name
	msg.Answer = append([]dns.RR{&dns.CNAME{Hdr: hdr, Target: target.String()}}, msg.Answer...)
	msg.Compress = true
	wire, err := msg.Pack()
	if err == nil {
		found.reply, err = reply.Parse(wire)
	}
	return resolution{reply: found.reply, source: found.source, err: err}
}

// message returns what was found for the question of key about another name, as a
// message.
func (r *resolution) message(name wireName, key cache.Key) (*dns.Msg, error) {
	query := make([]byte, headerLen, headerLen+len(name)+1+4)
	query = append(append(query, name...), 0)
	query = binary.BigEndian.AppendUint16(query, key.Type)
	query = binary.BigEndian.AppendUint16(query, key.Class)
	wire := r.reply.Append(nil, &reply.Request{Query: query, Limit: dns.MaxMsgSize}, r.age)
	msg := new(dns.Msg)
	return msg, msg.Unpack(wire)
}

// leastTTL returns the least TTL of a message's records, in seconds.
func leastTTL(msg *dns.Msg) uint32 {
	least := uint32(math.MaxInt32)
	for _, records := range [][]dns.RR{msg.Answer, msg.Ns} {
		for _, rr := range records {
			least = min(least, rr.Header().Ttl)
		}
	}
	return least
}
