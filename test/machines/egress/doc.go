// Package egress has tests of connections to automatic VIPs (docs/egress.md) with real servers and
// real clients, which know nothing of nametap.
//
// A host and its network are two network namespaces:
//
//	host     the real agent, with --capture and --egress; the clients
//	network  the real nametap-discovery, with the ServiceEntries of world_test.go; a nameserver; the
//	         servers, each on an address of its own
//
// A client gets a name, and resolves it by a resolv.conf whose nameserver is in the network. So each test
// takes the whole way: the query is captured, the name has a VIP, the connection is captured, and the
// agent connects it to the host.
package egress
