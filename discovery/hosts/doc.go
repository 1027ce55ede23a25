// Package hosts turns objects into hosts and their addresses, and keeps them up to date: the cost
// of a changed object depends on the hosts that depend on it, not on the number of objects.
//
// The steps are objects, claims, hosts, entries. A claim is what one object says about one host. A
// [Host] has all claims to it and its automatic VIP. An [Entry] is its line in the name table of the
// clients that share a [View], encoded.
//
// Nothing here locks. Hosts and entries do not change after they are made, but a host remembers the
// entries that it has made, so its users need a common lock.
package hosts
