package guard

import (
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

const (
	// Records are kept in sets of setSize names that have the same hash. In a full set, the name that was used least recently
	// gives way, unless it was used since the last [Guard.Sweep]. So many different names that a client asks for take neither
	// time nor memory.
	sets, setSize = 256, 16
	// maxPerName bounds the types and the ports of a name.
	maxPerName = 32
)

// A recorder counts what a workload asks for and reaches. Counting what it knows takes neither a lock nor an allocation.
type recorder struct {
	since   atomic.Pointer[time.Time]
	seed    maphash.Seed
	records *[sets][setSize]atomic.Pointer[entry]
	adding  sync.Mutex // held by who adds an entry

	queries, connections [2]atomic.Uint64 // denied and allowed

	answered sync.Mutex
	byAddr   *simplelru.LRU[netip.Addr, wire.Name] // the name whose answer had an address last; in audit
}

// An entry is the record of a name.
type entry struct {
	name   wire.Name
	rule   atomic.Pointer[Rule] // the rule that was used last
	asked  atomic.Uint64
	exists atomic.Bool
	fresh  atomic.Bool // it was used since the last sweep
	last   atomic.Int64

	mu    sync.Mutex
	types []uint16
	ports map[uint16]uint64

	private bool // guarded by mu
}

// init makes a recorder without records.
func (r *recorder) init() {
	now := time.Now().UTC()
	r.since.Store(&now)
	r.seed, r.records = maphash.MakeSeed(), new([sets][setSize]atomic.Pointer[entry])
	r.byAddr, _ = simplelru.NewLRU[netip.Addr, wire.Name](maxRecent, nil) // fails only for a size below 1
}

// Answered records that the answer about a name had an address.
func (r *recorder) Answered(name wire.Name, addr netip.Addr) {
	r.answered.Lock()
	defer r.answered.Unlock()
	r.byAddr.Add(addr.Unmap(), wire.Name(strings.Clone(string(name))))
}

// NameOf returns the name whose answer had an address last, or the root.
func (r *recorder) NameOf(addr netip.Addr) wire.Name {
	r.answered.Lock()
	defer r.answered.Unlock()
	name, _ := r.byAddr.Get(addr.Unmap())
	return name
}

// A Found says what nameservers have for a question.
type Found uint8

// The values of Found.
const (
	Nothing Found = iota // the name does not exist, or nameservers were not asked
	Exists               // the name exists
	Answers              // there are records of the type
)

// Asked records a question for a name, the rule that [Policy.Judge] has returned for it, and what nameservers have.
func (r *recorder) Asked(name wire.Name, qtype uint16, rule *Rule, found Found) {
	count(&r.queries, rule.allows())
	e := r.use(name, rule)
	if e == nil {
		return
	}
	e.asked.Add(1)
	if found != Nothing && !e.exists.Load() {
		e.exists.Store(true)
	}
	switch {
	case found != Answers, qtype == dns.TypeA, qtype == dns.TypeAAAA, qtype == dns.TypeHTTPS, qtype == dns.TypeSVCB:
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.addType(qtype)
}

// addType adds a type to those of an entry. e.mu must be held.
func (e *entry) addType(qtype uint16) {
	if !slices.Contains(e.types, qtype) && len(e.types) < maxPerName {
		e.types = append(e.types, qtype)
	}
}

// Connected records a connection to a VIP of a name or, in audit, to an address of the name, and the rule that [Policy.Judge] has returned for the name. carried
// reports whether the connection was made.
func (r *recorder) Connected(name wire.Name, to netip.AddrPort, rule *Rule, carried bool) {
	count(&r.connections, carried)
	e := r.use(name, rule)
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, known := e.ports[to.Port()]; known || len(e.ports) < maxPerName {
		e.ports[to.Port()]++
	}
	addr := to.Addr().Unmap()
	e.private = e.private || addr.IsPrivate() || netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64}), 10).Contains(addr) // RFC 6598
}

// count counts in one of two counters.
func count(counters *[2]atomic.Uint64, allowed bool) {
	if allowed {
		counters[1].Add(1)
	} else {
		counters[0].Add(1)
	}
}

// use returns the entry of a name, or nil if there is no room for it.
func (r *recorder) use(name wire.Name, rule *Rule) *entry {
	if name == wire.Root {
		return nil
	}
	set := &r.records[maphash.String(r.seed, string(name))%sets]
	e, free := find(set, name)
	if e == nil {
		if free < 0 || !r.adding.TryLock() {
			return nil
		}
		defer r.adding.Unlock()
		e, free = find(set, name)
		if e == nil && free < 0 {
			return nil
		} else if e == nil {
			e = &entry{name: wire.Name(strings.Clone(string(name))), ports: map[uint16]uint64{}}
			set[free].Store(e)
		}
	}
	if e.rule.Load() != rule {
		e.rule.Store(rule)
	}
	if !e.fresh.Load() {
		e.fresh.Store(true)
	}
	return e
}

// find returns the entry of a name, or the place that is free for it, or gives way; -1 if there is none.
func find(set *[setSize]atomic.Pointer[entry], name wire.Name) (e *entry, free int) {
	free = -1
	oldest := int64(0)
	for i := range set {
		switch e := set[i].Load(); {
		case e == nil: // the next ones are, too
			return nil, i
		case e.name == name:
			return e, i
		case !e.fresh.Load() && (free < 0 || e.last.Load() < oldest):
			free, oldest = i, e.last.Load()
		}
	}
	return nil, free
}

// Sweep sets the time of the names that were used since the last Sweep. It is called about once a second.
func (r *recorder) Sweep() {
	now := time.Now().Unix()
	for i := range r.records {
		for j := range r.records[i] {
			if e := r.records[i][j].Load(); e != nil && e.fresh.Load() {
				e.last.Store(now)
				e.fresh.Store(false)
			}
		}
	}
}

// Records returns what was recorded.
func (r *recorder) Records() Records {
	r.Sweep()
	all := Records{Since: *r.since.Load()}
	for i := range r.records {
		for j := range r.records[i] {
			if e := r.records[i][j].Load(); e != nil {
				all.Names = append(all.Names, e.record())
			}
		}
	}
	slices.SortFunc(all.Names, func(a, b Record) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// Restore adds records of an earlier process, with the rules of today's policy.
func (g *Guard) Restore(old Records) {
	if !old.Since.IsZero() {
		g.since.Store(&old.Since)
	}
	for _, r := range old.Names {
		name, err := wire.ParseName(r.Name)
		if err != nil {
			continue
		}
		var rule *Rule
		if p := g.Policy(); p != nil {
			_, rule = p.Judge(name, dns.TypeA)
		}
		e := g.use(name, rule)
		if e == nil {
			continue
		}
		e.asked.Add(r.Asked)
		e.exists.Store(e.exists.Load() || r.Exists)
		e.mu.Lock()
		e.private = e.private || r.Private
		for port, n := range r.Ports {
			e.ports[port] += n
		}
		for _, text := range r.Types {
			if code, err := wire.ParseType(text); err == nil {
				e.addType(code)
			}
		}
		e.mu.Unlock()
		e.last.Store(r.Last.Unix())
		e.fresh.Store(false)
	}
}

// record returns the record of an entry.
func (e *entry) record() Record {
	r := Record{
		Name: strings.TrimSuffix(e.name.String(), "."), Verdict: VerdictDenied, Asked: e.asked.Load(), Exists: e.exists.Load(),
		Last: time.Unix(e.last.Load(), 0).UTC(),
	}
	if rule := e.rule.Load(); rule != nil {
		r.Rule = rule.String()
		if rule.allows() {
			r.Verdict = VerdictAllowed
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, code := range e.types {
		r.Types = append(r.Types, wire.TypeName(code))
	}
	slices.Sort(r.Types)
	r.Ports, r.Private = maps.Clone(e.ports), e.private
	return r
}

// Counts returns the numbers of questions and of connections, by [Record].Verdict. A connection is denied if it was refused.
func (r *recorder) Counts() (queries, connections map[string]uint64) {
	byVerdict := func(counters *[2]atomic.Uint64) map[string]uint64 {
		return map[string]uint64{VerdictDenied: counters[0].Load(), VerdictAllowed: counters[1].Load()}
	}
	return byVerdict(&r.queries), byVerdict(&r.connections)
}
