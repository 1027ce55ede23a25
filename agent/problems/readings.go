package problems

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
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

// connected reports whether there is a stream, also before its first push.
func (a *Agent) connected() bool { return a.XDS.Connected || a.XDS.Open }

// needsToken reports whether the next connection needs the token.
func (a *Agent) needsToken(now time.Time) bool {
	return a.Token.File != "" && !a.XDS.CertificateExpires.After(now)
}

// unread returns the file of the control plane that the agent cannot read, with its setting, and why; "" if it can read
// all.
func (a *Agent) unread() (file, why string) {
	if text, found := strings.CutPrefix(a.XDS.LastError, "reading "); found && !a.connected() {
		file, why, _ = strings.Cut(text, ": ")
	}
	return file, why
}

// unresolved reports whether the name of the control plane does not resolve.
func (a *Agent) unresolved() bool {
	return strings.Contains(a.XDS.LastError, ": lookup ") || strings.Contains(a.XDS.LastError, "no such host")
}

// refuses reports whether the control plane refuses the agent, or the agent the control plane, according to the last error.
func (a *Agent) refuses() bool {
	for _, part := range refusals() {
		if strings.Contains(a.XDS.LastError, part) {
			return true
		}
	}
	return false
}

// refusals are the parts of errors with which a control plane refuses an agent.
func refusals() []string {
	return []string{"code = Unauthenticated", "code = PermissionDenied", "remote error: tls", "certificate"}
}

// unreachable returns why the control plane is not connected, and what ends that.
func (a *Agent) unreachable() (what, mend string) {
	for _, known := range []struct{ text, what, mend string }{
		{"operation not permitted", "cannot be reached: a firewall of this host drops the connections of the agent", "allow that connection for the agent's user in that firewall"},
		{"connection refused", "refuses connections", "start the control plane, or correct --xds-addr"},
		{"handshake failed: context deadline exceeded", "accepts connections, and does not answer TLS", "look at the control plane's log, and at what is between it and this host; --xds-addr may have the wrong port"},
		{"does not look like a TLS handshake", "does not speak TLS", "correct the port of --xds-addr, or set --xds-plaintext"},
		{"i/o timeout", "does not answer", "look at the firewalls between this host and the control plane, and at --xds-addr"},
		{"deadline exceeded", "does not answer", "look at the firewalls between this host and the control plane, and at --xds-addr"},
		{"unreachable", "cannot be reached from this host", "ip route get ADDRESS with the address of the control plane"},
	} {
		if strings.Contains(a.XDS.LastError, known.text) {
			return known.what, known.mend
		}
	}
	return "is not connected", "look at the control plane's log, and at --xds-addr"
}

// up reports whether another nameserver than s answers.
func (a *Agent) up(s Server) bool {
	return slices.ContainsFunc(a.Servers, func(other Server) bool {
		return other.Name != s.Name && other.Suffix == s.Suffix && other.State == "up" && !other.Refuses
	})
}

// domainOf returns the last two labels of a name, or the whole name if it is below the cluster domain, whose names have
// one nameserver.
func (a *Agent) domainOf(name string) string {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if a.Domain != "" && below(name, a.Domain) {
		return name
	}
	labels := strings.Split(name, ".")
	return strings.Join(labels[max(0, len(labels)-2):], ".")
}

// below reports whether a domain is below another one, or the same.
func below(domain, parent string) bool {
	domain = strings.ToLower(strings.Trim(domain, "."))
	return domain == parent || strings.HasSuffix(domain, "."+parent)
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

// said returns the last error of a nameserver.
func (s Server) said(now time.Time) string {
	return fmt.Sprintf("%s, %v ago", s.Error, now.Sub(s.ErrorAt).Round(time.Second))
}

// barred reports whether a firewall drops the queries to a nameserver.
func (s Server) barred(now time.Time) bool { return s.Barred && now.Sub(s.ErrorAt) <= serverLast }

// serverLast is how old the evidence against a nameserver may be. A nameserver that is down is probed every 30 s, while
// queries come; without queries its state is not known.
const serverLast = 45 * time.Second

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
