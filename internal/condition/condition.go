// Package condition is how a part of the agent says what it has found out about itself.
//
// Each part has a method Conditions, beside the code that knows: the control plane in package nds, the nameservers in
// dnsproxy/forward, capture in agent, the files of the host in the command doctor. A [Condition] is one check with its
// result, which is one of three: problems, nothing wrong, or not known. "Nothing wrong" needs something that was seen a
// short time ago. `nametap doctor`, `nametap status`, /healthz/ready and the metric nametap_problem show conditions.
//
//	window.go     Window: distinguishes lasting problems from passing ones
//	condition.go  Condition, Problem, and the Report on conditions
//
// # What is a problem
//
//   - A problem is a lasting state, not a single query that fails. A [Window] raises a problem when all readings have
//     shown it for 15 s, or at once if it is certain, and clears it when no reading has shown it for 15 s.
//   - A negative answer is a success. A nameserver that is not needed, such as the second nameserver while the first
//     answers, is a warning at most.
//   - A problem is left out if another one explains it ([Condition.Causes]): for example, all queries fail if there is
//     no nameserver. A Window does not count the consequences of a problem.
package condition

import (
	"slices"
	"time"
)

// A Condition is a check, and what it has found out.
type Condition struct {
	Code Code `json:"code"`
	// Title says what is right if the check finds no problem.
	Title string `json:"title"`
	// Causes are the problems that explain what the check would find.
	Causes []Code `json:"causes,omitempty"`
	// Unknown says why the check has found out nothing; "" if it has.
	Unknown string `json:"unknown,omitempty"`
	// Problems is empty if nothing is wrong, or if that is not known. Suspected are problems that a [Window] has not
	// raised yet, because they have not lasted long enough.
	Problems  []Problem `json:"problems,omitempty"`
	Suspected []Problem `json:"suspected,omitempty"`
}

// A Problem is something that is wrong.
type Problem struct {
	Code     Code     `json:"code"` // of its Condition
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
	// Certain is true if one reading proves the problem, such as the dates of a certificate.
	Certain bool `json:"-"`
}

// A Severity says how bad a problem is.
type Severity string

// The severities.
const (
	Severe Severity = "problem" // names that should resolve do not, or will not
	Minor  Severity = "warning" // all names resolve
)

// A Code names a kind of problem. Codes are stable: metrics and programs use them. docs/problems.md explains each.
type Code string

// Codes of problems that explain those of other parts.
const (
	AgentAbsent       Code = "agent_absent"
	CaptureAbsent     Code = "capture_absent"
	CaptureBarred     Code = "capture_barred"
	CaptureBroken     Code = "capture_broken"
	CaptureEnded      Code = "capture_ended"
	CaptureRepaired   Code = "capture_repaired"
	ConntrackFull     Code = "conntrack_full"
	Descriptors       Code = "descriptors"
	ListenerSilent    Code = "listener_silent"
	NameserverBarred  Code = "nameserver_barred"
	NameserverDown    Code = "nameserver_down"
	NameserverLoops   Code = "nameserver_loops"
	NameserverRefuses Code = "nameserver_refuses"
	NameserverTCP     Code = "nameserver_tcp"
	NameserversNone   Code = "nameservers_none"
	Overflow          Code = "overflow"
	ResolvConfEmpty   Code = "resolv_conf_empty"
	ResolvConfUnread  Code = "resolv_conf_unreadable"
)

// Unanswered returns the problems that keep nameservers from answering the agent.
func Unanswered() []Code {
	return []Code{NameserversNone, CaptureBarred, NameserverBarred, NameserverDown, NameserverLoops, NameserverRefuses}
}

// A Report has the results of conditions.
type Report struct {
	// Problems are the severe problems and then the warnings, both in the order of their conditions.
	Problems []Problem `json:"problems"`
	// Suspected are problems that are not raised yet.
	Suspected []Problem `json:"suspected,omitempty"`
	OK        []Result  `json:"ok"`
	Unknown   []Result  `json:"unknown,omitempty"`
}

// A Result is a check that has found no problem.
type Result struct {
	Code  Code   `json:"code"`
	Title string `json:"title"`
	// Reason says why the check has found out nothing; "" if nothing is wrong.
	Reason string `json:"reason,omitempty"`
}

// Judge returns the report on conditions. It leaves out problems that another problem explains, even if the other
// problem is only suspected.
func Judge(conditions []Condition) Report {
	report := Report{Problems: []Problem{}, OK: []Result{}}
	there := map[Code]string{}
	for _, c := range conditions {
		for _, p := range slices.Concat(c.Suspected, c.Problems) {
			there[c.Code] = p.What
		}
	}
	for _, c := range conditions {
		cause := slices.IndexFunc(c.Causes, func(code Code) bool { return has(there, code) })
		switch {
		case cause >= 0:
			report.Unknown = append(report.Unknown, Result{c.Code, c.Title, there[c.Causes[cause]]})
		case has(there, c.Code):
			report.Problems = append(report.Problems, c.coded(c.Problems)...)
			report.Suspected = append(report.Suspected, c.coded(c.Suspected)...)
		case c.Unknown != "":
			report.Unknown = append(report.Unknown, Result{c.Code, c.Title, c.Unknown})
		default:
			report.OK = append(report.OK, Result{Code: c.Code, Title: c.Title})
		}
	}
	for _, list := range [][]Problem{report.Problems, report.Suspected} {
		slices.SortStableFunc(list, func(a, b Problem) int { return rank(a.Severity) - rank(b.Severity) })
	}
	return report
}

func has(there map[Code]string, code Code) bool {
	_, found := there[code]
	return found
}

// coded returns problems with the code of the condition.
func (c Condition) coded(problems []Problem) []Problem {
	problems = slices.Clone(problems)
	for i := range problems {
		problems[i].Code = c.Code
	}
	return problems
}

// rank returns 0 for the severe problems.
func rank(s Severity) int {
	if s == Severe {
		return 0
	}
	return 1
}

// Worst returns the worst severity of the problems, "" if there are none.
func (r Report) Worst() Severity {
	if len(r.Problems) == 0 {
		return ""
	}
	return r.Problems[0].Severity
}
