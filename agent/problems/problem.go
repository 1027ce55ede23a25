package problems

import (
	"cmp"
	"slices"
	"time"
)

// A Problem is something that is wrong.
type Problem struct {
	Code     Code     `json:"code"`
	Severity Severity `json:"severity"`
	// Subject distinguishes problems with one code: a nameserver, a family, a reason.
	Subject string `json:"subject,omitempty"`
	// What says what is wrong, and names the server or the file. It names no query of a user, because every user may
	// read it.
	What     string `json:"what"`
	Evidence string `json:"evidence"`
	Effect   string `json:"effect"`
	// Mend is one command, or what to change in which file.
	Mend string   `json:"mend"`
	Rows []string `json:"rows"` // of docs/behaviour.md
	// Since is the time of the first reading that has shown the problem; zero if no Window has it.
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
	CaptureAbsent       Code = "capture_absent"
	CaptureRepaired     Code = "capture_repaired"
	CaptureRemains      Code = "capture_remains"
	CaptureBroken       Code = "capture_broken"
	CaptureElsewhere    Code = "capture_elsewhere"
	CaptureEnded        Code = "capture_ended"
	Overflow            Code = "overflow"
	QueriesFail         Code = "queries_fail"
	QueriesGoElsewhere  Code = "queries_go_elsewhere"
	QueriesGoUnanswered Code = "queries_go_unanswered"
)

// A check finds the problems with one code.
type check struct {
	code Code
	// title says what is right if the check finds no problem.
	title string
	// grounds are the problems that explain what the check would find.
	grounds []Code
	find    func(*Readings) []Problem
	host    bool // whether only the command makes the check, not the agent
}

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

// judge is Judge with the given checks only.
func judge(checks []check, found, suspected []Problem, unread map[Code]string) Report {
	report := Report{Problems: []Problem{}, Passed: []string{}}
	all := slices.Concat(found, suspected)
	for _, c := range checks {
		has := func(p Problem) bool { return p.Code == c.code }
		cause := ""
		for _, p := range all {
			if slices.Contains(c.grounds, p.Code) {
				cause = p.What
				break
			}
		}
		reason := cmp.Or(unread[c.code], cause)
		switch {
		case reason != "":
			report.Skipped = append(report.Skipped, Skip{c.code, c.title, reason})
		case !slices.ContainsFunc(all, has):
			report.Passed = append(report.Passed, c.title)
		default:
			report.Problems = append(report.Problems, only(found, has)...)
			report.Suspected = append(report.Suspected, only(suspected, has)...)
		}
	}
	severe := func(p Problem) bool { return p.Severity == Severe }
	minor := func(p Problem) bool { return !severe(p) }
	report.Problems = append(only(report.Problems, severe), only(report.Problems, minor)...)
	report.Suspected = append(only(report.Suspected, severe), only(report.Suspected, minor)...)
	return report
}

// only returns the problems that match.
func only(all []Problem, match func(Problem) bool) []Problem {
	return slices.DeleteFunc(slices.Clone(all), func(p Problem) bool { return !match(p) })
}
