package guard

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// RecordsFile is the name of the file of records in the state directory. It has one [Records] in JSON.
const RecordsFile = "guard.json"

// Records says what a workload has asked for and reached.
type Records struct {
	// Since is when the records begin.
	Since time.Time `json:"since"`
	// Names has a record for each name, sorted by name. Of more than 4,096 names, the least recent give way.
	Names []Record `json:"names"`
}

// A Record says what a workload has asked for a name, and which connections it has made to it.
type Record struct {
	// Name is the name without a dot at its end, or the address of connections that belong to no name.
	Name string `json:"name"`
	// Verdict is what the policy in use says of the name: allowed or denied. In audit, a denied name was answered all the same.
	Verdict string `json:"verdict"`
	// Rule is the rule that says so, as FILE:LINE; "" if no rule does.
	Rule string `json:"rule,omitempty"`
	// Client is the client that asked for the name first: "uid N" for a program of this host, else an address.
	Client string `json:"client,omitempty"`
	// Asked is the number of questions.
	Asked uint64 `json:"asked"`
	// Exists reports whether nameservers have the name: an answer was not NXDOMAIN. A client asks for many names that do not
	// exist, because of its search list. It is false if no nameserver was asked.
	Exists bool `json:"exists,omitempty"`
	// Private reports whether the name has led to a private address: of RFC 1918, RFC 4193 or RFC 6598.
	Private bool `json:"private,omitempty"`
	// Types has the types of the questions other than A, AAAA, HTTPS and SVCB for which nameservers had records, sorted.
	Types []string `json:"types,omitempty"`
	// Ports has the ports of the connections that were made, sorted.
	Ports []uint16 `json:"ports,omitempty"`
	// Last is when the name was asked for, or connected to, last.
	Last time.Time `json:"last"`
}

// The values of [Record].Verdict, and of the label verdict of metrics.
const (
	VerdictAllowed = "allowed"
	VerdictDenied  = "denied"
)

// Counts has numbers of questions or of connections. A connection is denied if it was refused.
type Counts struct {
	Allowed uint64 `json:"allowed"`
	Denied  uint64 `json:"denied"`
}

func (c *Counts) add(allowed bool) {
	if allowed {
		c.Allowed++
	} else {
		c.Denied++
	}
}

const (
	// maxPerName bounds the types and the ports of a name.
	maxPerName = 32
	// A name that was used less than keptFor ago does not give way, so many different names take neither time nor memory.
	keptFor = time.Second
	// maxLooks is among how many names one is chosen that gives way.
	maxLooks = 16
)

// A recorder has what the workload of a Guard has asked for and reached. The mutex of the Guard guards it.
type recorder struct {
	queries, connections Counts

	since   time.Time
	records map[wire.Name]*Record                 // without what follows from the name
	byAddr  *simplelru.LRU[netip.Addr, wire.Name] // the name whose answer had an address last; in audit
}

func newRecorder() recorder {
	r := recorder{since: time.Now().UTC(), records: map[wire.Name]*Record{}}
	r.byAddr, _ = simplelru.NewLRU[netip.Addr, wire.Name](maxRecent, nil) // fails only for a size below 1
	return r
}

// Answered records that the answer about a name had an address.
func (g *Guard) Answered(name wire.Name, addr netip.Addr) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.byAddr.Add(addr, wire.Name(strings.Clone(string(name))))
}

// NameOf returns the name whose answer had an address last, or the root.
func (g *Guard) NameOf(addr netip.Addr) wire.Name {
	g.mu.Lock()
	defer g.mu.Unlock()
	name, _ := g.byAddr.Get(addr)
	return name
}

// Asked records a question for a name, and the rule that [Policy.Judge] has returned for it. answers is the number of records
// that nameservers have; it is below 0 if they do not have the name, or were not asked. Asked reports whether the name was
// not recorded before; then the caller may call [Guard.AskedBy]. For a name that was, it takes no allocation.
func (g *Guard) Asked(name wire.Name, qtype uint16, rule *Rule, answers int) (first bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.queries.add(rule.allows())
	e := g.useLocked(name)
	if e == nil {
		return false
	}
	e.Asked++
	e.Exists = e.Exists || answers >= 0
	if answers > 0 && !slices.Contains([]uint16{dns.TypeA, dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB}, qtype) {
		e.Types = with(e.Types, wire.TypeName(qtype))
	}
	return e.Asked == 1
}

// AskedBy records which client has asked for a name first.
func (g *Guard) AskedBy(name wire.Name, client string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if e := g.records[name]; e != nil {
		e.Client = client
	}
}

// Connected records a connection to a VIP of a name or, in audit, to an address of the name. carried reports whether the
// policy allows it. A connection that was refused is only counted: a policy that is learned must not allow it.
func (g *Guard) Connected(name wire.Name, to netip.AddrPort, carried bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.connections.add(carried)
	if !carried && g.Policy().Enforces() {
		return
	}
	if e := g.useLocked(name); e != nil {
		e.Ports = with(e.Ports, to.Port())
		e.Private = e.Private || IsPrivate(to.Addr())
	}
}

// with returns a sorted list with a value, unless the list is full. It leaves the old list as it is.
func with[T cmp.Ordered](list []T, value T) []T {
	at, found := slices.BinarySearch(list, value)
	if found || len(list) >= maxPerName {
		return list
	}
	return slices.Insert(slices.Clip(list), at, value)
}

// useLocked returns the record of a name, or nil if there is no room for it. If all places are taken, the least recent of some
// names gives way.
func (g *Guard) useLocked(name wire.Name) *Record {
	if name == wire.Root {
		return nil
	}
	now, e := time.Now(), g.records[name]
	if e == nil {
		if len(g.records) >= maxRecent && !g.giveWayLocked(now) {
			return nil
		}
		e = new(Record)
		g.records[wire.Name(strings.Clone(string(name)))] = e
	}
	e.Last = now
	return e
}

// giveWayLocked makes room for a name, and reports whether there is some.
func (g *Guard) giveWayLocked(now time.Time) bool {
	gone, oldest, looks := wire.Root, now.Add(-keptFor), 0
	for name, e := range g.records { // begins anywhere
		if e.Last.Before(oldest) {
			gone, oldest = name, e.Last
		}
		if looks++; looks == maxLooks {
			break
		}
	}
	delete(g.records, gone)
	return gone != wire.Root
}

// Records returns what was recorded, and what the policy in use says of it.
func (g *Guard) Records() Records {
	policy := cmp.Or(g.Policy(), new(Policy))
	g.mu.Lock()
	all := Records{Since: g.since, Names: make([]Record, 0, len(g.records))}
	for name, e := range g.records {
		r := *e
		r.Name, r.Verdict, r.Last = strings.TrimSuffix(name.String(), "."), VerdictDenied, e.Last.UTC()
		if rule, _ := policy.ruleOf(name); rule != nil {
			r.Rule = rule.String()
			if rule.allows() {
				r.Verdict = VerdictAllowed
			}
		}
		all.Names = append(all.Names, r)
	}
	g.mu.Unlock()
	slices.SortFunc(all.Names, func(a, b Record) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// Restore adds the records of an earlier process. Of names that were used since, only the number of questions is added.
func (g *Guard) Restore(old Records) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.since = cmp.Or(old.Since, g.since)
	for _, from := range old.Names[:min(len(old.Names), maxRecent)] {
		name, err := wire.ParseName(from.Name)
		if e := g.records[name]; e != nil {
			e.Asked += from.Asked
		} else if err == nil {
			from.Name, from.Verdict, from.Rule = "", "", ""
			g.records[name] = &from
		}
	}
}

// Counts returns the numbers of questions and of connections.
func (g *Guard) Counts() (queries, connections Counts) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.queries, g.connections
}
