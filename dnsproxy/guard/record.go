package guard

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"
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
	// Verdict is what the policy said last: allowed or denied. In audit, a denied name was answered all the same.
	Verdict string `json:"verdict"`
	// Rule is the rule that says so, as FILE:LINE; "" if no rule does.
	Rule string `json:"rule,omitempty"`
	// Asked is the number of questions.
	Asked uint64 `json:"asked"`
	// Exists reports whether nameservers have the name: an answer was not NXDOMAIN. A client asks for many names that do not
	// exist, because of its search list. It is false if no nameserver was asked.
	Exists bool `json:"exists,omitempty"`
	// Types has the types of the questions other than A, AAAA, HTTPS and SVCB for which nameservers had records, sorted.
	Types []string `json:"types,omitempty"`
	// Ports has the number of connections by port, carried or refused.
	Ports map[uint16]uint64 `json:"ports,omitempty"`
	// Private reports whether the name has led to a private address: of RFC 1918, RFC 4193 or RFC 6598.
	Private bool `json:"private,omitempty"`
	// Last is when the name was asked for, or connected to, last.
	Last time.Time `json:"last"`
}

// The values of [Record].Verdict, and of the label verdict of metrics.
const (
	VerdictAllowed = "allowed"
	VerdictDenied  = "denied"
)

// maxRecords is how many names [Merge] returns at most.
const maxRecords = 4096

// Merge returns the records of several agents, or of several runs of one.
func Merge(all ...Records) Records {
	merged, byName := Records{Names: []Record{}}, map[string]Record{}
	for _, records := range all {
		if merged.Since.IsZero() || !records.Since.IsZero() && records.Since.Before(merged.Since) {
			merged.Since = records.Since
		}
		for _, r := range records.Names {
			m, found := byName[r.Name]
			if !found || r.Last.After(m.Last) {
				m.Name, m.Verdict, m.Rule, m.Last = r.Name, r.Verdict, r.Rule, r.Last
			}
			m.Asked += r.Asked
			m.Exists, m.Private = m.Exists || r.Exists, m.Private || r.Private
			m.Types = slices.Compact(slices.Sorted(slices.Values(slices.Concat(m.Types, r.Types))))
			ports := maps.Clone(r.Ports)
			for port, n := range m.Ports {
				if ports == nil {
					ports = map[uint16]uint64{}
				}
				ports[port] += n
			}
			m.Ports = ports
			byName[r.Name] = m
		}
	}
	merged.Names = slices.SortedFunc(maps.Values(byName), func(a, b Record) int {
		return cmp.Or(b.Last.Compare(a.Last), strings.Compare(a.Name, b.Name))
	})
	merged.Names = merged.Names[:min(len(merged.Names), maxRecords)]
	slices.SortFunc(merged.Names, func(a, b Record) int { return strings.Compare(a.Name, b.Name) })
	return merged
}
