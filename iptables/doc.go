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
// [Build] makes the rules of a [Config]. They are in chains of nametap's own, whose names begin with NAMETAP_.
// A rule belongs to nametap if it is in such a chain or jumps to one: nothing else distinguishes it from the rules
// of other programs. In table nat, a chain first redirects the test query ([TestAddr]). Then it lets excluded
// packets pass (target RETURN), first of all the packets of the agent, and redirects the rest to the agent. In table
// raw, a chain of the same name does the same for UDP, but it puts queries into a conntrack zone instead of
// redirecting them. The kernel tracks each flow by a key, and the zone is a number in this key. An application and
// the agent may use the same source port to the same server. Only the zone distinguishes these two flows. The zone
// applies only to the original direction of a flow. Otherwise a client would not get the ICMP error for a query to
// an agent that has ended. TCP needs no zone, because the kernel never gives two sockets the same addresses and
// ports at both ends. A TCP connection that is open while rules are installed or removed stays with its peer, as
// long as a rule of any program makes the kernel track connections.
//
// In table filter, nametap's rules accept the packets of redirected flows: a firewall that allows queries to a
// nameserver may know nothing of packets to the agent.
//
// # The lease
//
// With [Config].Lease, the rules capture queries only as long as an agent answers. Each chain that redirects packets
// or sets the zone has a rule that lets queries pass through if the lease of the family was not renewed in the last
// [LeaseTime]. The rule uses iptables' match recent. While the agent answers, it renews the lease: it sends a
// datagram to loopback, and a rule of table raw records the datagram as a renewal. Sending the datagram needs no
// capability. So the kernel itself ends the capture if the agent was killed, hangs or is missing, and the rules stay
// in place for the next agent. When the capture ends in this way, no conntrack entry of a UDP query has to be
// dropped, because table raw decides packet by packet whether a query belongs to the zone. So even a client that
// keeps its socket sends its next query on the new path.
//
// The agent's probes are redirected even if the lease has ended. A probe is a query with a certain TTL
// ([ProbeHops]), and shows whether queries of clients would reach the agent.
//
// # The guard
//
// With [Config].Guard, a chain of table filter, before all other rules, refuses what is not for this host, the agent, a VIP
// or a listed network. It needs no list of VIPs, since table nat has redirected packets to them. There is no reduced variant
// without this chain, and a step that fails leaves it: what is missing then is refused.
//
// # How the rules get into the kernel
//
// One goroutine changes rules. It compares what is desired with what it knows of the kernel, and takes one step at a time.
// While capture is on, it installs the rules, and repairs them when it finds them changed: it reads them after each change
// of nft rules, once a minute if the kernel does not announce changes (legacy), and when a probe was not answered. When
// capture is to end, it first unhooks the chains, and removes them after the settle time.
//
// A step that fails is taken again later. A new desired value ends every wait.
//
//	capture.go      Capture: the loop that takes the steps to the desired value, and the methods for other goroutines
//	desired.go      the desired value
//	watch.go        changes of nft rules, as the kernel announces them
//	status.go       what is in the kernel
//	install.go      the steps: apply, unhook and remove, of both families; the choice of the backend
//	check.go        what this machine lacks: capabilities, tools and rules
//	entries.go      which conntrack entries keep sockets on their old path, and when they are dropped
//	firewall.go     how long a repair of table filter waits for a program that changes rules
//	installed.go    what this process has installed, and what is missing
//	backend.go      the two backends of iptables, nft and legacy: what they have, which tables exist, which one to use
//	place.go        one family in one backend: restore, verify, retry, roll back
//	tools.go        iptables-save and iptables-restore, and what their errors mean
//	variant.go      the rules of a Config, complete or in table nat alone
//	build.go        the rules of a Config
//	guard.go        the rules that refuse or, in an audit, count what a policy does not allow
//	rules.go        rules as text: names, how the kernel differs from them, and the text that repairs it
//	save.go         the output of iptables-save, parsed
//	lease.go        the lease, and the datagrams that renew it, end it or ask about it
//	permission.go   capabilities, and what else may refuse the tools
//	fault.go        kinds of errors: missing, refused, or temporary
//	config.go       what is captured, and what is excluded
//
// A conntrack entry that was made under previous rules, or while iptables-restore had changed only some of the tables, may
// keep a socket on its old path. entries.go says which entries are dropped, and when.
package iptables
