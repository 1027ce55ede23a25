// Package agent runs nametap beside one workload: it connects the push path to the query
// path, keeps the capture rules, serves the status endpoints, and ends these parts in order.
//
//	agent.go          Agent: passes a push to the query path, starts all parts and ends them in order
//	await.go          waiting for an agent in another container
//	status.go         the status server: probes, metrics, /debug/..., and a request that empties the cache
//	diagnose.go       what is wrong: reading the conditions of all parts; resources that can run out
//	systemd.go        notifications to systemd, and the end of an agent that hangs
//	egress.go         connections to automatic VIPs
//	resolved.go       the names for which systemd-resolved should query the agent
//	core.go           state that the parts share: settings, query path, push path, whether the agent starts or ends
//	captureconditions.go  what is wrong with the capture
//	capture.go        the desired state of capture: from settings, nameservers, families of listeners, and probes
//	way.go            the way of clients' queries to the agent: probes, and their consequences
//	lapses.go         why the capture was interrupted, and how often
//	seat.go           which of several agents in a network namespace captures
//	capturestatus.go  the state of capture, as status and metrics
//	servers.go        the nameservers that clients query
//	records.go        where the records of queries go: the query log, dnstap
//	guard.go          the policy as rules of capture, and whether the kernel enforces it
//	guardstatus.go    the state of the guard, as status and metrics
//	guardrecords.go   the guard's records, in the state directory
//	dump.go           responses that grow with the table and the cache, entry by entry
//	tail.go           /debug/tail, which sends queries to its readers as the queries are answered
//	private.go        the private socket: where it is, and which users may use it
//	starts.go         the count of starts and the last failure that a unit of systemd keeps
//	addresses.go      the addresses of the node, and following their changes
//	memory.go         returning memory to the kernel when pushes pause
//	config.go         the settings, and their validation
//	lookup.go         looking up the control plane if resolv.conf names the agent
//
// # Goroutines
//
// One errgroup in [Agent.Run] owns every goroutine. If a goroutine fails, the process ends: a process that runs but
// does not answer looks healthy to Kubernetes and systemd, while DNS of the workload stays broken.
package agent
