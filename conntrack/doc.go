// Package conntrack asks the kernel's connection tracking: it lists and deletes entries
// ([Dump], [Delete]) and finds the original destination of captured traffic ([UDP],
// [OriginalTCP]), which REDIRECT and DNAT have replaced. A [Conn] also carries requests to
// the other subsystems of netfilter, such as nf_tables.
//
// The original destination of a TCP connection is a socket option of the connection. A
// UDP socket has many peers, so its packets are looked up over netlink, which takes
// CAP_NET_ADMIN. Both lookups use the reply direction, the one from the local address to
// the client: rules with CT --zone-orig put only the original direction into a zone of
// its own, so the reply direction is found in zone 0 with and without them. An entry whose
// reply direction is in another zone (CT --zone) is not found.
//
// The netlink code is nametap's own. The lookup of a captured UDP query runs once for each
// cache hit and must not allocate, so requests and replies have to be framed here in any
// case; the rest is about 60 lines. github.com/mdlayher/netlink (1.11.2) would replace these
// and make the agent's binary 250 KB larger, and it drops the message that ends a dump,
// which may be the one that says that the dump was interrupted. The conntrack part of
// github.com/vishvananda/netlink (1.3.1) reads the whole table into memory and does not
// read the zone of one direction (CTA_TUPLE_ZONE), by which nametap tells its entries.
package conntrack
