// Package origdst tells where captured traffic was on its way to: REDIRECT and DNAT
// change the destination of a packet, and the kernel's connection tracking knows
// the one before.
//
// For a TCP connection the socket itself is asked ([TCP]). A UDP socket has many
// peers, so connection tracking is asked through netlink ([OpenUDP], [UDP.Lookup]),
// which needs CAP_NET_ADMIN. Both go by the reply's direction, the one from the
// local address to the client: rules with CT --zone-orig put only the original
// direction into a zone of its own, so it is found in zone 0 with and without them.
// An entry whose reply direction is in another zone (CT --zone) is not found.
package origdst
