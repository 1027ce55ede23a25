package problems

import (
	"net/netip"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/nds"
)

// Readings are what the checks look at. What is nil was not read.
type Readings struct {
	Now   time.Time
	Agent *Agent
	Host  *Host
}

// Agent is what an agent knows of itself.
type Agent struct {
	Silent   []string // why DNS listeners do not answer
	Missing  []string // why DNS listeners are not open
	Unserved []string // why other addresses are not open
	StateDir string   // "" without one
	XDS      nds.Status
	Token    nds.Token
	Servers  []Server // in the order in which they are queried
	Self     []string // nameservers that are left out because they are this agent
	Refusing bool     // queries were refused since the previous reading, for a limit
	Refused  uint64   // queries that were refused, since the start
	Failures []seen.Record
	Capture  *Capture // nil: the agent installs no rules
}

// A Server is a nameserver in use.
type Server struct {
	Name      string
	Suffix    string    // of the names that it is queried for; "" for all others
	State     string    // up, down or looping
	Refuses   bool      // the last replies were no answers
	RefusedAt time.Time // when the last of them was noticed
	Responses map[string]uint64
	Error     string // the last one
	ErrorAt   time.Time
}

// Capture is the state of the rules.
type Capture struct {
	On       bool
	Active   bool              // queries are captured
	Failed   map[string]string // why families are not captured, by family
	Remains  string            // why rules are still there
	Elsewise []Way             // ways of clients' queries that do not lead to the agent
}

// A Way is the way of clients' queries to a nameserver.
type Way struct {
	Nameserver netip.Addr
	State      string
	Detail     string
}

// Host is what the command reads.
type Host struct {
	// Absent says why no agent answers the command, "" if one does. Unit is the state of its unit.
	Absent string
	Unit   string
	// ResolvConf is the path that programs read. Unread says why it cannot be read.
	ResolvConf string
	Unread     string
	Servers    []string
	// Hosts is the line of nsswitch.conf, nil if it has none.
	Hosts []string
	// MDNS says that mDNS is asked: avahi-daemon runs.
	MDNS bool
	// Domain is the cluster domain.
	Domain string
	// Unredirected are the families whose queries no rules redirect to the agent of this pod, and what shows it.
	Unredirected map[string]string
	// Ways are the queries that were sent as programs send them.
	Ways []Sent
}

// A Sent is a query that was sent as programs send it.
type Sent struct {
	To      string // the server
	Network string
	Agent   bool   // this agent has answered
	Other   bool   // another server has
	Error   string // why there is no answer
}
