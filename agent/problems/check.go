package problems

import (
	"cmp"
	"slices"
)

// A check finds the problems with one code.
type check struct {
	code Code
	// title says what is right if the check finds no problem.
	title string
	// grounds are the problems that explain what the check would find: if any of them is found or suspected, the
	// check is skipped.
	grounds []Code
	find    func(*Readings) []Problem
	host    bool // whether the check is only for `nametap doctor`, and uses Readings.Host
}

// judge is [Judge] for the checks in cs.
func judge(cs []check, found, suspected []Problem, unread map[Code]string) Report {
	report := Report{Problems: []Problem{}, Passed: []string{}}
	all := slices.Concat(found, suspected)
	for _, c := range cs {
		matches := func(p Problem) bool { return p.Code == c.code }
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
		case !slices.ContainsFunc(all, matches):
			report.Passed = append(report.Passed, c.title)
		default:
			report.Problems = append(report.Problems, filter(found, matches)...)
			report.Suspected = append(report.Suspected, filter(suspected, matches)...)
		}
	}
	severe := func(p Problem) bool { return p.Severity == Severe }
	minor := func(p Problem) bool { return !severe(p) }
	report.Problems = append(filter(report.Problems, severe), filter(report.Problems, minor)...)
	report.Suspected = append(filter(report.Suspected, severe), filter(report.Suspected, minor)...)
	return report
}

// filter returns the problems for which match returns true.
func filter(all []Problem, match func(Problem) bool) []Problem {
	return slices.DeleteFunc(slices.Clone(all), func(p Problem) bool { return !match(p) })
}
