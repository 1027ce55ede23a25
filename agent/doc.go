// Package agent runs nametap beside one workload: it connects the push path to the query
// path, keeps the capture rules, serves the status endpoints, and ends them in order.
//
// One errgroup in [Agent.Run] owns every goroutine. If one of them fails, the process ends: a
// process that runs but does not answer looks healthy to Kubernetes and systemd, and DNS of
// the workload stays broken, as in Istio's agent when a DNS listener fails.
package agent
