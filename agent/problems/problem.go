package problems

import "time"

// A Problem is something that is wrong.
type Problem struct {
	Code     Code     `json:"code"`
	Severity Severity `json:"severity"`
	// Subject distinguishes problems with one code: a nameserver, a family, a reason.
	Subject string `json:"subject,omitempty"`
	// What describes the problem, and names the server or the file. It contains no query of a user, because every
	// user may read it.
	What     string `json:"what"`
	Evidence string `json:"evidence"`
	Effect   string `json:"effect"`
	// Mend is one command that ends the problem, or a change of one file.
	Mend string   `json:"mend"`
	Rows []string `json:"rows"` // the rows of docs/behaviour.md about the problem
	// Since is the time of the first reading that has shown the problem; zero if the problem does not come from a
	// [Window].
	Since time.Time `json:"since,omitzero"`
}

// A Severity says how bad a problem is.
type Severity string

// The severities.
const (
	Severe Severity = "problem" // names that should resolve do not, or will not
	Minor  Severity = "warning" // all names resolve
)

// A Code names a kind of problem. Codes are stable: metrics and programs use them.
type Code string

// The codes, in the order of causes.
const (
	SettingsWrong       Code = "settings_wrong"
	AgentAbsent         Code = "agent_absent"
	AgentVersion        Code = "agent_version"
	ResolvConfUnread    Code = "resolv_conf_unreadable"
	ResolvConfEmpty     Code = "resolv_conf_empty"
	ResolvConfMany      Code = "resolv_conf_servers"
	NsswitchNoDNS       Code = "nsswitch_dns"
	NsswitchMDNS        Code = "nsswitch_mdns"
	SettingsRefused     Code = "settings_refused"
	SettingsPending     Code = "settings_pending"
	ConntrackFull       Code = "conntrack_full"
	Descriptors         Code = "descriptors"
	Memory              Code = "memory"
	AddressTaken        Code = "address_taken"
	ListenerMissing     Code = "listener_missing"
	ListenerSilent      Code = "listener_silent"
	StateDir            Code = "state_dir"
	NameserversNone     Code = "nameservers_none"
	CaptureBarred       Code = "capture_barred"
	NameserverBarred    Code = "nameserver_barred"
	NameserverLoops     Code = "nameserver_loops"
	NameserverDown      Code = "nameserver_down"
	NameserverRefuses   Code = "nameserver_refuses"
	NameserverTCP       Code = "nameserver_tcp"
	ClockBehind         Code = "clock_behind"
	ControlFile         Code = "control_plane_file"
	TokenExpired        Code = "token_expired"
	TokenExpires        Code = "token_expires"
	Certificate         Code = "certificate"
	ControlUnresolved   Code = "control_plane_unresolved"
	ControlRefuses      Code = "control_plane_refuses"
	ControlUnreachable  Code = "control_plane_unreachable"
	PushRejected        Code = "push_rejected"
	TableAbsent         Code = "table_absent"
	TableStale          Code = "table_stale"
	CaptureSecond       Code = "capture_second_agent"
	CaptureAbsent       Code = "capture_absent"
	CaptureRepaired     Code = "capture_repaired"
	CaptureRemains      Code = "capture_remains"
	CaptureBroken       Code = "capture_broken"
	CaptureElsewhere    Code = "capture_elsewhere"
	CaptureEnded        Code = "capture_ended"
	CaptureInterrupted  Code = "capture_interrupted"
	Overflow            Code = "overflow"
	QueriesFail         Code = "queries_fail"
	QueriesGoElsewhere  Code = "queries_go_elsewhere"
	QueriesGoUnanswered Code = "queries_go_unanswered"
)

// A Report is the result of all checks.
type Report struct {
	// Problems are the severe problems and then the warnings, both in the order of causes.
	Problems []Problem `json:"problems"`
	// Suspected are problems that are not raised yet, because they have not lasted long enough.
	Suspected []Problem `json:"suspected,omitempty"`
	// Passed has the titles of the checks that found nothing.
	Passed  []string `json:"passed"`
	Skipped []Skip   `json:"skipped,omitempty"`
}

// Worst returns the worst severity of the problems, "" if there are none.
func (r Report) Worst() Severity {
	worst := Severity("")
	for _, p := range r.Problems {
		if p.Severity == Severe {
			return Severe
		}
		worst = Minor
	}
	return worst
}

// A Skip is a check that was not made.
type Skip struct {
	Code   Code   `json:"code"`
	Check  string `json:"check"`
	Reason string `json:"reason"`
}
