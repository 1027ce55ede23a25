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
//
// All files but this one are tests:
//
//	world_test.go      the namespaces, the control plane, the agent, the processes of servers and their certificate
//	databases_test.go  two MariaDB servers on one port
//	mail_test.go       Exim
//	web_test.go        nginx behind a wildcard, with curl
//	proxy_test.go      tinyproxy as the only way out of the host
package egress
