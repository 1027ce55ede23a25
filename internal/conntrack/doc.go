// Package conntrack uses the kernel's connection tracking: it lists and deletes entries
// ([List], [Delete]) and finds the original destination of captured traffic ([UDP],
// [OriginalTCP]), which REDIRECT and DNAT have replaced. [Exchange] also carries requests
// to the other subsystems of netfilter, such as nf_tables.
//
// The original destination of a TCP connection is a socket option of the connection. A UDP socket has many peers,
// so its packets are looked up over netlink, which needs CAP_NET_ADMIN. Both lookups use the reply direction, from
// the local address to the client. Rules with CT --zone-orig put only the original direction into a zone of its
// own. So the reply direction is found in zone 0, with and without such rules. An entry whose reply direction is in
// another zone (CT --zone) is not found.
//
// Requests are sent with package nl of the library github.com/vishvananda/netlink. The library also has functions
// that list and delete entries, but they do not suffice: they read the whole table into memory, filter there, and
// ignore the zone of one direction (CTA_TUPLE_ZONE), by which nametap recognises its entries. The lookup of a
// captured UDP query, which runs once for each query, is made without the library: it takes 6 µs of processor time
// and allocates nothing. With the library it would take 16 µs and allocate 16 times.
package conntrack
