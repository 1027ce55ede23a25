// Package iptables captures DNS: it redirects queries of applications to port 53 to the
// agent, and lets the agent's own queries to nameservers pass through.
//
//	rules, err := iptables.Build(iptables.DefaultConfig())
//	fmt.Print(rules.Text(family.IPv4))
//
//	capture, err := iptables.New(iptables.DefaultConfig(), slog.Default())
//	err = capture.Apply(ctx)  // install the rules, by one iptables-restore a family
//	err = capture.Remove(ctx) // remove all rules of nametap, whatever installed them
//
//	err = capture.Set(iptables.Desired{On: true, Config: cfg}) // at any time
//	err = capture.Keep(ctx)                                    // keep the kernel in the desired state
//
// A [Capture] changes the kernel, a [Config] says what it captures, and [Rules] are the
// rules as text.
//
// # The rules
//
// [Build] makes the rules of a [Config]. They are in chains of nametap (NAMETAP_OUTPUT, NAMETAP_PREROUTING), whose
// names alone distinguish them from the rules of other programs. In table nat, a chain redirects the test query
// ([TestAddr]), returns excluded packets (packets of the agent first), and redirects the rest to the agent. In
// table raw, a chain of the same name does the same for UDP, with the conntrack zone instead of the redirect: an
// application and the agent may use the same source port to the same server, and only the zone distinguishes these
// two flows. The zone applies only to the original direction, because an ICMP error of a dead agent must reach the
// client. TCP needs no zone, because the kernel gives no two sockets the same four-tuple. So a TCP connection that
// is open while rules are installed or removed stays with its peer, as long as a rule of any program makes the
// kernel track connections.
//
// Table filter accepts the packets of redirected flows, which a firewall does not know.
//
// # The lease
//
// With [Config].Lease, each chain that redirects, or sets the zone, returns unless the lease of its family was
// renewed in the last [LeaseTime] (iptables' match recent). The agent renews the lease while it answers: it sends a
// datagram to loopback, and a rule of table raw records that as a renewal. Sending it needs no capability. So the
// kernel ends the capture of an agent that was killed, hangs or is missing, and the rules stay in place for the
// next agent. Nothing has to be dropped from conntrack then: table raw decides packet by packet whether a query
// belongs to the zone. So the next query of a client that keeps its socket takes the new path, too.
//
// Packets with [ProbeHops] are redirected without a lease: they show whether queries would reach the agent.
//
// # How the rules get into the kernel
//
// One goroutine changes rules. It compares what is desired with what it knows of the
// kernel and takes one step at a time:
//
//	desired   known                     step
//	on        the rules are installed   check after each change of nft rules, and every
//	                                    Config.Interval if the kernel does not announce them; repair
//	on        anything else             apply
//	off       nothing is left           none
//	off       the chains are unhooked   remove, after the settle time
//	off       anything else             unhook
//
// A step that fails is taken again later. A new desired value ends every wait.
//
//	capture.go      Capture: the loop that takes the steps to the desired value, and the methods for other goroutines
//	desired.go      the desired value, and the next step to it
//	watch.go        changes of nft rules, as the kernel announces them
//	status.go       what is in the kernel, and the texts that Apply would pass to iptables-restore
//	install.go      the steps: apply, unhook and remove, of both families and backends
//	check.go        what this machine lacks: capabilities, tools and rules; go-iptables looks for single rules
//	others.go       rules of Istio and ztunnel for port 53
//	entries.go      which conntrack entries keep sockets on their old path, and when they are dropped
//	firewall.go     when table filter is repaired, while another program changes rules
//	installed.go    what this process has installed, and what is missing
//	backend.go      what nft and legacy have, and which of them to use
//	place.go        one family in one backend: save, restore, verify, retry, roll back
//	tools.go        iptables-save and iptables-restore, and what their errors mean
//	fingerprint.go  whether rules may have changed in the kernel
//	legacy.go       what the kernel itself says about legacy's tables
//	nft.go          what only nf_tables itself can do: generations, deleting a table
//	variant.go      the rules of a Config, complete or without what this machine lacks
//	build.go        the rules of a Config
//	rules.go        rules as text: how the kernel differs from them, and the text that repairs it
//	save.go         the output of iptables-save, parsed
//	lease.go        the time for which the rules match, and requests about it
//	permission.go   capabilities, and what else may refuse the tools
//	fault.go        kinds of errors: a lack, a lasting fault, or one that may pass
//	config.go       what is captured, and what is excluded
//	names.go        the names of nametap's chains and tables
//
// A restore is atomic for each table, and changes nat before raw. A flow that begins between the two is redirected,
// but its conntrack entry is not in the zone. The application's next query is in the zone, so it does not use this
// entry, but a query of the agent from the same port would. So such entries are dropped: by a check when no reply
// can be in flight, and by unhook at once.
//
// A TCP connection leaves an entry, too. In three cases the next connection from the same port takes over the
// entry, with its redirect or without one: the server has reset the connection, the SYN of the connection had no
// reply, or the kernel began to track the connection in the middle and has seen no reply since. Such entries are
// dropped when rules change. After all other ends the kernel makes a new entry.
package iptables
