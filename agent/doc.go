// Package agent runs nametap next to one workload: it wires the push path to the
// query path, serves the status endpoints and ends them in order.
//
// Everything that runs is owned by one errgroup in [Agent.Run]. Whatever dies
// takes the process with it: an agent that looks alive and answers nothing is
// the failure its users know best.
package agent
