// Package soak has only a test, which runs nametap while everything around it fails, restarts and changes, in rounds, and
// checks every answer.
//
// A host and its network are two network namespaces:
//
//	host     the real agent, with the rules of --capture, and with sockets and directories as from
//	         its systemd units; three loads, two for mesh names, by family, and one for forwarded names
//	network  the real nametap-discovery; nameservers at 10.0.0.53 (A), fd00::53 (A) and
//	         10.0.0.54 (B)
//
// Once a second, all addresses of 1,000 hosts change. Each address has the number of its host and of its generation, so an
// answer tells which table it is from: no later query gets an answer from an earlier table. Forwarded names have addresses
// that follow from the name.
//
// In each round one to three faults, chosen at random, begin, last for a while and end. A query in it may only end in the ways
// that one of these faults explains. Then no more queries may end badly, and the newest table must come.
//
// Files: soak_test.go the rounds and the faults, world_test.go the host and its network, tables_test.go the tables.
package soak
