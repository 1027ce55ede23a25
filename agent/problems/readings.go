package problems

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/nds"
)

// Readings are the data for the checks. A field is nil if its readings were not taken.
type Readings struct {
	Now   time.Time
	Agent *Agent
	Host  *Host
}

// Agent has the readings that an agent takes of itself.
type Agent struct {
	Silent   []string // why DNS listeners do not answer
	Missing  []string // why DNS listeners are not open
	Unserved []string // why other addresses are not open
	StateDir string   // the state directory; "" if there is none
	Domain   string   // the cluster domain
	XDS      nds.Status
	Token    nds.Token
	Servers  []Server // in the order in which they are queried
	Self     []string // nameservers that are not queried because they are this agent
	Refusing bool     // whether queries were refused because of a limit since the previous reading
	Refused  uint64   // number of queries that were refused because of a limit since the start
	Failures []seen.Record
	Capture  *Capture // nil: the agent installs no rules
	Settings Settings
	// Conntrack has the entries of connection tracking, Descriptors the open descriptors of the agent, and Memory the
	// bytes of the agent's cgroup that the kernel cannot free. A limit of 0 means that there is no limit, or that it is
	// not known.
	Conntrack, Descriptors, Memory Resource
}

// capture returns the state of the rules. If the agent installs none, it returns the state of a capture that is off.
func (a *Agent) capture() Capture {
	if a.Capture == nil {
		return Capture{}
	}
	return *a.Capture
}

// connected reports whether there is a stream to the control plane, even if it has carried no push yet.
func (a *Agent) connected() bool { return a.XDS.Connected || a.XDS.Open }

// needsToken reports whether the next connection needs the token.
func (a *Agent) needsToken(now time.Time) bool {
	return a.Token.File != "" && !a.XDS.CertificateExpires.After(now)
}

// unread returns the file that the agent needs to connect to the control plane, but cannot read, and the reason. The
// result file is a text such as "the token (--xds-token-file)": it says what the file is, and which setting names it.
// If the agent can read all files, file is "".
func (a *Agent) unread() (file, reason string) {
	if text, found := strings.CutPrefix(a.XDS.LastError, "reading "); found && !a.connected() {
		file, reason, _ = strings.Cut(text, ": ")
	}
	return file, reason
}

// answered reports whether the last error is a message of the control plane. Such a message may quote errors of other
// connections, so its text does not say whether the agent reaches the control plane.
func (a *Agent) answered() bool {
	return strings.HasPrefix(a.XDS.LastError, "receiving a push: rpc error: ") && !nds.ConnectionError(a.XDS.LastError)
}

// unresolved reports whether the name of the control plane does not resolve.
func (a *Agent) unresolved() bool {
	return !a.answered() && (strings.Contains(a.XDS.LastError, ": lookup ") || strings.Contains(a.XDS.LastError, "no such host"))
}

// refuses reports whether, according to the last error, the control plane refuses the agent or the agent refuses the
// control plane.
func (a *Agent) refuses() bool {
	if a.answered() {
		_, said, _ := strings.Cut(a.XDS.LastError, "rpc error: ")
		return strings.HasPrefix(said, "code = Unauthenticated") || strings.HasPrefix(said, "code = PermissionDenied")
	}
	for _, part := range refusals() {
		if strings.Contains(a.XDS.LastError, part) {
			return true
		}
	}
	return false
}

// refusals returns the texts by which refuses recognizes an error: each error that contains one of them is a refusal.
func refusals() []string {
	return []string{"code = Unauthenticated", "code = PermissionDenied", "remote error: tls", "certificate"}
}

// unreachable returns why there is no connection to the control plane, and how to mend that.
func (a *Agent) unreachable() (what, mend string) {
	if a.answered() {
		return "answers, and ends the connection", "its message says why; look at its log"
	}
	for _, known := range []struct{ text, what, mend string }{
		{"operation not permitted", "cannot be reached: a firewall of this host drops the connections of the agent", "allow that connection for the agent's user in that firewall"},
		{"connection refused", "refuses connections", "start the control plane, or correct --xds-addr"},
		{"ended the connection before", "ends connections at once", "look at the control plane's log, and at proxies before it: one of them drains, or limits the age of connections"},
		{"but no stream within", "accepts connections, but no stream", "look at the control plane's log, and at what is between it and this host; --xds-addr may have the wrong port"},
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

// otherAnswers reports whether a nameserver other than s answers the same names.
func (a *Agent) otherAnswers(s Server) bool {
	return slices.ContainsFunc(a.Servers, func(other Server) bool {
		return other.Spec != s.Spec && other.Suffix == s.Suffix && other.State == upstream.Up && !other.Refusing
	})
}

// domainOf returns the last two labels of name. If name is below the cluster domain, it returns the whole name,
// because all names below the cluster domain have the same nameserver.
func (a *Agent) domainOf(name string) string {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if a.Domain != "" && isBelow(name, a.Domain) {
		return name
	}
	labels := strings.Split(name, ".")
	return strings.Join(labels[max(0, len(labels)-2):], ".")
}

// isBelow reports whether domain is parent or below parent.
func isBelow(domain, parent string) bool {
	domain = strings.ToLower(strings.Trim(domain, "."))
	return domain == parent || strings.HasSuffix(domain, "."+parent)
}

// Settings says which changes of the settings files, since the start of the agent, are not in use.
type Settings struct {
	Refused string   // why the settings in the files cannot be used; "" if they can be
	Pending []string // the names of changed settings that take effect after a restart
}

// A Resource says how much of a resource is in use, and how much may be in use.
type Resource struct{ Used, Limit uint64 }

// full reports whether little of the resource is left: at most the part 1/share of the limit, or at most as much as the
// parameter free says. Without a limit, it returns false.
func (r Resource) full(share, free uint64) bool {
	return r.Limit > 0 && r.Used+max(r.Limit/share, free) >= r.Limit
}

// A Server is a nameserver in use.
type Server struct {
	upstream.Status
	// The server is queried for names below Suffix. A server with the Suffix "" is queried for all names that are not
	// below the Suffix of another server.
	Suffix    string
	RefusedAt time.Time // when a reading last noticed a reply whose response code is neither NOERROR nor NXDOMAIN
}

// lastErrorText returns the last error of a nameserver, and the time since then.
func (s Server) lastErrorText(now time.Time) string {
	return fmt.Sprintf("%s, %v ago", s.LastError, now.Sub(s.LastErrorAt).Round(time.Second))
}

// barred reports whether a firewall of this host dropped a query to the nameserver recently.
func (s Server) barred(now time.Time) bool { return s.Barred && now.Sub(s.LastErrorAt) <= serverLast }

// serverLast is how old the evidence against a nameserver may be. While queries come, a nameserver that is down is
// probed every 30 s. Without queries its state is not known.
const serverLast = 45 * time.Second

// Capture is the state of the rules.
type Capture struct {
	On      bool
	Active  bool              // whether queries are captured
	Failed  map[string]string // why families are not captured, by family
	Remains string            // why rules that should be removed are still there
	Ways    []Way             // the ways of clients' queries to the nameservers
	Lapses  []Lapse           // the interruptions since the start
	Others  []string          // other agents in this network namespace that want to capture
	Waits   bool              // whether one of Others captures instead of this agent
	// Repaired has the times of the readings that found that rules had been repaired since the reading before. It goes
	// back as far as [RepairsIn]. Repairs is the number of repairs since the start. Drift says how the rules differed
	// before the last repair.
	Repaired []time.Time
	Repairs  uint64
	Drift    string
}

// A Lapse says how often, and when last, the capture was interrupted by one cause.
type Lapse struct {
	Cause LapseCause `json:"cause"`
	Count uint64     `json:"count"`
	Last  time.Time  `json:"last"`
}

// A LapseCause says why the capture was interrupted, and what to look at.
type LapseCause string

// The causes of interruptions.
const (
	LapseDead       LapseCause = "an earlier agent has ended without removing its rules, and no other answered in time: look at its log, journalctl -u nametap"
	LapseStandstill LapseCause = "the agent's process stood still for 2 s or more: look at SIGSTOP, its cgroup (frozen, cpu.stat) and the memory of the machine"
	LapseSilent     LapseCause = "the agent's process runs, but its listener does not answer: look at nametap capture check, and the stacks that kill -QUIT prints"
	LapseQueue      LapseCause = "the queue of the agent's listener is full, and the kernel drops queries: look at nametap top --by client"
	LapseEmptied    LapseCause = "another program empties the list that keeps the rules capturing, /proc/net/xt_recent: look at programs that run as root on this network, such as containers"
)

// parts returns the cause, and what to look at.
func (c LapseCause) parts() (cause, look string) {
	cause, look, _ = strings.Cut(string(c), ": ")
	return cause, look
}

// A Way is the way of clients' queries to a nameserver.
type Way struct {
	Nameserver netip.Addr `json:"nameserver"`
	State      WayState   `json:"state"`
	// Detail says why the state is not [WayReached].
	Detail string `json:"detail,omitempty"`
}

// WayState says where queries of clients to a nameserver go, according to the last probes.
type WayState string

// The states of a way.
const (
	WayUnknown   WayState = "unknown"   // not probed yet, or the host lacks a route or the address of the agent
	WayReached   WayState = "reached"   // the agent answers the queries
	WayElsewhere WayState = "elsewhere" // another server answers the probe, so the probe is not redirected to the agent
	WayBroken    WayState = "broken"    // the agent answers, but redirected queries do not reach it; they now go to the nameserver
	WayBarred    WayState = "barred"    // a firewall drops the agent's own queries; those of clients now go to the nameserver
	WaySilent    WayState = "silent"    // the agent does not answer at all
)

// Host has the readings that only the command `nametap doctor` takes.
type Host struct {
	// Settings says why the settings are wrong; "" if they are right. SettingsOf names the settings that are wrong:
	// the settings of the command, or of the agent's unit.
	Settings, SettingsOf string
	// Absent says why no agent answers the command; "" if an agent answers. Unit is the state of the agent's unit.
	// Taken has the ports of the agent's DNS listeners that other programs use.
	Absent string
	Unit   string
	Taken  []Taken
	// Version is the version of the command, and Running the version of the agent.
	Version, Running string
	// ResolvConf is the path of the resolv.conf that programs read. Unread says why the file cannot be read.
	ResolvConf string
	Unread     string
	Servers    []string
	// Hosts is the line hosts: of nsswitch.conf, nil if there is none.
	Hosts []string
	// MDNS is true if programs query mDNS: avahi-daemon runs.
	MDNS bool
	// Domain is the cluster domain.
	Domain string
	// Unredirected has the families whose queries are not redirected to the agent of this pod, with the evidence.
	Unredirected map[string]string
	// Ways are queries that the command has sent as any program would send them.
	Ways []Probe
	// Others are rules of other programs that also redirect queries.
	Others []string
}

// A Taken is a port of the agent that another program uses.
type Taken struct {
	Address string // with the protocol
	Program string // with its process number; "" if that is not known
}

// A Probe is the result of a query that asks a server about itself.
type Probe struct {
	Network string     `json:"network"`
	To      string     `json:"to"` // the server
	State   ProbeState `json:"state"`
	Error   string     `json:"error,omitempty"` // why there is no answer
	Err     error      `json:"-"`
}

// ProbeState says what the result of a probe shows.
type ProbeState string

// The states of probes.
const (
	ProbeAgent  ProbeState = "an agent answers" // the wanted agent, if the probe is for a certain one
	ProbeOther  ProbeState = "another server answers"
	ProbeSilent ProbeState = "no server answers"
	ProbeClosed ProbeState = "no program listens for"
	ProbeUnsent ProbeState = "this host cannot send" // the kernel drops the query, or the process has no descriptor
	ProbeAbsent ProbeState = "this host has no address for"
)

// Answered reports whether any server has answered.
func (p Probe) Answered() bool { return p.State == ProbeAgent || p.State == ProbeOther }

// Sent reports whether the query was sent. If not, the result says nothing about the server.
func (p Probe) Sent() bool { return p.State != ProbeUnsent && p.State != ProbeAbsent }
