package guard

import "time"

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
	// Asked is the number of questions.
	Asked uint64 `json:"asked"`
	// Exists reports whether nameservers have the name: an answer was not NXDOMAIN. A client asks for many names that do not
	// exist, because of its search list. It is false if no nameserver was asked.
	Exists bool `json:"exists,omitempty"`
	// Types has the types of the questions other than A, AAAA, HTTPS and SVCB for which nameservers had records, sorted.
	Types []string `json:"types,omitempty"`
	// Ports has the number of connections that were made, by port.
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
