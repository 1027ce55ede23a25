package problems

import (
	"slices"
)

// checks returns all checks in the order of causes: a problem is explained only by problems of earlier checks.
func checks() []check {
	all := slices.Concat(hostChecks(), resourceChecks(), localChecks(), forwardChecks(), controlChecks(), captureChecks(), queryChecks(), wayChecks())
	for i := range all {
		if !all[i].host {
			all[i].grounds = append(slices.Clip(all[i].grounds), SettingsWrong, AgentAbsent)
		}
	}
	return all
}

// Find makes the checks for which r has readings, and returns the problems that they find.
func Find(r *Readings) []Problem {
	var found []Problem
	for _, c := range checks() {
		if c.host && r.Host == nil || !c.host && r.Agent == nil {
			continue
		}
		for _, p := range c.find(r) {
			p.Code = c.code
			found = append(found, p)
		}
	}
	return found
}

// Judge returns the report on the problems in found and suspected. It puts severe problems before warnings, and both in
// the order of causes. It leaves out problems that another problem explains, even if the other problem is only
// suspected. unread has the reasons why checks were not made.
func Judge(found, suspected []Problem, unread map[Code]string) Report {
	return judge(checks(), found, suspected, unread)
}

// Codes returns the codes of all checks, of the agent and of `nametap doctor`.
func Codes() []Code {
	var codes []Code
	for _, c := range checks() {
		codes = append(codes, c.code)
	}
	return codes
}

// Unread returns the codes of the checks that do not apply to the agent a, with the reasons.
func Unread(a *Agent) map[Code]string {
	unread := map[Code]string{}
	if a.Capture == nil {
		for _, c := range append(captureChecks(), check{code: CaptureBarred}) {
			unread[c.code] = "the agent installs no rules"
		}
	}
	if a.Memory.Limit == 0 {
		unread[Memory] = "the memory of the agent has no limit"
	}
	if a.Token.File == "" {
		unread[TokenExpired], unread[TokenExpires] = "no token is sent", "no token is sent"
	}
	if a.Token.Issued.IsZero() {
		unread[ClockBehind] = "no token says when it was issued"
	}
	if a.StateDir == "" {
		unread[StateDir] = "there is no state directory"
	}
	return unread
}
