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
	Domain   string   // the cluster domain
	XDS      nds.Status
	Token    nds.Token
	Servers  []Server // in the order in which they are queried
	Self     []string // nameservers that are left out because they are this agent
	Refusing bool     // queries were refused since the previous reading, for a limit
	Refused  uint64   // queries that were refused, since the start
	Failures []seen.Record
	Capture  *Capture // nil: the agent installs no rules
	Settings Settings
	// Conntrack has the entries of connection tracking, Descriptors the open ones of the agent, and Memory the bytes of
	// its cgroup that the kernel cannot free. A limit of 0 is none.
	Conntrack, Descriptors, Memory Resource
}

// Settings are files with settings that have changed since the start of the agent.
type Settings struct {
	Refused string   // why the settings in the files are not used
	Pending []string // names of settings that a restart would change
}

// A Resource is how much of something is in use, and how much there may be.
type Resource struct{ Used, Limit uint64 }

// full reports whether less than a share of a resource, such as 1/20, or a number is free.
func (r Resource) full(share, free uint64) bool {
	return r.Limit > 0 && r.Used+max(r.Limit/share, free) >= r.Limit
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
	Barred    bool // the last query could not be sent: a firewall of this host drops it
	// TCPError is why the last query over TCP had no reply, and TCPSince when the first one had none since the last
	// reply over TCP.
	TCPError             string
	TCPSince, TCPErrorAt time.Time
}

// Capture is the state of the rules.
type Capture struct {
	On       bool
	Active   bool              // queries are captured
	Failed   map[string]string // why families are not captured, by family
	Remains  string            // why rules are still there
	Elsewise []Way             // ways of clients' queries that do not lead to the agent
	// Repaired are the times of the readings of the last [RepairsIn] before which rules were repaired, Repairs is how
	// many repairs there were since the start, and Drift what was repaired last.
	Repaired []time.Time
	Repairs  uint64
	Drift    string
}

// A Way is the way of clients' queries to a nameserver.
type Way struct {
	Nameserver netip.Addr
	State      string
	Detail     string
}

// Host is what the command reads.
type Host struct {
	// Settings says why the settings of the command or of the agent's unit are wrong, "" if they are not, and
	// SettingsOf whose they are.
	Settings, SettingsOf string
	// Absent says why no agent answers the command, "" if one does. Unit is the state of its unit, and Taken has the
	// programs that have the ports of its DNS listeners.
	Absent string
	Unit   string
	Taken  []Taken
	// Version is the version of the command, and Running the version of the agent.
	Version, Running string
	// ResolvConf is the path that programs read. Unread says why it cannot be read.
	ResolvConf string
	Unread     string
	Servers    []string
	// Hosts is the line of nsswitch.conf, nil if it has none.
	Hosts []string
	// MDNS is true if programs query mDNS: avahi-daemon runs.
	MDNS bool
	// Domain is the cluster domain.
	Domain string
	// Unredirected are the families whose queries no rules redirect to the agent of this pod, and what shows it.
	Unredirected map[string]string
	// Ways are the queries that were sent as programs send them.
	Ways []Sent
	// Others are the rules of other programs that redirect queries, too.
	Others []string
}

// A Taken is a port of the agent that another program has.
type Taken struct {
	Address string // with the protocol
	Program string // with its process number; "" if that is not known
}

// A Sent is a query that was sent as programs send it.
type Sent struct {
	To      string // the server
	Network string
	Agent   bool   // this agent has answered
	Other   bool   // another server has
	Error   string // why there is no answer
}
