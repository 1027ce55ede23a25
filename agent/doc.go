// Package agent runs nametap beside one workload: it connects the push path to the query
// path, keeps the capture rules, serves the status endpoints, and ends them in order.
//
//	agent.go          Agent: passes a push to the query path, starts all parts and ends them in order
//	validate.go       whether the settings are right
//	identity.go       the addresses of the node
//	addresses.go      following changes of the addresses of the interfaces
//	lookup.go         looking up the control plane where resolv.conf names the agent
//	memory.go         returning memory to the kernel when pushes pause
//	diagnose.go       what is wrong with the agent: readings for package problems
//	asprogram.go      queries as programs send them
//	status.go         the status server: probes, metrics, /debug/..., flushing the cache
//	endpoint.go       a listener of the status server, which is opened again when it fails
//	private.go        the private socket: where it is, and which users may use it
//	statussockets.go  sockets of the status address that the supervisor or systemd holds
//	storedsockets.go  sockets that systemd stores for the next process
//	dump.go           the table and the cache, entry by entry
//	tail.go           the queries that are answered, as they come
//	records.go        where the records of queries go: the query log, dnstap
//	readings.go       the state of the kernel, once for all requests
//	systemd.go        notifications to systemd
//	probe.go          probes of the agent's own listeners
//	resources.go      what runs out: connection tracking, descriptors, memory
//	redirected.go     whether queries are redirected to the agent, by a test query
//	await.go          waiting for an agent in another container
//	capture.go        the desired state of capture: from the settings, the nameservers of
//	                  resolv.conf, families.go and way.go
//	families.go       the families that the agent listens on, and whether they answer
//	way.go            the way of clients' queries to the agent: probes, and what follows from them
//	resolved.go       which names systemd-resolved is to query the agent for
//	egress.go         connections to automatic VIPs
//	capturestatus.go  the state of capture, as status and metrics
//
// # Goroutines
//
// One errgroup in [Agent.Run] owns every goroutine. If one of them fails, the process ends: a
// process that runs but does not answer looks healthy to Kubernetes and systemd, and DNS of
// the workload stays broken, as in Istio's agent when a DNS listener fails.
//
//	dnsproxy.Server.Run  one reader per UDP socket and one per TCP connection; one worker per
//	                     query on the slow path (while there are many, workers read too); one
//	                     per refresh, and one per client that got a stale answer meanwhile; the
//	                     watcher of resolv.conf; one that finds the names of cgroups; one that follows the addresses of this host;
//	                     one that opens connection tracking, if that failed at first; one that
//	                     opens missing listeners
//	upstream.Client      one reader per open socket, two per connection, and one that closes
//	                     idle ones; none without queries
//	nds.Client.Run       one for the stream, which receives, applies and ACKs in this order; one
//	                     that ends the stream when the node changes; one that writes the
//	                     snapshot; one that obtains and renews the workload certificate
//	clock.Clock          one that polls for all parts: files, addresses, the node; with capture, one more for the ways
//	Agent                one that takes readings for package problems, one that follows the addresses of the interfaces (rtnetlink), three of the
//	                     status server (status address, private socket, readings), the drain,
//	                     the announcement of readiness, systemd's watchdog,
//	                     one that returns memory when pushes pause, one for the records of queries, the query log,
//	                     one or two for dnstap; with capture one that keeps
//	                     the rules as desired, one that keeps the registration with
//	                     systemd-resolved (two more while that runs), one that probes the way of clients' queries and
//	                     one for each probe, one that follows changes of nft rules, and one that follows
//	                     resolv.conf
//
// The command nametap agent has more of them outside of the errgroup: one that writes the log,
// one that waits for a second signal, two that follow the files with settings, and in a container
// with --supervise one that continues a supervisor that was stopped.
package agent
