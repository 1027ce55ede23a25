// Package problems says what is wrong with an agent and its host.
//
// Only this package decides what is a problem: `nametap doctor`, `nametap status`, /healthz/ready and the metric
// nametap_problem take their texts and codes from here. A [Problem] has its evidence, its effect, and one command, or
// a change of one file, that ends it.
//
//	window.go    Window: distinguishes lasting problems from passing ones
//	checks.go    all checks, and their order
//	control.go   the control plane, tokens and certificates, the table
//	forward.go   nameservers, limits, and queries that fail
//	local.go     settings, listeners, the state directory, capture
//	host.go      checks that only the command makes: the unit, resolv.conf, nsswitch.conf, the way of a query
//	resource.go  resources that can run out: connection tracking, descriptors, memory
//	check.go     a check, and the report on the problems that checks have found
//	readings.go  Readings: the data for the checks
//	problem.go   Problem, its codes, and Report
//
// # What is a problem
//
//   - A check is a pure function from readings to problems.
//   - A problem is a lasting state, not a single query that fails. A [Window] raises a problem when all readings have
//     shown it for 15 s, and clears it when no reading has shown it for 15 s.
//   - A negative answer is a success. A nameserver that is not needed, such as the second nameserver while the first
//     answers, is a warning at most.
//   - A check is skipped if another problem explains what the check would find: for example, all queries fail if there
//     is no nameserver.
//     A Window does not count the consequences of a problem while the problem is found or raised.
//   - A report has problems before warnings, and causes before their consequences.
package problems
