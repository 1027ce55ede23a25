// Package iptables captures DNS: it sends what applications ask on port 53 to
// the agent's port, and lets the agent's own queries to nameservers through.
//
//	rules, err := iptables.Build(iptables.DefaultConfig())
//	fmt.Print(rules.Text(iptables.IPv4))
//
//	capture, err := iptables.New(iptables.DefaultConfig(), slog.Default())
//	err = capture.Apply(ctx)  // rules in, by one iptables-restore a family
//	err = capture.Run(ctx)    // and kept there
//	err = capture.Remove(ctx) // all that is ours out again, whatever was set
//
// # The rules
//
// [Build] makes them from a [Config], as a value. They stand in chains of our
// own (NAMETAP_OUTPUT, NAMETAP_PREROUTING), so that what is ours can be told from
// their names alone. In table nat, a chain first returns what is excluded (the
// agent before all others) and redirects the rest to the agent. In table raw, a
// chain of the same name does the same for UDP, with the conntrack zone in place
// of the redirection: an application and the agent may use one source port to
// one server, and only the zone tells these two flows apart. The zone holds for
// the original direction alone, so that an ICMP error of a dead agent still
// finds its way to the client. TCP needs no zone, since the kernel gives no two
// sockets the same four-tuple, and without one a connection that is open while
// rules come or go ends where it began.
//
// # How they get into the kernel
//
//	save.go    what iptables-save says, parsed
//	drift.go   how that differs from rules, and the text that mends it
//	tools.go   iptables-save and iptables-restore
//	fault.go   what their errors mean: a lack, a lasting fault, or one that may pass
//	legacy.go  what the kernel says of legacy's tables by itself
//	backend.go nft or legacy
//	apply.go   one family: save, restore, verify, retry, do with less, roll back
//	capture.go Capture and Apply: both families, both backends, one at a time
//	remove.go  Remove: first what leads to our chains, then these
//	run.go     the loop that looks for drift, and for what was missing
//	check.go   what this machine has and lacks for the rules
//	checkrules.go the version of the tools, and single rules, by go-iptables
//	sweep.go   which conntrack entries keep sockets on their old path
//	nft.go     what only nf_tables itself can do: generations, deleting a table
//
// A restore is atomic for each table, and nat comes before raw. A flow that
// begins between the two has its redirection without a zone. An application
// leaves it with its next query, which is in the zone; but the agent would take
// it if it sent from the same port, so sweep.go drops such entries: Run does
// when no reply can be on its way any more, and Remove does first of all.
package iptables
