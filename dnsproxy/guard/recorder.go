package guard

import (
	"cmp"
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
	// maxPerName bounds the types and the ports of a name.
	maxPerName = 32
	// A name that was used less than keptFor ago does not give way, so many different names take neither time nor memory.
	keptFor = time.Second
	// maxLooks is among how many names one is chosen that gives way.
	maxLooks = 16
)

// A recorder counts what a workload asks for and reaches. Counting what it knows takes no allocation.
type recorder struct {
	queries, connections [2]atomic.Uint64 // denied and allowed

	mu      sync.Mutex
	since   time.Time
	records map[wire.Name]*Record                 // without what follows from the name
	byAddr  *simplelru.LRU[netip.Addr, wire.Name] // the name whose answer had an address last; in audit
}

// init makes a recorder without records.
func (r *recorder) init() {
	r.since, r.records = time.Now().UTC(), map[wire.Name]*Record{}
	r.byAddr, _ = simplelru.NewLRU[netip.Addr, wire.Name](maxRecent, nil) // fails only for a size below 1
}

// Answered records that the answer about a name had an address.
func (r *recorder) Answered(name wire.Name, addr netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.byAddr.Add(addr.Unmap(), wire.Name(strings.Clone(string(name))))
}

// NameOf returns the name whose answer had an address last, or the root.
func (r *recorder) NameOf(addr netip.Addr) wire.Name {
	r.mu.Lock()
	defer r.mu.Unlock()
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
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.use(name)
	if e == nil {
		return
	}
	e.Asked++
	e.Exists = e.Exists || found != Nothing
	if found == Answers && !slices.Contains([]uint16{dns.TypeA, dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB}, qtype) {
		e.addType(wire.TypeName(qtype))
	}
}

// addType adds a type to those of a name.
func (r *Record) addType(text string) {
	if i, found := slices.BinarySearch(r.Types, text); !found && len(r.Types) < maxPerName {
		r.Types = slices.Insert(r.Types, i, text)
	}
}

// Connected records a connection to a VIP of a name or, in audit, to an address of the name. carried reports whether the
// policy allows it. A connection that was refused is only counted: a policy that is learned must not allow it.
func (g *Guard) Connected(name wire.Name, to netip.AddrPort, carried bool) {
	count(&g.connections, carried)
	if !carried && g.Policy().Enforces() {
		return
	}
	g.recorder.mu.Lock()
	defer g.recorder.mu.Unlock()
	e := g.use(name)
	if e == nil {
		return
	}
	e.addPort(to.Port(), 1)
	e.Private = e.Private || IsPrivate(to.Addr())
}

// addPort adds n connections to a port of a name.
func (r *Record) addPort(port uint16, n uint64) {
	if r.Ports == nil {
		r.Ports = map[uint16]uint64{}
	}
	if _, known := r.Ports[port]; known || len(r.Ports) < maxPerName {
		r.Ports[port] += n
	}
}

// count counts in one of two counters.
func count(counters *[2]atomic.Uint64, allowed bool) {
	if allowed {
		counters[1].Add(1)
	} else {
		counters[0].Add(1)
	}
}

// use returns the record of a name, or nil if there is no room for it. If all places are taken, the least recent of some
// names gives way. r.mu must be held.
func (r *recorder) use(name wire.Name) *Record {
	if name == wire.Root {
		return nil
	}
	now, e := time.Now(), r.records[name]
	if e == nil {
		if len(r.records) >= maxRecent && !r.giveWay(now) {
			return nil
		}
		e = new(Record)
		r.records[wire.Name(strings.Clone(string(name)))] = e
	}
	e.Last = now
	return e
}

// giveWay makes room for a name, and reports whether there is some. r.mu must be held.
func (r *recorder) giveWay(now time.Time) bool {
	gone, oldest, looks := wire.Root, now.Add(-keptFor), 0
	for name, e := range r.records { // begins anywhere
		if e.Last.Before(oldest) {
			gone, oldest = name, e.Last
		}
		if looks++; looks == maxLooks {
			break
		}
	}
	delete(r.records, gone)
	return gone != wire.Root
}

// Records returns what was recorded, and what the policy in use says of it.
func (g *Guard) Records() Records {
	policy := cmp.Or(g.Policy(), new(Policy))
	g.recorder.mu.Lock()
	all := Records{Since: g.since, Names: make([]Record, 0, len(g.records))}
	for name, e := range g.records {
		r := *e
		r.Name, r.Verdict, r.Last = strings.TrimSuffix(name.String(), "."), VerdictDenied, e.Last.UTC()
		r.Types, r.Ports = slices.Clone(e.Types), maps.Clone(e.Ports)
		if rule, _ := policy.ruleOf(name); rule != nil {
			r.Rule = rule.String()
			if rule.allows() {
				r.Verdict = VerdictAllowed
			}
		}
		all.Names = append(all.Names, r)
	}
	g.recorder.mu.Unlock()
	slices.SortFunc(all.Names, func(a, b Record) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// Restore adds records of an earlier process.
func (r *recorder) Restore(old Records) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !old.Since.IsZero() {
		r.since = old.Since
	}
	for _, from := range old.Names {
		name, err := wire.ParseName(from.Name)
		if err != nil {
			continue
		}
		_, known := r.records[name]
		e := r.use(name)
		if e == nil {
			continue
		}
		if !known {
			e.Last = from.Last
		}
		e.Asked += from.Asked
		e.Exists, e.Private = e.Exists || from.Exists, e.Private || from.Private
		for port, n := range from.Ports {
			e.addPort(port, n)
		}
		for _, text := range from.Types {
			e.addType(text)
		}
	}
}

// Counts returns the numbers of questions and of connections, by [Record].Verdict. A connection is denied if it was refused.
func (r *recorder) Counts() (queries, connections map[string]uint64) {
	byVerdict := func(counters *[2]atomic.Uint64) map[string]uint64 {
		return map[string]uint64{VerdictDenied: counters[0].Load(), VerdictAllowed: counters[1].Load()}
	}
	return byVerdict(&r.queries), byVerdict(&r.connections)
}
