// Package problems says what is wrong with an agent and its host.
//
// It is the only place that decides this: `nametap doctor`, `nametap status`, /healthz/ready and the metric
// nametap_problem have their texts and codes from here. A [Problem] has its evidence, its effect, and one command or
// file that ends it.
//
//	window.go    Window: problems that last
//	checks.go    all checks, and their order
//	control.go   the control plane, tokens and certificates, the table
//	forward.go   nameservers, limits, and queries that fail
//	local.go     settings, listeners, the state directory, capture
//	host.go      what only the command reads: the unit, resolv.conf, nsswitch.conf, the way of a query
//	resource.go  what runs out: connection tracking, descriptors, memory
//	readings.go  Readings: what the checks look at
//	problem.go   Problem, its codes, and Report: which problems explain others
//
// # What is a problem
//
//   - A check is a pure function from readings to problems.
//   - A state is a problem, a single query is not. A [Window] raises a problem after 15 s in which each reading has shown
//     it, and clears it after 15 s in which none has.
//   - A negative answer is a success. A nameserver that is not needed, such as the second one while the first one
//     answers, makes a warning at most.
//   - A check is skipped if another problem explains what it would find: without a nameserver all queries fail. What a
//     reading shows then is no evidence, also while the other problem is being cleared.
//   - Problems come before warnings, and causes before what they may explain.
package problems
