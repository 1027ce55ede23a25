// Package soak runs nametap for 20 minutes while everything around it fails, restarts and changes, and checks every
// answer.
//
// A host and its network are two network namespaces:
//
//	host     the real agent, with the rules of --capture, and with sockets and directories as from
//	         its systemd units; two loads, one for each family
//	network  the real nametap-discovery; nameservers at 10.0.0.53 (A), fd00::53 (A) and
//	         10.0.0.54 (B)
//
// Once a second, all addresses of 10,000 hosts change. Each address has the number of its host
// and of its generation, so an answer tells which table it is from. The test checks that
// the table is recent, and that no later query gets an answer from an earlier table.
// Forwarded names have addresses that follow from the name.
//
// Meanwhile, each at random times of its own:
//
//	control         the control plane is killed and started again
//	nameservers     nameservers refuse, are silent or fail, one or both; resolv.conf changes
//	rules           the capture rules are flushed, in whole or in part
//	service         the agent is restarted, killed and stopped (SIGSTOP), in the last part
//
// All files but this one are tests, and end in _test.go. judge_test.go says which bad answers
// have a cause, and levels_test.go compares memory, descriptors, goroutines and conntrack
// entries over time.
package soak
